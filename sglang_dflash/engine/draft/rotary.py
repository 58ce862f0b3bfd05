"""Extension of a draft's rotary table to every served position."""

from __future__ import annotations

import math

from sglang.srt.layers.rotary_embedding.base import LinearScalingRotaryEmbedding, RotaryEmbedding


def reach(rotary: RotaryEmbedding, n_positions: int) -> None:
    """Extend the table of cosines and sines to at least `n_positions` rows.

    SGLang has a method for this, but for linear scaling it omits the scale in new rows.
    """
    if not isinstance(rotary, LinearScalingRotaryEmbedding):
        rotary._ensure_cos_sin_cache_length(n_positions - 1)
        return
    table = rotary.cos_sin_cache
    if len(table) < n_positions:
        (factor,) = rotary.scaling_factors
        # SGLang computes a table with `factor` times `max_position_embeddings` rows.
        rotary.max_position_embeddings = math.ceil(n_positions / factor)
        rotary.cos_sin_cache = rotary._compute_cos_sin_cache().to(table)
