"""Dry runs on a CPU: servers are forked from one process that has imported SGLang, as in the tests."""

import os
from collections.abc import Mapping
from types import MappingProxyType
from typing import Any


def is_dry() -> bool:
    return os.environ.get("GPU_DRY") == "1"


def server_class(early: Mapping[str, str] = MappingProxyType({})) -> Any:
    """Return the class of forked servers.

    Args:
        early: variables that SGLang reads when it is imported. The first call sets them for the forking process.
    """
    from tests.fixtures import forking
    from tests.server.lib.forked import ForkedServer

    if forking.RUN not in os.environ:
        os.environ[forking.RUN] = str(os.getpid())
        plain = forking.environment
        forking.environment = lambda: plain() | early
    return ForkedServer
