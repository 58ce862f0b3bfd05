"""Acceptance of a draft on one or more answers of the target, in PyTorch: with slots as configured, and shifted by one.

In z-lab's drafts, slot 0 of a block holds the anchor, and slot i predicts the i-th token after the anchor. In
anchor-first drafts slot 0 already predicts the token after the anchor. If a config names the wrong layout, hardly any
draft is accepted. Only first drafts are checked, the guesses for the token after the anchor.
"""

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple, cast

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer, PreTrainedModel, PreTrainedTokenizerBase
from transformers.utils import logging

from sglang_dflash.cli import read_text
from sglang_dflash.engine.draft.files import is_hub_name, no_directory
from sglang_dflash.reference.torch import DraftModel
from sglang_dflash.reference.torch.generate import draft_logits, hidden_of_blocks
from sglang_dflash.reference.torch.target import stop_token_ids

PROMPT = "Count from one to twenty in words, then explain in a few sentences how to make tea."
N_PROMPTS = 4  # prompts of --data that are answered at most; they share the steps
USEFUL = 0.1  # share of accepted first drafts below which the draft does not match the target
SHIFTED = 2  # ratio of shifted to unchanged acceptance above which the layout is another one
SHIFTS = {0: "with its slots", 1: "with slots shifted by one"}


class Pair(NamedTuple):
    """Folders or hub names of a target and a draft, with their revisions on the hub."""

    target: str
    draft: str
    revision: str | None = None
    draft_revision: str | None = None


