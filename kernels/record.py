"""Size of a record of `gdn_verify`. This module does not import torch, so that memory estimates can run without it."""


def record_width(n_value_heads: int, value_width: int, n_key_heads: int, key_width: int) -> int:
    """Return X, the number of fp32 values per layer and block token: delta [H, V], key [G, K] and log decay [H]."""
    return n_value_heads * value_width + n_key_heads * key_width + n_value_heads
