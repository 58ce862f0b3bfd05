"""Speculative generation, one step at a time: draft a block, verify it with the target, keep the agreed prefix.

The target chooses a token at every slot: its argmax, or a sample at temperature > 0. Drafts are kept while they equal
the target's token. So the committed tokens are exactly the target's own, at any temperature.

This module has no batches and no serving engine: it uses only the draft's forward and `target.TargetReader`.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import takewhile

import torch
import torch.nn.functional as F
from transformers import PreTrainedModel

from sglang_dflash.engine.draft.generation import DecodedStep, ended
from sglang_dflash.reference.torch.copies import Copies, NoCopies
from sglang_dflash.reference.torch.draft import Begin, ContextKV, Draft
from sglang_dflash.reference.torch.target import NO_IMAGES, TargetReader, check_pair


@dataclass(frozen=True, kw_only=True)
class Options:
    """Options of a generation.

    block_size: tokens of a block, anchor and drafts; None: as many as the draft was trained for.
    width: number of tokens verified per step; more than the block only with `copies`. None: the block size.
    draft_window: largest number of context tokens that a block attends to; None: no limit.
    page_size: tokens per KV page. The window begins at a page boundary, so it is up to `page_size` - 1 tokens longer.
    n_unseen: the draft never attends to this many first tokens, as on a server whose ring buffer lacks a cached prefix.
    copies: replace the block's last guesses by n-gram copies, see `kernels/copy_draft.py`.
    generator: random generator for temperature > 0, on the target's device; None: torch's default.
    """

    max_new_tokens: int
    temperature: float = 0.0
    stop_token_ids: tuple[int, ...] = ()
    block_size: int | None = None
    width: int | None = None
    draft_window: int | None = None
    page_size: int = 1
    n_unseen: int = 0
    copies: bool = False
    generator: torch.Generator | None = None

    def __post_init__(self) -> None:
        if self.max_new_tokens < 1 or self.temperature < 0:
            raise ValueError(
                f"max_new_tokens is {self.max_new_tokens} and temperature {self.temperature}; "
                "ask for at least one token at a temperature of 0 or more"
            )

    def window(self, prefix_len: int) -> int:
        """Return how many of the `prefix_len` context tokens the draft attends to."""
        if self.draft_window is None:
            return prefix_len - self.n_unseen
        first = max(prefix_len - self.draft_window, self.n_unseen)
        return prefix_len - first + first % self.page_size


@torch.inference_mode()
def spec_steps(
    draft: Draft,
    target: PreTrainedModel,
    input_ids: torch.Tensor,
    options: Options,
    *,
    images: Mapping[str, torch.Tensor] = NO_IMAGES,
) -> Iterator[DecodedStep]:
    """Yield the steps of one generation; their `committed` tokens concatenated are the continuation.

    Args:
        input_ids: int64 [1, prompt].
        images: a processor's further outputs for a prompt with images: pixels, grids and token types.

    Raises:
        ValueError: draft, target, prompt and options do not match, or the target cannot undo rejected tokens.
    """
    check_pair(draft.config, target)
    N, width = _checked_sizes(draft, input_ids, options)
    reader = TargetReader(target, draft.config.target_layer_ids)
    reading = reader.read(input_ids, images)
    anchor = choose(reading.logits_1SV[0, -1:], options)  # int64 [1], still on the device
    context = draft.context_kv(reading.features_1SC.to(draft.dtype))
    copies = Copies(input_ids[0].tolist()) if options.copies else NoCopies()
    n_left = options.max_new_tokens
    step = ended(DecodedStep(anchor.tolist(), 0), options.stop_token_ids, n_left)
    yield step
    while (n_left := n_left - len(step.committed)) and step.committed[-1] not in options.stop_token_ids:
        block_N = draft_block(draft, target, anchor, context, (N, options.window(context.n_tokens)))
        tokens_N = copies.copy(F.pad(block_N[:width], (0, max(width - N, 0)), value=draft.config.mask_token_id))
        reading, undo = reader.read_block(tokens_N[None])
        target_N = choose(reading.logits_1SV[0], options)
        n_accepted = int((tokens_N[1:] == target_N[:-1]).long().cumprod(0).sum())
        n_committed = n_accepted + 1  # the bonus is the target's own token after the accepted drafts
        # The step emits the accepted drafts and the bonus. It keeps equally many rows: anchor and accepted drafts.
        reader.keep(n_committed, undo)
        kept_1SC = reading.features_1SC[:, :n_committed].to(draft.dtype)
        context = context.append(draft.context_kv(kept_1SC, first_position=context.n_tokens))
        anchor = target_N[n_accepted : n_accepted + 1]
        step = DecodedStep(target_N[:n_committed].tolist(), n_accepted)
        copies.weigh(step)
        yield (step := ended(step, options.stop_token_ids, n_left))


def draft_block(
    draft: Draft, target: PreTrainedModel, anchor: torch.Tensor, context: ContextKV, sizes: tuple[int, int | None]
) -> torch.Tensor:
    """Return a block, int64 [N]: the anchor (int64 [1]) and the draft's guesses.

    Args:
        sizes: N, and the draft window or None.
    """
    N, draft_window = sizes
    masks = anchor.new_full((N - 1 - draft.config.sample_from_anchor,), draft.config.mask_token_id)
    embeddings_NH = draft.embeddings(torch.cat([anchor, masks]), target.get_input_embeddings())
    prefix_len_RA = anchor.new_tensor([[context.n_tokens]])
    hidden_RANH = draft(embeddings_NH[None, None], context, prefix_len_RA, draft_window)
    hidden_1DH = draft.predicting(hidden_RANH[0])
    begin = Begin.at(anchor, context, prefix_len_RA[0])
    guesses_1D = draft.guesses(hidden_1DH, draft_logits(hidden_1DH, target), begin, target.get_input_embeddings())
    return torch.cat([anchor, guesses_1D[0]])


@torch.inference_mode()
def accepted_at(
    draft: Draft,
    target: PreTrainedModel,
    prompt: Sequence[int],
    answer: Sequence[int],
    *,
    block_size: int | None = None,
    draft_window: int | None = None,
) -> list[int]:
    """Return the number of accepted drafts of a block anchored at each token of the target's own answer.

    Near the end of the answer, only drafts up to its last token are compared.
    """
    sizes = block_size or draft.config.n_drafts + 1, draft_window
    return [
        n_equal(guesses, answer[i + 1 :])
        for i, guesses in enumerate(guesses_at(draft, target, prompt, answer, sizes=sizes))
    ]


@torch.inference_mode()
def guesses_at(
    draft: Draft,
    target: PreTrainedModel,
    prompt: Sequence[int],
    answer: Sequence[int],
    *,
    sizes: tuple[int, int | None],
) -> list[list[int]]:
    """Return the guesses of a block anchored at each token of `answer`; `sizes`: tokens of a block, and the window."""
    text = torch.tensor([*prompt, *answer], device=target.device)
    at_A = torch.arange(len(prompt), len(text), device=text.device)
    hidden_ANH, context = _read_blocks(draft, target, text, at_A, sizes)
    hidden_ADH = draft.predicting(hidden_ANH)
    logits_ADV, embed = draft_logits(hidden_ADH, target), target.get_input_embeddings()
    return draft.guesses(hidden_ADH, logits_ADV, Begin.at(text[at_A], context, at_A), embed).tolist()


def n_equal(guesses: Sequence[int], tokens: Sequence[int]) -> int:
    """Return the length of the longest common prefix."""
    return len(list(takewhile(bool, (guess == token for guess, token in zip(guesses, tokens, strict=False)))))


def hidden_of_blocks(
    draft: Draft, target: PreTrainedModel, text: torch.Tensor, at_A: torch.Tensor, sizes: tuple[int, int | None]
) -> torch.Tensor:
    """Return the draft's hidden states [A, N, H] for blocks that start at positions `at_A` of `text`, both int64.

    Each block attends to the text before its anchor. `sizes`: tokens of a block, and the draft window or None.
    """
    return _read_blocks(draft, target, text, at_A, sizes)[0]


def _read_blocks(
    draft: Draft, target: PreTrainedModel, text: torch.Tensor, at_A: torch.Tensor, sizes: tuple[int, int | None]
) -> tuple[torch.Tensor, ContextKV]:
    """Return the hidden states of `hidden_of_blocks`, and the context of the whole text."""
    N, draft_window = sizes[0] - draft.config.sample_from_anchor, sizes[1]
    features_1SC = TargetReader(target, draft.config.target_layer_ids).read(text[None]).features_1SC
    tokens_1AN = torch.full((1, len(at_A), N), draft.config.mask_token_id, device=text.device)
    tokens_1AN[0, :, 0] = text[at_A]
    embeddings_1ANH = draft.embeddings(tokens_1AN, target.get_input_embeddings())
    context = draft.context_kv(features_1SC)
    return draft(embeddings_1ANH, context, at_A[None], draft_window)[0], context


def draft_logits(hidden: torch.Tensor, target: PreTrainedModel) -> torch.Tensor:
    """Apply the target's head to the draft's hidden states, [..., H] -> [..., V]."""
    head = target.get_output_embeddings()
    return head(hidden.to(head.weight.dtype))


def choose(logits_NV: torch.Tensor, options: Options) -> torch.Tensor:
    """Return the target's token after each slot, int64 [N]."""
    if options.temperature == 0:
        return logits_NV.argmax(-1)
    probabilities_NV = F.softmax(logits_NV.float() / options.temperature, dim=-1)
    return torch.multinomial(probabilities_NV, 1, generator=options.generator)[:, 0]


def _checked_sizes(draft: Draft, input_ids: torch.Tensor, options: Options) -> tuple[int, int]:
    if input_ids.ndim != 2 or input_ids.shape[0] != 1 or input_ids.shape[1] == 0:
        raise ValueError(f"input_ids has shape {list(input_ids.shape)}; give one prompt, [1, at least one token]")
    N = options.block_size or draft.config.n_drafts + 1
    width = options.width or N
    if width > N and not options.copies:
        raise ValueError(
            f"width {width} exceeds the block of {N} tokens, and only n-gram copies extend a block; set copies=True"
        )
    if options.draft_window is not None and options.draft_window < N:
        raise ValueError(
            f"draft_window {options.draft_window} is smaller than the block of {N} tokens; make it at least {N}"
        )
    if not 0 <= options.n_unseen < input_ids.shape[1]:
        raise ValueError(f"n_unseen is {options.n_unseen}; give 0..{input_ids.shape[1] - 1}, fewer than prompt tokens")
    return N, width
