"""Rotary table of a draft, extended to every position that is served."""

from __future__ import annotations

import math

from sglang.srt.layers.rotary_embedding.base import LinearScalingRotaryEmbedding, RotaryEmbedding


def reach(rotary: RotaryEmbedding, n_positions: int) -> None:
    """Make the table of cosines and sines at least `n_positions` long.

    SGLang's own extension works for every kind but the linearly scaled one, whose new rows would lack the scale.
    """
    if not isinstance(rotary, LinearScalingRotaryEmbedding):
        rotary._ensure_cos_sin_cache_length(n_positions - 1)
        return
    table = rotary.cos_sin_cache
    if len(table) < n_positions:
        (factor,) = rotary.scaling_factors
        rotary.max_position_embeddings = math.ceil(n_positions / factor)  # the table has `factor` times as many rows
        rotary.cos_sin_cache = rotary._compute_cos_sin_cache().to(table)
