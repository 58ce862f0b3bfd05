"""Two processes share the tests: one runs those that share servers, the other the rest meanwhile, file by file."""

import pytest
from xdist.scheduler import LoadScopeScheduling


def uses_servers(nodeid: str) -> bool:
    return nodeid.startswith("tests/server/")


class ByServers(LoadScopeScheduling):
    def _split_scope(self, nodeid: str) -> str:
        return "servers" if uses_servers(nodeid) else nodeid.split("::")[0]


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config: pytest.Config, log: object) -> ByServers:
    return ByServers(config, log)


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        if uses_servers(item.nodeid):
            item.add_marker(pytest.mark.server)
