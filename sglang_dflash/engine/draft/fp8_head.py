"""fp8 copy of the target's head, which scores the draft's blocks. The copy has about half the bytes of a bf16 head.

Rounding the head can lower acceptance, but does not change answers, because the target verifies all drafts with its own
head. Dimensions: T rows (the drafted slots of all requests' blocks), H hidden, V rows of the head (this rank's shard).
"""

from __future__ import annotations

import logging
from typing import Any

import torch
from sglang.srt.layers.quantization.fp8_utils import apply_fp8_linear

logger = logging.getLogger(__name__)

E4M3 = torch.float8_e4m3fn
LARGEST = torch.finfo(E4M3).max
CHUNK = 4096  # rows that are rounded at a time: the KV cache leaves little memory for fp32 intermediates


class Fp8Head:
    """Copy of a head in e4m3 with a scale per row, refreshed whenever the head's weights are updated."""

    def __init__(self, head: Any) -> None:
        weight_VH = head.weight
        self.rows_VH = torch.empty_like(weight_VH, dtype=E4M3, requires_grad=False)
        self.scale_V1 = weight_VH.new_empty(len(weight_VH), 1, dtype=torch.float32)
        self.fill(weight_VH)
        loaded = head.quant_method.process_weights_after_loading

        def loaded_and_copied(layer: Any) -> None:
            loaded(layer)
            self.fill(head.weight)

        # SGLang calls this method after every update of the head: from disk, by pushed tensors, and over IPC.
        head.quant_method.process_weights_after_loading = loaded_and_copied
        n_bytes = self.rows_VH.nbytes + self.scale_V1.nbytes
        logger.info("draft head: an fp8 copy of %d rows takes %.2f MiB", len(weight_VH), n_bytes / 2**20)

    @torch.no_grad()
    def fill(self, weight_VH: torch.Tensor) -> None:
        """Round the head's rows into the copy, in place, because captured graphs read the copy's memory."""
        chunks = (tensor.split(CHUNK) for tensor in (weight_VH, self.rows_VH, self.scale_V1))
        for weights, rows, scales in zip(*chunks, strict=True):
            rounded, scale = rounded_rows(weights)
            rows.copy_(rounded)
            scales.copy_(scale)

    def logits(self, hidden_TH: torch.Tensor) -> torch.Tensor:
        """Return the logits of the rounded hidden states with the rounded head, [T, V], bf16 on a GPU, else fp32."""
        if hidden_TH.is_cuda:  # SGLang's kernels round the hidden states themselves, and write only bf16 or fp16
            return apply_fp8_linear(hidden_TH.bfloat16(), self.rows_VH.T, self.scale_V1)
        hidden_TH, scale_T1 = rounded_rows(hidden_TH)
        return (hidden_TH.float() @ self.rows_VH.float().T) * scale_T1 * self.scale_V1.T


def rounded_rows(x_TH: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Return rows in e4m3, and their scales, fp32 [T, 1]. A row's largest absolute value becomes e4m3's maximum."""
    x_TH = x_TH.float()
    scale_T1 = (x_TH.abs().amax(dim=-1, keepdim=True) / LARGEST).clamp(min=torch.finfo(torch.float32).tiny)
    return (x_TH / scale_T1).to(E4M3), scale_T1
