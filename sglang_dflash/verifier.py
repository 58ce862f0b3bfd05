"""Verify: one forward of the target over the filled blocks gives logits and features for every slot."""

from __future__ import annotations

import torch
from sglang.srt.managers.schedule_batch import ScheduleBatch
from sglang.srt.managers.tp_worker import TpModelWorker
from sglang.srt.model_executor.forward_batch_info import CaptureHiddenMode
from sglang.srt.speculative.dflash_info import DFlashVerifyInput
from sglang.srt.speculative.spec_utils import GrammarTree

from sglang_dflash.step import Plan, Target


class Verifier:
    def __init__(self, worker: TpModelWorker) -> None:
        self.worker = worker

    def verify(self, batch: ScheduleBatch, plan: Plan, tokens_BN: torch.Tensor) -> Target:
        # The copy of the drafts to the host must be on its way before the target runs, to hide behind it.
        tree = GrammarTree.from_linear_chain(tokens_BN) if batch.has_grammar else None
        # SGLang builds its forward from the batch; the scheduler restores these fields after the step.
        batch.out_cache_loc = plan.slots_BN.view(-1)
        batch.seq_lens_cpu = plan.bound_B_cpu
        batch.seq_lens_sum = plan.bound_sum
        block = DFlashVerifyInput(
            draft_token=tokens_BN.view(-1),
            positions=plan.positions_BN.view(-1),
            draft_token_num=plan.width,
            capture_hidden_mode=CaptureHiddenMode.FULL,
            kv_loc_plan=plan.kv,
        )
        forward_batch, _ = block.prepare_for_verify(batch, self.worker)
        result = self.worker.forward_batch_generation(
            batch=None, forward_batch=forward_batch, is_verify=True, skip_attn_backend_init=True
        )
        output = result.logits_output
        features_TC, output.hidden_states = output.hidden_states, None  # not for the host
        return Target(output, features_TC, tree, result.can_run_cuda_graph)
