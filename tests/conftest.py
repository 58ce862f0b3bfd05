"""Two processes share the tests: one runs those that share servers, the other the rest meanwhile, file by file."""

from pathlib import Path

import pytest
from xdist.scheduler import LoadScopeScheduling

SERVER = Path(__file__).parent / "server"


class ByServers(LoadScopeScheduling):
    def _split_scope(self, nodeid: str) -> str:
        file, *_ = nodeid.split("::")
        return "servers" if Path(file).is_relative_to("tests/server") else file


def pytest_xdist_make_scheduler(config: pytest.Config, log: object) -> ByServers:
    return ByServers(config, log)


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        if item.path.is_relative_to(SERVER):
            item.add_marker(pytest.mark.server)
