"""`check --draft-steps` must pass the tiny draft, recognise shifted slots and refuse another target's draft."""

from dataclasses import replace

import pytest
import torch

from sglang_dflash.pairs.tiny.pairs import DENSE
from sglang_dflash.reference.torch import DraftModel
from sglang_dflash.tools.check import draft_steps
from sglang_dflash.tools.check.__main__ import draft_steps as asked


def report(draft: object = DENSE.draft) -> tuple[bool, str]:
    (finding,) = asked(["--model-path", str(DENSE.target), "--speculative-draft-model-path", str(draft)], 20)
    return finding.ok, finding.text


@pytest.mark.parametrize(
    ("change", "ok", "begins"),
    [
        (lambda hidden: hidden, True, "accepted as it is: "),
        # Slot i gets the hidden state of slot i + 1, so slot 0 predicts the token after the anchor.
        (lambda hidden: hidden.roll(-1, dims=1), False, "drafts are accepted if shifted by one"),
        (torch.randn_like, False, "hardly any draft is accepted"),
    ],
    ids=["the tiny pair", "shifted", "of another target"],
)
def test_acceptance_separates_right_shifted_and_wrong_drafts(change, ok, begins, monkeypatch):
    of_blocks = draft_steps.hidden_of_blocks
    monkeypatch.setattr(draft_steps, "hidden_of_blocks", lambda *args: change(of_blocks(*args)))
    found, text = report()
    assert found is ok
    assert text.startswith(begins)


@pytest.mark.parametrize("kind", ["sample_from_anchor", "shift_label"])
def test_slots_are_those_that_the_config_names(kind, tmp_path, monkeypatch):
    """The tiny draft's hidden states are moved by one slot, and the config says so."""
    draft = DraftModel.from_pretrained(DENSE.draft)
    draft.config = replace(draft.config, **{kind: True})
    of_blocks = draft_steps.hidden_of_blocks
    monkeypatch.setattr(draft_steps, "hidden_of_blocks", lambda *args: of_blocks(*args).roll(-1, dims=1))
    monkeypatch.setattr(draft_steps.DraftModel, "from_pretrained", lambda *args, **options: draft)
    assert draft_steps.measure(str(DENSE.target), str(DENSE.draft), 20).startswith("accepted as it is: ")


def test_a_useful_draft_passes_with_somewhat_more_shifted_hits():
    assert draft_steps.verdict({0: 0.5, 1: 0.55}, 2).startswith("accepted as it is: 50%")
    with pytest.raises(ValueError, match="accepted if shifted by one"):
        draft_steps.verdict({0: 0.2, 1: 0.5}, 10)


def test_missing_draft_is_a_finding():
    ok, text = report("/nowhere")
    assert not ok
    assert "/nowhere" in text
