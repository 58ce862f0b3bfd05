"""Acceptance of a draft on one answer of the target, in PyTorch: with slots as configured, and shifted by one.

In z-lab's drafts, slot 0 of a block holds the anchor, and slot i predicts the i-th token after the anchor. In
anchor-first drafts slot 0 already predicts the token after the anchor. If a config names the wrong layout, hardly any
draft is accepted. Only first drafts are checked, the guesses for the token after the anchor.
"""

from collections.abc import Sequence
from typing import cast

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer, PreTrainedModel

from sglang_dflash.reference.torch import DraftModel
from sglang_dflash.reference.torch.generate import draft_logits, hidden_of_blocks
from sglang_dflash.reference.torch.target import stop_token_ids

PROMPT = "Count from one to twenty in words, then explain in a few sentences how to make tea."
USEFUL = 0.1  # share of accepted first drafts below which the draft does not match the target
SHIFTED = 2  # ratio of shifted to unchanged acceptance above which the layout is another one
SHIFTS = {0: "with its slots", 1: "with slots shifted by one"}


def measure(target_path: str, draft_path: str, n_steps: int) -> str:
    """Draft a block at each of `n_steps` positions of the target's greedy answer, and count accepted first drafts.

    Returns:
        A sentence with the share of accepted first drafts.

    Raises:
        ValueError: the draft is invalid, or see `first_drafts_accepted` and `verdict`.
    """
    target = AutoModelForCausalLM.from_pretrained(target_path, dtype="auto").eval()
    draft = DraftModel.from_pretrained(draft_path, dtype=target.dtype, device=target.device)
    prompt = prompt_ids(target_path)
    text = answer(target, prompt, n_steps + draft.config.block_size)
    shares = first_drafts_accepted(draft, target, text, len(prompt), n_steps)
    return verdict(shares, n_steps)


def prompt_ids(target_path: str) -> list[int]:
    """Return the prompt's tokens, as a user's chat message if the tokenizer has a chat template."""
    tokenizer = AutoTokenizer.from_pretrained(target_path)
    if tokenizer.chat_template is None:
        return tokenizer.encode(PROMPT)
    turn = [{"role": "user", "content": PROMPT}]
    return cast(list[int], tokenizer.apply_chat_template(turn, add_generation_prompt=True, return_dict=False))


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
    """Return the share of anchors whose next token the right slot predicts (key 0), and the other (key 1, shifted).

    The first of the slots that predict drafts is right, see `Draft.predicting`.

    Args:
        text: int64 [tokens].
        first: position of the first of `n_steps` consecutive anchors.
    Raises:
        ValueError: no token follows the first anchor.
    """
    at_A = torch.arange(first, min(first + n_steps, len(text) - 1), device=text.device)
    if not len(at_A):
        raise ValueError("the target generated no token for the check's prompt; give another --draft-steps")
    hidden_ANH = hidden_of_blocks(draft, target, text, at_A, (draft.config.n_drafts + 1, None))
    tokens_AN = draft.listed(draft_logits(hidden_ANH, target)).argmax(-1)
    next_A, right = text[at_A + 1], int(draft.predicting(torch.arange(hidden_ANH.shape[1])[:, None])[0])
    return {shift: (tokens_AN[:, abs(right - shift)] == next_A).float().mean().item() for shift in SHIFTS}


def verdict(shares: dict[int, float], n_steps: int) -> str:
    """Return a sentence if the target accepts the draft with unchanged slots.

    Raises:
        ValueError: the target does not accept the draft; the message has the shares with unchanged and shifted slots.
    """
    shown = ", ".join(f"{shares[shift]:.0%} {how}" for shift, how in SHIFTS.items())
    if shares[1] >= USEFUL and shares[1] > SHIFTED * shares[0]:
        raise ValueError(
            f"drafts are accepted if shifted by one ({shown}); correct sample_from_anchor in the draft's config.json, "
            "or give another draft"
        )
    if shares[0] < USEFUL:
        raise ValueError(
            f"hardly any draft is accepted ({shown}, {n_steps} steps): perhaps it was trained for another target or "
            "other text; give this target's draft, or with fewer than 20 steps raise --draft-steps"
        )
    return f"accepted as it is: {shares[0]:.0%} of the first drafts of {n_steps} steps"
