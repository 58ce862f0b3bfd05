"""Choose: draw the target's token after every slot, under each request's own sampling parameters.

The rule is the same for greedy and sampled requests. At every slot, the target's token is drawn as SGLang would draw it
without speculation, given the drafts up to this slot. Drafts before the first one that differs from the drawn token are
accepted. This is exact for a draft that proposes one token per slot, and no exact rule accepts more drafts (Leviathan
et al. 2023, arXiv:2211.17192).

The logits of a slot are edited as without speculation, in the same order: penalties, grammar, bias, custom processors.
Then SGLang's own sampler draws, over B x N rows instead of B.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable

import torch
from sglang.srt.layers.dp_attention import get_dp_tp_group
from sglang.srt.layers.logits_processor import LogitsProcessorOutput, SamplingMaskOutput
from sglang.srt.managers.schedule_batch import ScheduleBatch
from sglang.srt.model_executor.model_runner import ModelRunner
from sglang.srt.sampling.sampling_batch_info import SamplingBatchInfo
from sglang.srt.speculative.spec_tp_sync import SpecTpSync, SpecTpSyncSite
from sglang_dflash_kernels.accept import Accepted

from sglang_dflash.engine.stages.grammar import allowed
from sglang_dflash.engine.stages.greedy import Whole, argmax, logits_buffer
from sglang_dflash.engine.stages.penalties import Penalties
from sglang_dflash.engine.stages.processors import Processors
from sglang_dflash.engine.stages.sampling import over_slots, rows_of
from sglang_dflash.engine.step import Plan, Target

CHUNK_BYTES = 2**30  # bytes of logits that are sampled at once


class Choice:
    """Stage that draws the target's tokens."""

    def __init__(self, runner: ModelRunner, logits: Whole) -> None:
        """`logits`: form of the logits that a verify returns, see `verified_logits`."""
        self.runner, self.sampler = runner, runner.sampler
        self.device = runner.device
        self.vocab_size = runner.model_config.vocab_size
        self.ranks = SpecTpSync(get_dp_tp_group())
        self.logits = logits
        self.penalties = Penalties(runner.model_config.vocab_size, runner.device)
        self.processors = Processors()

    # -- prefill: SGLang draws ----------------------------------------------------------------------------------------

    def begin(self, batch: ScheduleBatch) -> None:
        """Set up penalties before SGLang samples the token after each prompt, or after the chunk that was read."""
        self.penalties.begin(batch)

    def anchors(self, batch: ScheduleBatch, drawn_B: torch.Tensor) -> torch.Tensor:
        """Return each prompt's first output token, int64 [B], equal on all ranks. SGLang has drawn these tokens.

        Also count the tokens for penalties, and keep them for custom logit processors.
        """
        anchor_B = self.ranks.sync(SpecTpSyncSite.DFLASH_TARGET, drawn_B).to(torch.int64)
        self.penalties.count_anchors(batch.reqs, anchor_B)
        self.processors.keep_tokens(batch, anchor_B[:, None], torch.ones_like(anchor_B))
        return anchor_B

    # -- decode: this worker draws ------------------------------------------------------------------------------------

    def choose(
        self,
        batch: ScheduleBatch,
        plan: Plan,
        tokens_BN: torch.Tensor,
        target: Target,
        grammar_barrier: Callable[[], None] | None,
    ) -> torch.Tensor:
        """Return the target's token after each slot, int64 [B, N]. Edits the logits in `target` in place.

        If only the largest logit of each slot is needed, the logits in `target` are set to None.

        Args:
            tokens_BN: int64, verified tokens: anchor and drafts.
            grammar_barrier: SGLang's function to call before grammars are read; None: not needed.
        """
        output = target.output
        if self._reads_only_the_largest(batch):
            target_T = self.logits.likeliest(output.next_token_logits)
            output.next_token_logits = None
            if self.logits.agreed:
                return target_T.view(tokens_BN.shape)
        else:
            output.next_token_logits = self.logits.whole(output.next_token_logits)
            target_T = self._draw(batch, plan, tokens_BN, target, grammar_barrier)
        is_greedy = batch.sampling_info.is_all_greedy
        site = SpecTpSyncSite.DFLASH_ACCEPT_GREEDY if is_greedy else SpecTpSyncSite.DFLASH_ACCEPT_SAMPLE
        return self.ranks.sync(site, target_T.to(torch.int64).view(tokens_BN.shape))

    def _reads_only_the_largest(self, batch: ScheduleBatch) -> bool:
        """Return whether all requests are greedy, and none edits logits or returns logprobs or sampling masks."""
        info = batch.sampling_info
        return (
            info.is_all_greedy
            and info.sampling_mask_batch_indices is None
            and info.logit_bias is None
            and not info.has_custom_logit_processor
            and not batch.has_grammar
            and not batch.return_logprob
            and not self.penalties.are_asked_for(batch.reqs)
        )

    def _draw(
        self,
        batch: ScheduleBatch,
        plan: Plan,
        tokens_BN: torch.Tensor,
        target: Target,
        grammar_barrier: Callable[[], None] | None,
    ) -> torch.Tensor:
        """Edit the logits of every slot in place, then draw the target's tokens, [T]."""
        info = batch.sampling_info
        logits_TV = target.output.next_token_logits
        self.penalties.apply(batch, plan, tokens_BN, logits_TV)
        if target.grammar_tree is not None:
            mask = allowed(batch, target.grammar_tree, logits_TV.device, grammar_barrier)
            if mask is not None:
                mask.apply(logits_TV)
        if info.logit_bias is not None:
            logits_TV.view(*tokens_BN.shape, -1).add_(info.logit_bias[:, None])
        if info.has_custom_logit_processor:
            self.processors.apply(batch, plan, tokens_BN, logits_TV)
        if info.is_all_greedy and info.sampling_mask_batch_indices is None:
            return argmax(logits_TV)
        positions_BN = plan.verified.positions_BN
        target_T, masks = self._sample(logits_TV, info, positions_BN, keep_logits=batch.return_logprob)
        target.output.sampling_mask_output = masks
        return target_T

    def count_tokens(self, batch: ScheduleBatch, accepted: Accepted) -> None:
        """Count a step's committed tokens for penalties, and keep them for custom logit processors."""
        self.penalties.count(batch.reqs, accepted)
        self.processors.keep_tokens(batch, accepted.committed_BN, accepted.n_committed_B)

    def dry_run(self, n_requests: int, n_tokens: int) -> None:
        """Sample at every slot with top-k, top-p and min-p, so that the caller can measure the memory of sampling.

        As in serving, the logits are in SGLang's buffer for captured forwards if the batch fits into it.
        """
        ones_B = torch.ones(n_requests, device=self.device)
        info = SamplingBatchInfo(
            temperatures=ones_B[:, None],
            top_ps=ones_B * 0.95,
            top_ks=torch.full_like(ones_B, 50, dtype=torch.int32),
            min_ps=ones_B * 0.05,
            is_all_greedy=False,
            is_any_greedy=False,
            need_top_p_sampling=True,
            need_top_k_sampling=True,
            need_min_p_sampling=True,
            vocab_size=self.vocab_size,
            device=self.device,
        )
        logits_TV = logits_buffer(self.runner, n_requests * n_tokens)
        if logits_TV is None:
            logits_TV = torch.empty(n_requests * n_tokens, self.vocab_size, device=self.device)
        logits_TV.zero_()
        positions_BN = torch.zeros(n_requests, n_tokens, dtype=torch.int64, device=self.device)
        self._sample(logits_TV, info, positions_BN)

    def _sample(
        self,
        logits_TV: torch.Tensor,
        info: SamplingBatchInfo,
        positions_BN: torch.Tensor,
        *,
        keep_logits: bool = False,
    ) -> tuple[torch.Tensor, SamplingMaskOutput | None]:
        """Return drawn tokens [B * N]. For requests with sampling masks, also return the tokens that could be drawn.

        Rows are drawn in chunks of `CHUNK_BYTES`, because SGLang's sampler allocates several times their bytes. With
        sampling masks all rows are one chunk. Unless `keep_logits`, the sampler turns logits into probabilities.
        """
        # `Processors.apply` has already run the custom processors.
        of_slots = dataclasses.replace(over_slots(info, positions_BN.shape[1]), has_custom_logit_processor=False)
        n_rows = len(logits_TV)
        if info.sampling_mask_batch_indices is None:
            n_rows = max(CHUNK_BYTES // logits_TV[0].nbytes, 1)
        drawn, masks = list[torch.Tensor](), None
        for first in range(0, len(logits_TV), n_rows):
            rows = slice(first, first + n_rows)
            output = LogitsProcessorOutput(logits_TV[rows].clone() if keep_logits else logits_TV[rows])
            drawn += [
                self.sampler(
                    output,
                    of_slots if n_rows >= len(logits_TV) else rows_of(of_slots, rows),
                    return_logprob=False,
                    top_logprobs_nums=[],
                    token_ids_logprobs=[],
                    positions=positions_BN.view(-1)[rows],
                )
            ]
            masks = output.sampling_mask_output
        return drawn[0] if len(drawn) == 1 else torch.cat(drawn), masks
