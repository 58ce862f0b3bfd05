"""Rotary tables of drafts: partly rotated heads, and the extension of a table to every served position."""

from __future__ import annotations

import math
from typing import Any

import torch
from sglang.srt.layers.rotary_embedding import get_rope
from sglang.srt.layers.rotary_embedding.base import LinearScalingRotaryEmbedding, RotaryEmbedding

from sglang_dflash.engine import saver
from sglang_dflash.engine.draft.record import Checkpoint


class PartRotary(RotaryEmbedding):
    """Rotation of the first pairs (i, i + E/2) of a head. The angle of the other pairs is zero.

    So kernels for whole heads also serve drafts that rotate only a part of each head. While the weights load,
    `tensors.converted` reorders the dimensions of heads for this.
    """

    def __init__(self, draft: Checkpoint, theta: float) -> None:
        self.n_rotated = draft.rotary_width
        super().__init__(
            draft.head_dim, draft.head_dim, draft.max_position_embeddings, theta, True, torch.get_default_dtype()
        )

    def _compute_inv_freq(self, base: float) -> torch.Tensor:
        """Return the angle per position of each pair, fp32 [E/2]."""
        angles = base ** -(torch.arange(0, self.n_rotated, 2, dtype=torch.float32) / self.n_rotated)
        return torch.nn.functional.pad(angles, (0, (self.head_size - self.n_rotated) // 2))


def rotary_of(draft: Checkpoint, theta: float, scaling: dict[str, Any] | None) -> RotaryEmbedding:
    """Return the draft's rotary embedding, whose table covers the positions of its training."""
    if draft.rotary_width < draft.head_dim:
        return PartRotary(draft, theta)
    width, n_positions = draft.head_dim, draft.max_position_embeddings
    return get_rope(width, rotary_dim=width, max_position=n_positions, base=theta, rope_scaling=scaling)


def reach(rotary: RotaryEmbedding, n_positions: int) -> None:
    """Extend the table of cosines and sines to at least `n_positions` rows.

    SGLang has a method for this, but for linear scaling it omits the scale in new rows.
    """
    table = rotary.cos_sin_cache
    if not isinstance(rotary, LinearScalingRotaryEmbedding):
        rotary._ensure_cos_sin_cache_length(n_positions - 1)
    elif len(table) < n_positions:
        (factor,) = rotary.scaling_factors
        # SGLang computes a table with `factor` times `max_position_embeddings` rows.
        rotary.max_position_embeddings = math.ceil(n_positions / factor)
        rotary.cos_sin_cache = rotary._compute_cos_sin_cache().to(table)
    if saver.is_on():  # a table that SGLang or this function has extended lies outside the saver's regions
        with saver.weights():
            rotary.cos_sin_cache = rotary.cos_sin_cache.clone()
