"""Sampling parameters of B requests, repeated for every slot, so that SGLang's sampler runs over B x N rows."""

from __future__ import annotations

import dataclasses

import torch
from sglang.srt.sampling.sampling_batch_info import ProcessorEntry, SamplingBatchInfo


def over_slots(info: SamplingBatchInfo, width: int) -> SamplingBatchInfo:
    """Repeat the sampling parameters of B requests for each of their `width` slots."""

    def spread(x_B: torch.Tensor | None) -> torch.Tensor | None:
        return x_B if x_B is None or width == 1 else x_B.repeat_interleave(width, dim=0)

    return dataclasses.replace(
        info,
        temperatures=spread(info.temperatures),
        top_ps=spread(info.top_ps),
        top_ks=spread(info.top_ks),
        min_ps=spread(info.min_ps),
        sampling_seed=spread(info.sampling_seed),
        custom_params=None if info.custom_params is None else [p for p in info.custom_params for _ in range(width)],
        custom_logit_processor=(
            None
            if info.custom_logit_processor is None
            else {key: entry_over_slots(entry, width) for key, entry in info.custom_logit_processor.items()}
        ),
        # Grammar, bias and penalties have already been applied to the logits.
        grammars=None,
        grammar_mask=None,
        logit_bias=None,
        acc_additive_penalties=None,
        acc_scaling_penalties=None,
        # The two `return_` lists are not needed, because SGLang has computed the two index fields from them.
        return_sampling_masks=None,
        return_sampling_support_logprobs=None,
        sampling_mask_batch_indices=slots_of(info.sampling_mask_batch_indices, width),
        sampling_support_logprobs_capture_indices=slots_of(info.sampling_support_logprobs_capture_indices, width),
    )


def rows_of(info: SamplingBatchInfo, rows: slice) -> SamplingBatchInfo:
    """Return the parameters of some of the rows of `over_slots`, for a batch without sampling masks.

    The other fields are unchanged. The sampler does not read those of custom processors, which have already run.
    """
    return dataclasses.replace(
        info,
        temperatures=info.temperatures[rows],
        top_ps=info.top_ps[rows],
        top_ks=info.top_ks[rows],
        min_ps=info.min_ps[rows],
        sampling_seed=None if info.sampling_seed is None else info.sampling_seed[rows],
    )


def slots_of(rows_R: torch.Tensor | None, width: int) -> torch.Tensor | None:
    """Return all slots of the requests `rows_R`, as indices of the B x `width` token rows: int64 [R * width]."""
    if rows_R is None:
        return None
    return (rows_R[:, None] * width + torch.arange(width, device=rows_R.device)).flatten()


def entry_over_slots(entry: ProcessorEntry, width: int) -> ProcessorEntry:
    """Return `entry` with each request of the processor replaced by the rows of the request's `width` slots."""
    return ProcessorEntry(
        processor=entry.processor,
        rows=[row * width + slot for row in entry.rows for slot in range(width)],
        indices=slots_of(entry.indices, width),
    )
