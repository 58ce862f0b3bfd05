"""Remember: the target's features become the draft's context K/V.

The draft pool has a slot for each slot of the target pool and uses the same ids, so a prefix found in SGLang's radix
cache is found in the draft's cache as well. The draft never runs over the prompt: its context K/V depend on the
target's features only.
"""

from __future__ import annotations

import torch
from sglang.srt.managers.schedule_batch import ScheduleBatch
from sglang.srt.model_executor.forward_batch_info import compute_position
from sglang.srt.model_executor.model_runner import ModelRunner
from sglang.srt.utils import async_h2d
from sglang_dflash_kernels.append_context import ContextCaches, KeyTransform, append_context

from sglang_dflash.draft_model import DFlashDraftModel
from sglang_dflash.step import Plan


class ContextKV:
    def __init__(self, model: DFlashDraftModel, runner: ModelRunner) -> None:
        attention = model.attentions[0]
        pool = runner.token_to_kv_pool
        layers = range(len(model.layers))
        self.model = model
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
        self._write(features_TC, block.positions_BN.view(-1), block.slots_BN.view(-1), n_kept_B)

    @torch.inference_mode()
    def append_prompt(self, batch: ScheduleBatch, features_TC: torch.Tensor) -> None:
        """Write the context K/V of all prompt rows, into the slots the target has just written."""
        prefix_B = async_h2d(batch.prefix_lens, dtype=torch.int32, device=features_TC.device)
        new_B = async_h2d(batch.extend_lens, dtype=torch.int32, device=features_TC.device)
        # "triton" selects the device kernel; on the CPU SGLang has the torch form under every other name.
        form = "torch" if features_TC.is_cpu else "triton"
        positions_T, _ = compute_position(form, prefix_B, new_B, sum(batch.extend_lens))
        self._write(features_TC, positions_T, batch.out_cache_loc, None)

    def _write(
        self,
        features_TC: torch.Tensor,
        positions_T: torch.Tensor,
        slots_T: torch.Tensor,
        n_kept_B: torch.Tensor | None,
    ) -> None:
        k_TLGE, v_TLGE = self.model.context_kv(features_TC)
        append_context(k_TLGE, v_TLGE, positions_T, slots_T, caches=self.caches, key=self.key, n_kept_B=n_kept_B)
