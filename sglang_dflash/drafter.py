"""Draft: one forward of the draft model over the planned blocks.

The block runs as SGLang's TARGET_VERIFY mode on the draft's own runner: that gives it N queries per request over the
context K/V, attention metadata of every backend, and CUDA graphs. What of the context the draft sees is the view's
decision, taken at start-up: all of it, or a window.
"""

from __future__ import annotations

from typing import NamedTuple, Protocol

import torch
from sglang.srt.mem_cache.kv_loc_plan import KVLocPlan
from sglang.srt.model_executor.forward_batch_info import (
    CaptureHiddenMode,
    ForwardBatch,
    ForwardMode,
    enable_num_token_non_padded,
)
from sglang.srt.model_executor.model_runner import ModelRunner
from sglang.srt.speculative.dflash_info import DFlashVerifyInput
from sglang.srt.speculative.spec_info import SpeculativeAlgorithm

from sglang_dflash.step import Block, Plan


class Seen(NamedTuple):
    """The context a draft sees: the last `len_B` committed tokens of each request."""

    len_B: torch.Tensor
    bound_B_cpu: torch.Tensor  # upper bound of len + N, for planning on the host
    bound_sum: int
    kv: KVLocPlan


class View(Protocol):
    def of(self, plan: Plan, block: Block) -> Seen: ...


class FullView:
    """Every committed token; the draft shares the target's request table."""

    def of(self, plan: Plan, block: Block) -> Seen:
        return Seen(plan.prefix_len_B, block.bound_B_cpu, block.bound_sum, block.kv)


class WindowView:
    """The last `window` committed tokens, through a request table of the draft's own.

    Row r of that table holds the slots of the window and then those of the block. It is rewritten every step with
    one gather of fixed size, so no length leaves the device. With pages larger than one token the window starts at a
    page boundary (backends derive pages from positions in the row) and may be up to page - 1 tokens longer.
    """

    def __init__(self, target_runner: ModelRunner, draft_runner: ModelRunner, *, window: int, block_size: int) -> None:
        self.window = window
        self.page = target_runner.page_size
        self.target_table = target_runner.req_to_token_pool.req_to_token
        self.draft_table = draft_runner.req_to_token_pool.req_to_token
        self.translator = draft_runner.kv_index_translator
        self.longest = window + self.page - 1 + block_size
        self.columns = torch.arange(self.longest, device=self.target_table.device)

    def of(self, plan: Plan, block: Block) -> Seen:
        start_B = (plan.prefix_len_B - self.window).clamp(min=0)
        if self.page > 1:
            start_B = start_B - start_B % self.page
        columns_BS = (start_B[:, None] + self.columns).clamp(max=self.target_table.shape[1] - 1)
        rows_B1 = plan.rows_B[:, None]
        self.draft_table[rows_B1, self.columns] = self.target_table[rows_B1, columns_BS]
        len_B = plan.prefix_len_B - start_B
        # min(bound, longest) only grows with the bound, so it stays an upper bound of the true length.
        bound_B_cpu = block.bound_B_cpu.clamp(max=self.longest)
        n_tokens = block.tokens_BN.shape[1]
        kv = block.kv.reads_from(self.translator, seq_lens=len_B, seq_lens_cpu=bound_B_cpu, read_extent=n_tokens)
        return Seen(len_B, bound_B_cpu, int(bound_B_cpu.sum()), kv)


class Drafter:
    def __init__(self, runner: ModelRunner, view: View, block_size: int) -> None:
        self.runner = runner
        self.view = view
        self.block_info = block_info(block_size, CaptureHiddenMode.NULL, runner.device)

    def draft(self, plan: Plan, *, graphs: bool) -> torch.Tensor:
        """What of the filled blocks is to be verified, int64 [B, width]: slot 0 the anchor, then drafts.

        The draft always fills the whole block, as it was trained to; when only the anchor is verified it does not run.
        """
        block = plan.drafted
        if block is None:
            return plan.verified.tokens_BN
        seen = self.view.of(plan, block)
        batch = block_forward(plan, block, seen, self.block_info, graphs=graphs)
        seen.kv.bind(batch, self.runner.kv_index_translator)
        tokens_T = self.runner.forward(batch).logits_output.hidden_states
        return tokens_T.view(block.tokens_BN.shape)[:, : plan.width].contiguous()


def block_info(n_tokens: int, capture: CaptureHiddenMode, device: torch.device) -> DFlashVerifyInput:
    """What SGLang wants to know of every block of `n_tokens` alike; tokens and positions are the batch's."""
    nothing = torch.empty(0, dtype=torch.int64, device=device)
    return DFlashVerifyInput(
        draft_token=nothing, positions=nothing, draft_token_num=n_tokens, capture_hidden_mode=capture
    )


def block_forward(plan: Plan, block: Block, seen: Seen, info: DFlashVerifyInput, *, graphs: bool) -> ForwardBatch:
    """SGLang's forward over `block` with `seen` before it; its KV slots are still to be bound."""
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
