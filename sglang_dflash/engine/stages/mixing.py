"""Mixed steps: with `--enable-mixed-chunk` one forward reads a chunk of prompts and one token of each running request.

In such a step the running requests have no drafts. SGLang treats each of them as a prompt of one token, the anchor,
whose prefix is the request's text. Running requests are the last requests of the batch. SGLang samples their next
tokens as it samples the first token of a prompt. This is not exact if a request's sampling depends on tokens that the
scheduler does not have yet. While such a request runs, no step is mixed.

A mixed step reads the anchor, so the recurrent state includes it. If the request ends in this step, SGLang would cache
the state under a key without the anchor. SGLang prevents this after decode steps only. So a request that ends in a
mixed step is not cached. With track slots it may be cached, because the cache then takes a tracked state.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from sglang.srt.managers.schedule_batch import Req, ScheduleBatch

from sglang_dflash.engine.stages.penalties import asks

if TYPE_CHECKING:
    from sglang.srt.managers.scheduler import Scheduler


def mix_plain(stock: Callable[..., Any], scheduler: Scheduler, *, running_batch: ScheduleBatch, **others: Any) -> Any:
    """Mix prompts with running requests only if these may be mixed. Hook around `Scheduler._get_new_batch_prefill_raw`.

    A running request with a grammar, penalties, a custom logit processor, sampling masks or hidden states prevents
    mixing. Then the step reads prompts only.
    """
    mixes = scheduler.is_mixed_chunk
    scheduler.is_mixed_chunk = mixes and all(map(may_mix, running_batch.reqs))
    try:
        return stock(scheduler, running_batch=running_batch, **others)
    finally:
        scheduler.is_mixed_chunk = mixes


def cache_no_state_ahead(stock: Callable[..., None], processor: Any, batch: ScheduleBatch, result: Any) -> None:
    """Keep requests that end in a mixed step out of the prefix cache, unless they have track slots.

    Hook around `SchedulerBatchResultProcessor.process_batch_result_prefill`.
    """
    running = [
        req
        for req in batch.decoding_reqs or ()
        if not (req.finished() or req.is_retracted) and req.kv.mamba_ping_pong_track_buffer is None
    ]
    skipped = [req.skip_radix_cache_insert for req in running]
    for req in running:
        req.skip_radix_cache_insert = True
    stock(processor, batch, result)
    for req, before in zip(running, skipped, strict=True):
        if not req.finished():
            req.skip_radix_cache_insert = before


def may_mix(req: Req) -> bool:
    """Return whether SGLang may sample a token of this running request in a mixed step."""
    edits = req.grammar is not None or req.custom_logit_processor is not None or asks(req)
    return not (edits or req.return_sampling_mask or req.return_hidden_states)
