"""Padding requests of a captured batch. They have negative state slots, and follow the real requests.

GPU kernels skip padding requests. If a kernel leaves their outputs uninitialised, its stand-in on this platform writes
NaN, so that any use of these outputs shows.
"""

import torch


def n_real(slot_B: torch.Tensor) -> int:
    """Return the number of real requests.

    Raises:
        ValueError: a padding request precedes a real request.
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
