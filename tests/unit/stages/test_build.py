"""What the place of a server, alone or one of two, decides about its stages."""

from types import SimpleNamespace

import pytest

from sglang_dflash import flags
from sglang_dflash.stages import build


@pytest.mark.parametrize(
    ("mode", "host_cache", "ours"),
    [("null", False, True), ("null", True, False), ("prefill", False, False), ("decode", False, False)],
)
def test_slots_are_filled_by_others_too(
    monkeypatch: pytest.MonkeyPatch, mode: str, host_cache: bool, ours: bool
) -> None:
    monkeypatch.setattr(build, "get_memory", lambda: SimpleNamespace(enable_hierarchical_cache=host_cache))
    monkeypatch.setattr(build, "get_disagg", lambda: SimpleNamespace(disaggregation_mode=mode))
    assert build.slots_are_ours() is ours


def test_a_server_that_reads_prompts_verifies_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(build, "prompts_only", lambda: True)
    assert build.widths_of(flags.read({}), SimpleNamespace(model_config=None), 16) == ()
