"""How wide a record of the gated delta rule is. Without torch, so that its bytes can be computed anywhere."""


def record_width(n_value_heads: int, value_width: int, n_key_heads: int, key_width: int) -> int:
    """X: fp32 values that one layer keeps per drafted token, delta [H, V], key [G, K] and log decay [H]."""
    return n_value_heads * value_width + n_key_heads * key_width + n_value_heads
