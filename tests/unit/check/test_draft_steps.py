"""Is the draft accepted: the tiny pair is, with its slots shifted it would be shifted, and a wrong draft is not."""

import pytest
import torch

from sglang_dflash.check import draft_steps
from sglang_dflash.check.__main__ import draft_steps as asked
from sglang_dflash.tiny.pairs import DENSE


@pytest.fixture
def found(monkeypatch: pytest.MonkeyPatch) -> dict[str, str]:
    return {"--model-path": str(DENSE.target), "--speculative-draft-model-path": str(DENSE.draft)}


def report(flags: dict[str, str]) -> tuple[bool, str]:
    (finding,) = asked([part for flag in flags.items() for part in flag], 20)
    return finding.ok, finding.text


def test_tiny_pair_is_accepted(found: dict[str, str]) -> None:
    ok, text = report(found)
    assert ok
    assert text.startswith("accepted as it is: ")


def test_shifted_draft_is_told(found: dict[str, str], monkeypatch: pytest.MonkeyPatch) -> None:
    """Slot 0 of this one holds what slot 1 of the other does."""
    of_blocks = draft_steps.hidden_of_blocks
    monkeypatch.setattr(draft_steps, "hidden_of_blocks", lambda *args: of_blocks(*args).roll(-1, dims=1))
    ok, text = report(found)
    assert not ok
    assert text.startswith("would be accepted shifted by one")


def test_draft_of_another_target_is_told(found: dict[str, str], monkeypatch: pytest.MonkeyPatch) -> None:
    of_blocks = draft_steps.hidden_of_blocks
    monkeypatch.setattr(draft_steps, "hidden_of_blocks", lambda *args: torch.randn_like(of_blocks(*args)))
    ok, text = report(found)
    assert not ok
    assert text.startswith("nothing is accepted")


def test_missing_draft_is_a_finding(found: dict[str, str]) -> None:
    ok, text = report(found | {"--speculative-draft-model-path": "/nowhere"})
    assert not ok
    assert "/nowhere" in text
