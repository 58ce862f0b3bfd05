"""Copies of rows of the target's head, which score the draft's blocks: some rows, or rows rounded to fp8.

A draft with a reduced vocabulary reads only the rows of its tokens. An fp8 copy has about half the bytes of a bf16
head. Rounding the head can lower acceptance, but does not change answers, because the target verifies all drafts with
its own head. Dimensions: T rows (the drafted slots of all requests' blocks), H hidden, V rows of the head (this rank's
shard), D copied rows.
"""

from __future__ import annotations

import logging
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import torch
from sglang.srt.layers.quantization.fp8_utils import apply_fp8_linear
from torch import nn

from sglang_dflash.engine import saver

logger = logging.getLogger(__name__)

E4M3 = torch.float8_e4m3fn
LARGEST = torch.finfo(E4M3).max
CHUNK = 4096  # rows that are copied at a time: the KV cache leaves little memory for fp32 intermediates
COLUMNS = 256  # columns of a quantized head that are computed at a time


class HeadCopy:
    """Copy of a head's rows in the head's dtype, refreshed whenever the head's weights are updated."""

    words = "a copy"
    rows_DH: torch.Tensor

    def __init__(self, head: Any, row_D: torch.Tensor | None = None, *, by_method: bool = False) -> None:
        """Copy the rows of `head`.

        Args:
            row_D: int64, indices of the copied rows; None: all rows.
            by_method: the head's weights are quantized or packed, and only `head.quant_method` can read them.
        """
        self.head, self.row_D, self.by_method = head, row_D, by_method
        (n_rows, width), like = self._shape()
        with saver.weights():
            self.allocate(len(row_D) if row_D is not None else n_rows, width, like)
        self.fill()
        if isinstance(head, nn.Embedding):  # a head without a method, such as Gemma's
            head.quant_method = SimpleNamespace(process_weights_after_loading=lambda layer: None)  # type: ignore[assignment]
        loaded = head.quant_method.process_weights_after_loading

        def loaded_and_copied(layer: Any) -> None:
            loaded(layer)
            self.fill()

        # SGLang calls this method after every update of the head: from disk, by pushed tensors, and over IPC.
        head.quant_method.process_weights_after_loading = loaded_and_copied
        logger.info("draft head: %s of %d rows takes %.2f MiB", self.words, len(self.rows_DH), self.nbytes / 2**20)

    def _shape(self) -> tuple[torch.Size, torch.Tensor]:
        """Return the shape of the whole head, and a tensor with the dtype and device of its rows."""
        if not self.by_method:
            return self.head.weight.shape, self.head.weight
        device = next(self.head.parameters()).device
        width = self.head.embedding_dim
        like = self.head.quant_method.apply(
            self.head, torch.zeros(1, width, dtype=self.head.params_dtype, device=device)
        )
        return torch.Size((like.shape[1], width)), like

    @property
    def nbytes(self) -> int:
        return self.rows_DH.nbytes

    def allocate(self, n_rows: int, width: int, like: torch.Tensor) -> None:
        """Allocate the copy, with the device of `like`."""
        self.rows_DH = like.new_empty(n_rows, width)

    @torch.no_grad()
    def fill(self) -> None:
        """Copy the head's rows in place, because captured graphs read the copy's memory."""
        if self.by_method:
            self._fill_by_method()
            return
        for part, weights in self._chunks():
            self.rows_DH[part] = weights

    def _chunks(self) -> Iterator[tuple[slice, torch.Tensor]]:
        """Yield parts of the copy, and the head's rows for each part."""
        n_rows = len(self.rows_DH)
        for start in range(0, n_rows, CHUNK):
            part = slice(start, min(start + CHUNK, n_rows))
            yield part, self.head.weight[part if self.row_D is None else self.row_D[part]]

    def _fill_by_method(self) -> None:
        """Read a quantized head: its logits for rows of the identity matrix are columns of its weights."""
        width = self.rows_DH.shape[1]
        for start in range(0, width, COLUMNS):
            n_columns = min(COLUMNS, width - start)
            identity = self.rows_DH.new_zeros(n_columns, width)
            identity[:, start : start + n_columns].fill_diagonal_(1)
            columns_CV = self.head.quant_method.apply(self.head, identity)
            self.rows_DH[:, start : start + n_columns] = (
                columns_CV.T if self.row_D is None else columns_CV.T[self.row_D]
            )

    def logits(self, hidden_TH: torch.Tensor) -> torch.Tensor:
        """Return the logits of the copied rows, [T, D]."""
        return hidden_TH.to(self.rows_DH.dtype) @ self.rows_DH.T


class Fp8Head(HeadCopy):
    """Copy of a head in e4m3 with a scale per row."""

    words = "an fp8 copy"
    scale_D1: torch.Tensor

    @property
    def nbytes(self) -> int:
        return self.rows_DH.nbytes + self.scale_D1.nbytes

    def allocate(self, n_rows: int, width: int, like: torch.Tensor) -> None:
        self.rows_DH = like.new_empty(n_rows, width, dtype=E4M3)
        self.scale_D1 = like.new_empty(n_rows, 1, dtype=torch.float32)

    @torch.no_grad()
    def fill(self) -> None:
        """Round the head's rows into the copy, in place."""
        for part, weights in self._chunks():
            rounded, scale = rounded_rows(weights)
            self.rows_DH[part] = rounded
            self.scale_D1[part] = scale

    def logits(self, hidden_TH: torch.Tensor) -> torch.Tensor:
        """Return the logits [T, D], bf16 on a GPU, else fp32. Hidden states and head are rounded to fp8."""
        if hidden_TH.is_cuda:  # SGLang's kernels round the hidden states themselves, and write only bf16 or fp16
            return apply_fp8_linear(hidden_TH.bfloat16(), self.rows_DH.T, self.scale_D1)
        hidden_TH, scale_T1 = rounded_rows(hidden_TH)
        return (hidden_TH.float() @ self.rows_DH.float().T) * scale_T1 * self.scale_D1.T


def rounded_rows(x_TH: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Return rows in e4m3, and their scales, fp32 [T, 1]. A row's largest absolute value becomes e4m3's maximum."""
    x_TH = x_TH.float()
    scale_T1 = (x_TH.abs().amax(dim=-1, keepdim=True) / LARGEST).clamp(min=torch.finfo(torch.float32).tiny)
    return (x_TH / scale_T1).to(E4M3), scale_T1
