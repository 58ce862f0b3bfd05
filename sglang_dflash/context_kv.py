"""Remember: the target's features become the draft's context K/V.

The draft never runs over the prompt: its context K/V depend on the target's features only. Which slots they go to is
for `draft_slots.py` to say.
"""

from __future__ import annotations

import torch
from sglang.srt.managers.schedule_batch import ScheduleBatch
from sglang.srt.model_executor.model_runner import ModelRunner
from sglang_dflash_kernels.append_context import ContextCaches, KeyTransform, append_context

from sglang_dflash.draft_model import DFlashDraftModel
from sglang_dflash.draft_slots import DraftSlots
from sglang_dflash.step import Plan


class ContextKV:
    def __init__(self, model: DFlashDraftModel, runner: ModelRunner, slots: DraftSlots) -> None:
        attention = model.attentions[0]
        pool = runner.token_to_kv_pool
        layers = range(len(model.layers))
        self.model = model
        self.slots = slots
        self.caches = ContextCaches.build(
            [pool.get_key_buffer(i) for i in layers], [pool.get_value_buffer(i) for i in layers]
        )
        self.key = KeyTransform(
            k_norm_LE=model.k_norm_LE,
            eps=attention.k_norm.variance_epsilon,
            cos_sin_PR=attention.rotary_emb.cos_sin_cache,
        )

    @torch.inference_mode()
    def append(self, plan: Plan, features_TC: torch.Tensor, n_kept_B: torch.Tensor) -> None:
        """Write the context K/V of the first `n_kept` rows of every block (the anchor and the accepted drafts)."""
        block = plan.verified
        some = n_kept_B if plan.width > 1 else None  # the anchor is always kept
        self._write(features_TC, block.positions_BN.view(-1), self.slots.of_block(plan, block), some)

    @torch.inference_mode()
    def append_prompt(self, batch: ScheduleBatch, features_TC: torch.Tensor) -> None:
        """Write the context K/V of the prompt rows that the target has just read."""
        rows = self.slots.of_prompt(batch, features_TC.device)
        if rows.rows_T is not None:
            features_TC = features_TC.index_select(0, rows.rows_T)
        self._write(features_TC, rows.positions_T, rows.slots_T, None)

    def _write(
        self,
        features_TC: torch.Tensor,
        positions_T: torch.Tensor,
        slots_T: torch.Tensor,
        n_kept_B: torch.Tensor | None,
    ) -> None:
        k_TLGE, v_TLGE = self.model.context_kv(features_TC)
        append_context(k_TLGE, v_TLGE, positions_T, slots_T, caches=self.caches, key=self.key, n_kept_B=n_kept_B)
