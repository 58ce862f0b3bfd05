"""Plan: compute tokens, positions and KV slots of every request's block, from the request table."""

from __future__ import annotations

import torch
from sglang.srt.managers.schedule_batch import ScheduleBatch
from sglang.srt.model_executor.model_runner import ModelRunner
from sglang_dflash_kernels.plan_block import PLAN_BLOCK, PLAN_BLOCKS, PlannedBlock

from sglang_dflash.engine.step import Block, Plan


class Planner:
    """Stage that plans the position and the KV slot of every block token."""

    def __init__(self, target_runner: ModelRunner, n_slots: int, widest: int, mask_token_id: int) -> None:
        """Store the target's request table and the sizes of blocks.

        Args:
            n_slots: number of slots of a drafted block, anchor included.
            widest: largest number of tokens per request whose K/V a step writes.
        """
        self.req_to_token = target_runner.req_to_token_pool.req_to_token
        self.translator = target_runner.kv_index_translator
        self.n_slots, self.widest = n_slots, widest
        self.mask_token_id = mask_token_id
        # The ops' forms are selected once, because the device of the tensors never changes.
        self.plan_block = PLAN_BLOCK.form_for(self.req_to_token)
        self.plan_blocks = PLAN_BLOCKS.form_for(self.req_to_token)

    def plan(self, batch: ScheduleBatch, width: int) -> Plan:
        """Plan a step that verifies `width` tokens per request. With width 1 nothing is drafted."""
        state = batch.spec_info
        anchors = state.bonus_tokens, batch.seq_lens, batch.req_pool_indices, batch.req_pool_indices_cpu
        # SGLang provides exact lengths on the host only if an attention backend needs them.
        if batch.seq_lens_cpu is None:
            return self.place(*anchors, state.allocated_B_cpu, width=width, n_bounded=self.widest)
        return self.place(*anchors, batch.seq_lens_cpu, width=width)

    def place(
        self,
        anchor_B: torch.Tensor,
        prefix_len_B: torch.Tensor,
        rows_B: torch.Tensor,
        rows_B_cpu: torch.Tensor,
        bound_B_cpu: torch.Tensor,
        *,
        width: int,
        n_bounded: int = 0,
    ) -> Plan:
        """Return the plan for these anchors.

        Args:
            anchor_B, prefix_len_B: int64.
            rows_B, rows_B_cpu: int64, row of each request in the request table, on device and host.
            bound_B_cpu: upper bound of prefix_len + `n_bounded`; exact if `n_bounded` is 0.
        """

        def block(planned: PlannedBlock) -> Block:
            n_tokens = planned.tokens_BN.shape[1]
            end_B_cpu = bound_B_cpu + (n_tokens - n_bounded)
            kv = self.translator.plan(
                req_pool_indices=rows_B,
                seq_lens=prefix_len_B,
                seq_lens_cpu=end_B_cpu,
                write_virtual=planned.slots_BN.view(-1),
                read_extent=n_tokens,
            )
            tokens_BN, positions_BN, slots_BN, end_B = planned
            return Block(tokens_BN, positions_BN, slots_BN, end_B, end_B_cpu, bound_sum=int(end_B_cpu.sum()), kv=kv)

        request, mask = (anchor_B, prefix_len_B, rows_B, self.req_to_token), self.mask_token_id
        if width in (1, self.n_slots):
            verified = block(self.plan_block(*request, mask_token_id=mask, n_tokens=width))
            drafted = None if width == 1 else verified
        else:
            both = self.plan_blocks(*request, mask_token_id=mask, n_tokens=(width, self.n_slots))
            verified, drafted = map(block, both)
        return Plan(drafted, verified, prefix_len_B=prefix_len_B, rows_B=rows_B, rows_B_cpu=rows_B_cpu)
