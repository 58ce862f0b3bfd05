"""`check --draft-steps` must pass the tiny draft, recognise shifted slots and refuse another target's draft."""

import json
import re
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from sglang_dflash.pairs.tiny.pairs import DENSE
from sglang_dflash.reference.torch import DraftModel
from sglang_dflash.tools.check import draft_steps
from sglang_dflash.tools.check.__main__ import draft_steps as asked
from sglang_dflash.tools.check.draft_steps import Pair, read_turns


def report(draft: object = DENSE.draft, data: Path | None = None, *more: str) -> tuple[bool, str]:
    paths = ["--model-path", str(DENSE.target), "--speculative-draft-model-path", str(draft)]
    (finding,) = asked([*paths, *more], 20, data)
    return finding.ok, finding.text


@pytest.mark.parametrize(
    ("change", "ok", "begins"),
    [
        (
            lambda hidden: hidden,
            True,
            r"\d+% of the first drafts are accepted, and slots are not shifted, in 20 steps of",
        ),
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
    assert re.match(begins, text)
    assert 'in 20 steps of an answer to "Count from one to twenty in words, ' in text


@pytest.mark.parametrize("kind", ["sample_from_anchor", "shift_label"])
def test_slots_are_those_that_the_config_names(kind, tmp_path, monkeypatch):
    """The tiny draft's hidden states are moved by one slot, and the config says so."""
    draft = DraftModel.from_pretrained(DENSE.draft)
    draft.config = replace(draft.config, **{kind: True})
    of_blocks = draft_steps.hidden_of_blocks
    monkeypatch.setattr(draft_steps, "hidden_of_blocks", lambda *args: of_blocks(*args).roll(-1, dims=1))
    monkeypatch.setattr(draft_steps.DraftModel, "from_pretrained", lambda *args, **options: draft)
    assert "slots are not shifted" in draft_steps.measure(Pair(str(DENSE.target), str(DENSE.draft)), 20)


def test_a_useful_draft_passes_with_somewhat_more_shifted_hits():
    assert draft_steps.verdict({0: 0.5, 1: 0.55}, "2 steps").startswith("50% of the first drafts are accepted")
    with pytest.raises(ValueError, match="accepted if shifted by one"):
        draft_steps.verdict({0: 0.2, 1: 0.5}, "10 steps")


def test_missing_draft_is_a_finding():
    ok, text = report("/nowhere")
    assert not ok
    assert "/nowhere" in text


USER = {"role": "user", "content": "Count to 5."}
REPLY = {"role": "assistant", "content": "1"}


def test_prompts_of_a_file_replace_the_own_prompt(tmp_path, monkeypatch):
    """A conversation is cut after its last user turn. The steps are shared among the prompts."""
    data, answered = tmp_path / "mine.jsonl", []
    lines = [{"messages": [USER, REPLY, USER, REPLY]}, {"prompt": "Count to 5."}, {"messages": [USER]}]
    data.write_text("\n".join(map(json.dumps, lines)) + "\n\n")
    assert read_turns(data) == [[USER, REPLY, USER], [USER], [USER]]
    answer = draft_steps.answer
    monkeypatch.setattr(
        draft_steps, "answer", lambda target, prompt, n: answered.append((len(prompt), n)) or answer(target, prompt, n)
    )
    ok, text = report(DENSE.draft, data)
    assert ok
    assert text.endswith(", in 21 steps of answers to the first prompts of mine.jsonl")
    assert [n for _, n in answered] == [7 + 16] * 3
    assert answered[0][0] > answered[1][0] == answered[2][0]


def test_only_line_feeds_separate_the_lines_of_a_file(tmp_path):
    data, asked = tmp_path / "mine.jsonl", {"role": "user", "content": "a\u2028b"}
    data.write_text('\n{"prompt": "a\u2028b"}\n')
    assert read_turns(data) == [[asked]]
    data.write_text('{"prompt": "a\u2028b"}\n\n{}\n')
    with pytest.raises(ValueError, match=r"mine\.jsonl:3 has no"):
        read_turns(data)


@pytest.mark.parametrize("line", ["", "no JSON", "[]", '{"text": "a"}', json.dumps({"messages": [REPLY]})])
def test_a_file_without_prompts_is_refused(line, tmp_path):
    (tmp_path / "mine.jsonl").write_text(line)
    with pytest.raises(ValueError, match=r'mine.jsonl(:1 has no "prompt" and no "messages"| has no line)'):
        read_turns(tmp_path / "mine.jsonl")


def test_revisions_reach_both_models(monkeypatch):
    asked_of = []

    def loader(name):
        def load(source, **options):
            asked_of.append((name, source, options["revision"]))
            if name == "draft":
                raise OSError("not here")

        return load

    target = SimpleNamespace(eval=lambda: SimpleNamespace(dtype=torch.float32, device="cpu"))
    monkeypatch.setattr(draft_steps.AutoTokenizer, "from_pretrained", loader("tokenizer"))
    monkeypatch.setattr(
        draft_steps.AutoModelForCausalLM, "from_pretrained", lambda *a, **k: loader("target")(*a, **k) or target
    )
    monkeypatch.setattr(draft_steps.DraftModel, "from_pretrained", loader("draft"))
    assert report("org/draft", None, "--revision", "v1", "--speculative-draft-model-revision=v2") == (False, "not here")
    path = str(DENSE.target)
    assert asked_of == [("tokenizer", path, "v1"), ("target", path, "v1"), ("draft", "org/draft", "v2")]


def test_a_misspelt_target_is_no_name_on_the_hub():
    (finding,) = asked(
        ["--model-path", str(DENSE.target) + "s", "--speculative-draft-model-path", str(DENSE.draft)], 20
    )
    assert finding.text.endswith(f"targets is no directory; did you mean {DENSE.target}?")
