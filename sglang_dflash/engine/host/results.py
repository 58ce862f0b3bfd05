"""Results of steps in SGLang's form. SGLang's `accept_lens` counts the accepted drafts and the bonus."""

from __future__ import annotations

import torch
from sglang.srt.layers.logprob_processor import compute_spec_logprobs
from sglang.srt.managers.schedule_batch import ScheduleBatch
from sglang.srt.managers.utils import GenerationBatchResult
from sglang_dflash_kernels.accept import Accepted

from sglang_dflash.engine.host.draft_input import DraftInput
from sglang_dflash.engine.step import Plan, Target


def result_of(batch: ScheduleBatch, plan: Plan, target: Target, accepted: Accepted) -> GenerationBatchResult:
    """Return the result of a decode step, with logprobs if a request of the batch needs them."""
    tokens_T = accepted.committed_BN.view(-1)
    if batch.return_logprob:
        compute_spec_logprobs(batch, target.output, tokens_T, chain_stride=plan.width)
    return GenerationBatchResult(
        logits_output=target.output,
        next_token_ids=tokens_T,
        accept_lens=accepted.n_committed_B,
        cap_lens=torch.full((plan.n_requests,), plan.width),  # verified tokens per request, for counts in `meta_info`
        can_run_cuda_graph=target.run.can_run_graph,
        expert_distribution_metrics=target.run.expert_distribution_metrics,
        routed_experts_output=target.run.routed_experts_output,
        indexer_topk_output=target.run.indexer_topk_output,
        speculative_num_draft_tokens=plan.width,
        new_seq_lens=accepted.next_prefix_len_B,
        next_draft_input=DraftInput(
            bonus_tokens=accepted.anchor_B, new_seq_lens=accepted.next_prefix_len_B, n_in_flight=plan.width
        ),
        # SGLang copies these tensors to the host on another stream while later steps run, so they must not be freed.
        extra_keep_alive_refs=[accepted],
    )


def idle_result(state: DraftInput, block_size: int) -> GenerationBatchResult:
    """Return the result of a step without requests."""
    return GenerationBatchResult(
        next_token_ids=state.bonus_tokens,
        accept_lens=state.bonus_tokens.int(),
        next_draft_input=state,
        speculative_num_draft_tokens=block_size,
        new_seq_lens=state.new_seq_lens,
    )
