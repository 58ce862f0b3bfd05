"""Draft: one forward of the draft model over the planned blocks.

The forward runs in SGLang's TARGET_VERIFY mode on the draft's own runner. This mode provides N queries per request over
the context K/V, attention metadata for every backend, and CUDA graphs. `memory/slots.py` computes the KV slots of the
context, and the context that a block attends to.
"""

from __future__ import annotations

import logging

import torch
from sglang.srt.model_executor.cuda_graph_config import Backend
from sglang.srt.model_executor.forward_batch_info import (
    CaptureHiddenMode,
    ForwardBatch,
    ForwardMode,
    enable_num_token_non_padded,
)
from sglang.srt.model_executor.model_runner import ModelRunner
from sglang.srt.platforms import current_platform
from sglang.srt.runtime_context import get_exec
from sglang.srt.speculative.dflash_info import DFlashVerifyInput
from sglang.srt.speculative.spec_info import SpeculativeAlgorithm

from sglang_dflash.engine.draft.layout import Layout
from sglang_dflash.engine.memory.slots import DraftSlots, Seen
from sglang_dflash.engine.stages.forward import directly, through_runner
from sglang_dflash.engine.stages.ranks import Scope, free_gib, within
from sglang_dflash.engine.step import Block, Plan

logger = logging.getLogger(__name__)

LEAST_GIB = 1.0  # free memory below which the draft is not captured, as in SGLang's own DFLASH worker


class Drafter:
    """Stage that drafts blocks."""

    def __init__(self, runner: ModelRunner, slots: DraftSlots, n_slots: int, layout: Layout, scope: Scope) -> None:
        self.runner = runner
        self.slots, self.layout = slots, layout
        self.block_info = block_info(n_slots, CaptureHiddenMode.NULL, runner.device)
        # Without graphs this attribute is None or SGLang's eager runner.
        self.captured = runner.decode_cuda_graph_runner not in (None, runner.eager_runner)
        self.forward = within(scope, through_runner(runner) if self.captured else directly(runner))

    def draft(self, plan: Plan, *, graphs: bool) -> torch.Tensor:
        """Draft one block per request. Return int64 [B, width]: the anchor, drafts, then mask tokens past the block.

        There are mask tokens only if the width exceeds the block. If only the anchor is verified, the draft model does
        not run. Otherwise its layers read the whole block, as in training. A captured graph also fills the whole
        block. Without a graph only verified slots are filled, because computing the head for more slots takes time.

        The result is a copy. All graphs share the memory of their outputs, so the target's replay would overwrite the
        drafts before they are compared.
        """
        block = plan.drafted
        if block is None:
            return plan.verified.tokens_BN
        seen = self.slots.seen(plan, block)
        batch = block_forward(plan, block, seen, self.block_info, graphs=graphs)
        seen.kv.bind(batch, self.runner.kv_index_translator)
        options = {} if self.captured else {"n_filled": plan.width}
        tokens_T = self.forward(batch, **options).logits_output.hidden_states
        return self.layout.verified(tokens_T.view(plan.n_requests, -1), plan.verified.tokens_BN)


def may_capture(target: ModelRunner) -> bool:
    """Return whether the draft's graphs are captured: the target's are, and `LEAST_GIB` are free."""
    wanted = get_exec().graph.cuda_graph_config.decode.backend != Backend.DISABLED
    possible = not current_platform.is_out_of_tree() or current_platform.capabilities.graph_capture
    if not wanted or not possible or target.device != "cuda":
        return wanted and possible
    if (left := free_gib(target)) < LEAST_GIB:
        logger.warning(
            "the draft runs without CUDA graphs, and so takes longer, because only %.2f GiB of memory are free and its "
            "graphs need %.1f; lower --mem-fraction-static, --max-running-requests or --cuda-graph-max-bs-decode",
            left,
            LEAST_GIB,
        )
        return False
    return True


def block_info(n_tokens: int, capture: CaptureHiddenMode, device: torch.device) -> DFlashVerifyInput:
    """Return SGLang's verify input for blocks of `n_tokens`; tokens and positions come from the batch."""
    nothing = torch.empty(0, dtype=torch.int64, device=device)
    return DFlashVerifyInput(
        draft_token=nothing, positions=nothing, draft_token_num=n_tokens, capture_hidden_mode=capture
    )


def block_forward(plan: Plan, block: Block, seen: Seen, info: DFlashVerifyInput, *, graphs: bool) -> ForwardBatch:
    """Return SGLang's batch for a forward over `block` with the context `seen`.

    The caller must bind the batch's KV slots, `seen.kv`.
    """
    n_tokens = block.tokens_BN.numel()
    device = block.tokens_BN.device
    return ForwardBatch(
        forward_mode=ForwardMode.TARGET_VERIFY,
        batch_size=plan.n_requests,
        input_ids=block.tokens_BN.view(-1),
        req_pool_indices=plan.rows_B,
        seq_lens=seen.len_B,
        seq_lens_sum=seen.bound_sum,
        seq_lens_cpu=seen.bound_B_cpu,
        out_cache_loc=block.slots_BN.view(-1),
        positions=block.positions_BN.view(-1),
        spec_algorithm=SpeculativeAlgorithm.DFLASH,
        spec_info=info,
        capture_hidden_mode=info.capture_hidden_mode,
        num_token_non_padded=(
            torch.full((), n_tokens, dtype=torch.int32, device=device) if enable_num_token_non_padded() else None
        ),
        global_num_token_non_padded_cpu=n_tokens,
        can_run_decode_cuda_graph=graphs,
    )
