"""What the place of a server, alone or one of two, decides about its stages."""

from types import SimpleNamespace

import pytest

from sglang_dflash import flags
from sglang_dflash.errors import NotSupported
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


def widths_of(**said: str) -> tuple[int, ...]:
    env = {f"SGLANG_DFLASH_{name.upper()}": value for name, value in said.items()}
    return tuple(build.widths_of(flags.read(env), SimpleNamespace(model_config=None), 16))  # type: ignore[arg-type]


def test_widths_are_those_that_copies_and_the_target_allow(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(build, "prompts_only", lambda: False)
    monkeypatch.setattr(build, "get_disagg", lambda: SimpleNamespace(disaggregation_mode="null"))
    monkeypatch.setattr(build, "why_whole_blocks", lambda model_config: "")
    assert widths_of(widths="4,32") == (4, 32)
    with pytest.raises(NotSupported, match=r"32 is wider than the block of 16, .*SGLANG_DFLASH_COPY=off"):
        widths_of(widths="4,32", copy="off")
    monkeypatch.setattr(build, "why_whole_blocks", lambda model_config: "its states")
    assert widths_of() == (16,)
    with pytest.raises(NotSupported, match=r"whole blocks are verified \(its states\)"):
        widths_of(widths="4,16")