def measure(pair: Pair, n_steps: int, data: Path | None = None) -> str:
    """Draft blocks at `n_steps` positions of the target's greedy answers, and count accepted first drafts.

    Args:
        data: JSONL file whose first prompts are answered. None: `PROMPT` is answered.

    Returns:
        A sentence with the share of accepted first drafts.

    Raises:
        ValueError: the draft or the file is invalid, or see `first_drafts_accepted` and `verdict`.
    """
    if not (Path(pair.target).exists() or is_hub_name(pair.target)):
        raise ValueError(f"--model-path {no_directory(pair.target)}")
    logging.set_verbosity_error()  # warnings about the target do not concern the draft
    turns = read_turns(data)[:n_steps] if data else [[{"role": "user", "content": PROMPT}]]
    tokenizer = AutoTokenizer.from_pretrained(pair.target, revision=pair.revision)
    target = AutoModelForCausalLM.from_pretrained(pair.target, dtype="auto", revision=pair.revision).eval()
    draft = DraftModel.from_pretrained(
        pair.draft, dtype=target.dtype, device=target.device, revision=pair.draft_revision
    )
    n_each, found = -(-n_steps // len(turns)), []
    for its_turns in turns:
        prompt = prompt_ids(tokenizer, its_turns)
        text = answer(target, prompt, n_each + draft.config.block_size)
        found.append(first_drafts_accepted(draft, target, text, len(prompt), n_each))
    shares = {shift: sum(one[shift] for one in found) / len(found) for shift in SHIFTS}
    what = (
        f"answers to the first prompts of {data.name}" if data else f'an answer to "{PROMPT}" (other prompts: --data)'
    )
    return verdict(shares, f"{n_each * len(turns)} steps of {what}")


def read_turns(path: Path) -> list[list[dict[str, Any]]]:
    """Return the first `N_PROMPTS` conversations of a JSONL file, each up to its last user turn.

    Raises:
        ValueError: there is no such file, or a line has neither chat `messages` with a user turn nor a `prompt`.
    """
    found = []
    for number, line in enumerate(read_text(path).split("\n"), start=1):  # JSON strings may contain other line ends
        if not line.strip():
            continue
        try:
            fields = json.loads(line)
            turns = fields.get("messages") or [{"role": "user", "content": fields["prompt"]}]
            n = max(i for i, turn in enumerate(turns, start=1) if turn["role"] == "user")
        except (ValueError, KeyError, TypeError, AttributeError):
            raise ValueError(f'{path}:{number} has no "prompt" and no "messages" with a user turn; add one') from None
        found.append(turns[:n])
        if len(found) == N_PROMPTS:
            break
    if not found:
        raise ValueError(f'{path} has no line; write JSON objects with a "prompt" or "messages", one per line')
    return found


def prompt_ids(tokenizer: PreTrainedTokenizerBase, turns: Sequence[dict[str, Any]]) -> list[int]:
    """Return the tokens of a conversation, rendered with the tokenizer's chat template if it has one."""
    if tokenizer.chat_template is None:
        return tokenizer.encode("\n".join(turn["content"] for turn in turns))
    return cast(list[int], tokenizer.apply_chat_template(list(turns), add_generation_prompt=True, return_dict=False))


@torch.inference_mode()
def answer(target: PreTrainedModel, prompt: Sequence[int], n_tokens: int) -> torch.Tensor:
    """Return prompt and greedy answer, int64 [tokens]. The answer has `n_tokens` tokens: end tokens are suppressed."""
    ids_1S = torch.tensor([list(prompt)], device=target.device)
    ends = list(stop_token_ids(target))
    return target.generate(  # type: ignore[operator]  # a method that transformers mixes in
        ids_1S, attention_mask=torch.ones_like(ids_1S), max_new_tokens=n_tokens, do_sample=False, suppress_tokens=ends
    )[0]


@torch.inference_mode()
def first_drafts_accepted(
    draft: DraftModel, target: PreTrainedModel, text: torch.Tensor, first: int, n_steps: int
) -> dict[int, float]:
    """Return the share of anchors whose next token a slot predicts, by shift (`SHIFTS`).

    Key 0: the slot that predicts the first draft by the draft's config (`Draft.predicting`), slot 0 or slot 1.
    Key 1: the other one of these two slots.

    Args:
        text: int64 [tokens].
        first: position of the first of `n_steps` consecutive anchors.
    Raises:
        ValueError: no token follows the first anchor.
    """
    at_A = torch.arange(first, min(first + n_steps, len(text) - 1), device=text.device)
    if not len(at_A):
        raise ValueError("the target generated no token for the prompt; give another one with --data")
    hidden_ANH = hidden_of_blocks(draft, target, text, at_A, (draft.config.n_drafts + 1, None))
    tokens_AN = draft.listed(draft_logits(hidden_ANH, target)).argmax(-1)
    next_A, right = text[at_A + 1], int(draft.predicting(torch.arange(hidden_ANH.shape[1])[:, None])[0])
    return {shift: (tokens_AN[:, abs(right - shift)] == next_A).float().mean().item() for shift in SHIFTS}


def verdict(shares: dict[int, float], steps: str) -> str:
    """Return a sentence with the share of accepted first drafts, if the target accepts them with unchanged slots.

    Args:
        shares: share of accepted first drafts by shift, see `SHIFTS`.
        steps: phrase for the message, such as "20 steps of an answer to ...".

    Raises:
        ValueError: the target does not accept the draft; the message has the shares with unchanged and shifted slots.
    """
    shown = ", ".join(f"{shares[shift]:.0%} {how}" for shift, how in SHIFTS.items()) + f", in {steps}"
    if shares[1] >= USEFUL and shares[1] > SHIFTED * shares[0]:
        raise ValueError(
            f"drafts are accepted if shifted by one ({shown}); correct sample_from_anchor in the draft's config.json, "
            "or give another draft"
        )
    if shares[0] < USEFUL:
        raise ValueError(
            f"hardly any draft is accepted ({shown}): perhaps it was trained for another target or other text; give "
            "this target's draft, text of its kind with --data, or with fewer than 20 steps a larger --draft-steps"
        )
    return f"{shares[0]:.0%} of the first drafts are accepted, and slots are not shifted, in {steps}"
