"""Choose: the token the target says after every slot, under each request's own sampling parameters.

One rule for greedy and sampled requests: draw the target's token at every slot as SGLang would draw it there without
speculation, given the drafted prefix; acceptance then keeps drafts while they are equal. That is exact for a draft
that proposes one token with certainty, and no exact rule accepts more (Leviathan et al. 2023, arXiv:2211.17192).

The drawing is SGLang's own sampler, run over B x N rows instead of B. What it cannot draw exactly inside a block
(penalties that depend on the drafted prefix) is refused when the request arrives, see `requests.py`.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable

import torch
from sglang.srt.layers.dp_attention import get_dp_tp_group
from sglang.srt.layers.logits_processor import LogitsProcessorOutput
from sglang.srt.managers.schedule_batch import ScheduleBatch
from sglang.srt.model_executor.model_runner import ModelRunner
from sglang.srt.sampling.sampling_batch_info import ProcessorEntry, SamplingBatchInfo
from sglang.srt.speculative.spec_tp_sync import SpecTpSync, SpecTpSyncSite
from sglang.srt.speculative.spec_utils import build_grammar_vocab_mask
from sglang.srt.utils.async_probe import sanitize_nan_logits

from sglang_dflash.step import Plan, Target


class Choice:
    def __init__(self, runner: ModelRunner) -> None:
        self.sampler = runner.sampler
        self.ranks = SpecTpSync(get_dp_tp_group())

    def choose(
        self, batch: ScheduleBatch, plan: Plan, target: Target, grammar_barrier: Callable[[], None] | None
    ) -> torch.Tensor:
        """target_BN, int64: what the target says after each slot. Edits the logits in place."""
        info = batch.sampling_info
        logits_TV = target.output.next_token_logits
        if target.grammar_tree is not None:
            self._mask_by_grammar(batch, target, grammar_barrier)
        if info.logit_bias is not None:
            logits_TV.view(*plan.tokens_BN.shape, -1).add_(info.logit_bias[:, None])
        if info.is_all_greedy and not info.has_custom_logit_processor:
            sanitize_nan_logits(logits_TV, "DFLASH verify logits")
            target_T, site = logits_TV.argmax(dim=-1), SpecTpSyncSite.DFLASH_ACCEPT_GREEDY
        else:
            if batch.return_logprob:  # the sampler turns logits into probabilities in place
                logits_TV = logits_TV.clone()
            target_T, site = self._sample(logits_TV, info, plan), SpecTpSyncSite.DFLASH_ACCEPT_SAMPLE
        return self.ranks.sync(site, target_T.to(torch.int64).view(plan.tokens_BN.shape))

    def _mask_by_grammar(
        self, batch: ScheduleBatch, target: Target, grammar_barrier: Callable[[], None] | None
    ) -> None:
        """Walk each grammar along its request's drafts, on the host, behind the target forward."""
        mask = build_grammar_vocab_mask(
            reqs=batch.reqs,
            tree=target.grammar_tree,
            sampling_info=batch.sampling_info,
            device=target.output.next_token_logits.device,
            barrier=grammar_barrier,
        )
        if mask is not None:
            mask.apply(target.output.next_token_logits)

    def _sample(self, logits_TV: torch.Tensor, info: SamplingBatchInfo, plan: Plan) -> torch.Tensor:
        return self.sampler(
            LogitsProcessorOutput(next_token_logits=logits_TV),
            over_slots(info, plan.width),
            return_logprob=False,
            top_logprobs_nums=[],
            token_ids_logprobs=[],
            positions=plan.positions_BN.view(-1),
        )


def over_slots(info: SamplingBatchInfo, width: int) -> SamplingBatchInfo:
    """The sampling parameters of B requests, repeated for each of their `width` slots."""

    def spread(x_B: torch.Tensor | None) -> torch.Tensor | None:
        return None if x_B is None else x_B.repeat_interleave(width, dim=0)

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
        # Already applied to the logits, or refused with the request.
        grammars=None,
        grammar_mask=None,
        logit_bias=None,
        return_sampling_masks=None,
        return_sampling_support_logprobs=None,
        sampling_mask_batch_indices=None,
        sampling_support_logprobs_capture_indices=None,
    )


def entry_over_slots(entry: ProcessorEntry, width: int) -> ProcessorEntry:
    slot_N = torch.arange(width, device=entry.indices.device)
    return ProcessorEntry(
        processor=entry.processor,
        rows=[row * width + slot for row in entry.rows for slot in range(width)],
        indices=(entry.indices[:, None] * width + slot_N).flatten(),
    )
