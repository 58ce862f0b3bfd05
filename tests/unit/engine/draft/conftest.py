"""Fixtures for tests of `sglang_dflash.engine.draft`."""

import pytest


@pytest.fixture(autouse=True)
def plugin_serves(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("SGLANG_DFLASH_WORKER", raising=False)
