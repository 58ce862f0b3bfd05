"""Plan: where the block of every request goes. Knows the request table; knows no model."""

from __future__ import annotations

from sglang.srt.managers.schedule_batch import ScheduleBatch
from sglang.srt.model_executor.model_runner import ModelRunner
from sglang_dflash_kernels.plan_block import plan_block

from sglang_dflash.step import Plan


class Planner:
    def __init__(self, target_runner: ModelRunner, block_size: int, mask_token_id: int) -> None:
        self.req_to_token = target_runner.req_to_token_pool.req_to_token
        self.translator = target_runner.kv_index_translator
        self.block_size = block_size
        self.mask_token_id = mask_token_id

    def plan(self, batch: ScheduleBatch) -> Plan:
        state = batch.spec_info
        block = plan_block(
            state.bonus_tokens,
            batch.seq_lens,
            batch.req_pool_indices,
            self.req_to_token,
            mask_token_id=self.mask_token_id,
            n_tokens=self.block_size,
        )
        if batch.seq_lens_cpu is None:  # no backend asked for exact lengths on the host
            bound_B_cpu, bound_sum = state.allocated_B_cpu, state.allocated_sum
        else:
            bound_B_cpu = batch.seq_lens_cpu + self.block_size
            bound_sum = int(bound_B_cpu.sum())
        return Plan(
            tokens_BN=block.tokens_BN,
            positions_BN=block.positions_BN,
            slots_BN=block.slots_BN,
            prefix_len_B=batch.seq_lens,
            rows_B=batch.req_pool_indices,
            bound_B_cpu=bound_B_cpu,
            bound_sum=bound_sum,
            kv=self.translator.plan(
                req_pool_indices=batch.req_pool_indices,
                seq_lens=batch.seq_lens,
                seq_lens_cpu=bound_B_cpu,
                write_virtual=block.slots_BN.view(-1),
                read_extent=self.block_size,
            ),
        )
