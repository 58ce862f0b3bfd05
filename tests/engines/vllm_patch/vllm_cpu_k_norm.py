"""vLLM plugin that fixes the norm of the draft's context keys on a CPU; every process of vLLM loads it.

On a CPU, vLLM 0.32 normalises the context keys of all draft layers with the first layer's weights: its kernel reads one
row of the weights that `DFlashQwen3Model._normalize_context_k` passes. Answers are right without the fix, but fewer
drafts are accepted.
"""

import torch
from vllm.model_executor.models.qwen3_dflash import DFlashQwen3Model


def patch() -> None:
    def normalize(self: DFlashQwen3Model, keys_LTGE: torch.Tensor) -> torch.Tensor:
        keys = keys_LTGE.float()
        keys = keys * torch.rsqrt(keys.pow(2).mean(-1, keepdim=True) + self._rms_norm_eps)
        return keys.to(keys_LTGE.dtype) * self._k_norm_weights[:, None, None]

    DFlashQwen3Model._normalize_context_k = normalize
