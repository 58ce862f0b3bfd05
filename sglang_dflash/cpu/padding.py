"""Padded rows of a captured batch: their state slots are negative, and SGLang puts them last.

The GPU's kernels skip them. Where those leave a padded row's output as the memory was, a stand-in fills it with NaN, so
that whatever reads it shows.
"""

import torch


def n_real(slot_B: torch.Tensor) -> int:
    """Rows before the padding.

    Raises:
        ValueError: a padded row comes before another.
    """
    real_B = slot_B >= 0
    n = int(real_B.sum())
    if not real_B[:n].all():
        raise ValueError(f"padded rows are not the last ones: slots {slot_B.tolist()}")
    return n


def with_padding(real: torch.Tensor, n_rows: int, fill: float = torch.nan) -> torch.Tensor:
    """`real` with rows of `fill` behind it, `n_rows` in all; strides as `real`'s where nothing is added."""
    if len(real) == n_rows:
        return real
    padded = real.new_full((n_rows, *real.shape[1:]), fill)
    padded[: len(real)] = real
    return padded
