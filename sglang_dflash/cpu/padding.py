"""Padded rows of a captured batch, which have negative state slots and come last.

GPU kernels skip padded rows. If a kernel leaves a padded row's output uninitialised, its stand-in here writes NaN, so
that any use of this output shows.
"""

import torch


def n_real(slot_B: torch.Tensor) -> int:
    """Return the number of rows before the padding.

    Raises:
        ValueError: a padded row precedes another row.
    """
    real_B = slot_B >= 0
    n = int(real_B.sum())
    if not real_B[:n].all():
        raise ValueError(f"padded rows are not the last ones: slots {slot_B.tolist()}")
    return n


def with_padding(real: torch.Tensor, n_rows: int) -> torch.Tensor:
    """Return `real` followed by rows of NaN, `n_rows` in all; `real` itself if nothing is added."""
    if len(real) == n_rows:
        return real
    padded = real.new_full((n_rows, *real.shape[1:]), torch.nan)
    padded[: len(real)] = real
    return padded
