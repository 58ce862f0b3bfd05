"""Speculative generation on MLX, one step at a time, with the acceptance rule of `reference/torch/generate.py`.

The target chooses a token at every slot, and drafts are kept while they equal the target's token. So the sampling
distribution is the target's, with any sampler.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

import mlx.core as mx

from sglang_dflash.engine.draft.generation import DecodedStep, ended
from sglang_dflash.reference.mlx.pair import Pair
from sglang_dflash.reference.mlx.target import PREFILL_CHUNK, MLXTarget

Sampler = Callable[[mx.array], mx.array]  # log-probabilities [N, V] to tokens [N], row by row


def likeliest(logprobs_NV: mx.array) -> mx.array:
    return mx.argmax(logprobs_NV, axis=-1)


@dataclass(frozen=True, kw_only=True)
class Options:
    """Options of a generation.

    sampler: a sampler of mlx-lm (`mlx_lm.sample_utils.make_sampler`); greedy by default.
    width: slots of a block, drafted and then verified, the anchor included; None: the checkpoint's block size.
    draft_window: largest number of context tokens that the draft attends to; None: no limit.
    """

    max_new_tokens: int
    sampler: Sampler = likeliest
    stop_token_ids: frozenset[int] = frozenset()
    width: int | None = None
    draft_window: int | None = None


def spec_steps(pair: Pair, prompt: Sequence[int], options: Options) -> Iterator[DecodedStep]:
    """Yield the steps of one generation; their `committed` tokens concatenated are the continuation.

    Raises:
        ValueError: draft, prompt and options do not match.
        NotSupported: the target cannot undo rejected tokens.
    """
    width = checked_width(pair, prompt, options)
    target = MLXTarget(pair.target, pair.draft.config.target_layer_ids)
    context = pair.draft.make_context()
    logits_SV = read_prompt(pair, target, mx.array(prompt), context)
    anchor_1 = choose(logits_SV[-1:], options.sampler)
    step = ended(DecodedStep(anchor_1.tolist(), 0), options.stop_token_ids, options.max_new_tokens)
    yield step
    n_left = options.max_new_tokens
    while (n_left := n_left - len(step.committed)) and step.committed[-1] not in options.stop_token_ids:
        masks = mx.full((width - 1,), pair.draft.config.mask_token_id, dtype=anchor_1.dtype)
        hidden_DH = pair.draft(pair.embed(mx.concatenate([anchor_1, masks])), context, options.draft_window)
        drafts_D = pair.draft.guesses(hidden_DH, pair.head(hidden_DH), anchor_1).astype(anchor_1.dtype)
        logits_NV, features_NC = target.read(mx.concatenate([anchor_1, drafts_D]))
        target_N = choose(logits_NV, options.sampler).astype(anchor_1.dtype)
        n_accepted = int(mx.cumprod(drafts_D == target_N[:-1]).sum().item())
        n_committed = n_accepted + 1
        # The step emits the accepted drafts and the bonus. It keeps equally many rows: anchor and accepted drafts.
        target.keep(n_committed)
        pair.draft.append_context_kv(features_NC[:n_committed], context)
        anchor_1 = target_N[n_accepted:n_committed]
        step = ended(DecodedStep(target_N[:n_committed].tolist(), n_accepted), options.stop_token_ids, n_left)
        yield step


def stream_generate(pair: Pair, prompt: Sequence[int], options: Options) -> Iterator[tuple[str, DecodedStep]]:
    """Yield (text, step) for every step of `spec_steps`, and a last empty step with the rest of the text.

    The rest is text that the detokenizer has held back, because it may be part of an incomplete character.
    """
    writer = pair.tokenizer.detokenizer
    for step in spec_steps(pair, prompt, options):
        for token in step.committed:
            if token not in options.stop_token_ids:
                writer.add_token(token)
        yield writer.last_segment, step
    writer.finalize()
    yield writer.last_segment, DecodedStep([], 0)


def read_prompt(pair: Pair, target: MLXTarget, prompt_S: mx.array, context: list) -> mx.array:
    """Read the prompt in chunks, fill the draft's context, and return the logits after the last token, [1, V].

    The last token is a chunk by itself. The logits of other chunks are not used, so MLX does not compute them.
    """
    n_before = len(prompt_S) - 1
    for start in range(0, n_before, PREFILL_CHUNK):
        _, features_SC = target.read(prompt_S[start : min(start + PREFILL_CHUNK, n_before)])
        pair.draft.append_context_kv(features_SC, context)
        mx.eval([cache.state for cache in (*target.caches, *context)])
    logits_1V, features_1C = target.read(prompt_S[-1:])
    pair.draft.append_context_kv(features_1C, context)
    return logits_1V


def choose(logits_NV: mx.array, sampler: Sampler) -> mx.array:
    """Return the target's token after each slot, [N]."""
    logits_NV = logits_NV.astype(mx.float32)
    return sampler(logits_NV - mx.logsumexp(logits_NV, axis=-1, keepdims=True))


def checked_width(pair: Pair, prompt: Sequence[int], options: Options) -> int:
    block_size = pair.draft.config.block_size
    width = block_size if options.width is None else options.width
    if options.max_new_tokens < 1 or not prompt:
        raise ValueError(
            f"max_new_tokens (--max-tokens) is {options.max_new_tokens} and the prompt has {len(prompt)} tokens; "
            "make both 1 or more"
        )
    if not 2 <= width <= block_size:
        raise ValueError(
            f"width {width} is not within 2..{block_size}. {pair.draft.config.path} was trained for blocks of "
            f"{block_size} tokens (config.json: block_size); give a width in this range, or leave it out"
        )
    if options.draft_window is not None and options.draft_window < width:
        raise ValueError(
            f"draft_window {options.draft_window} is smaller than the block of {width} tokens; make it at least {width}"
        )
    return width
