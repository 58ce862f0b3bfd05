"""Times of kernel launches on a GPU in microseconds, and bandwidths relative to a plain copy.

A round launches the plain copy and each case once, so that clock changes and other users of the GPU disturb all of them
alike. Results are medians over rounds. CUDA events time a launch after an overwrite of 1 GiB. The overwrite empties the
L2 cache and keeps the device busy until the launch is queued, so the time excludes host time.
"""

import statistics
from collections.abc import Callable, Sequence
from typing import Any

import torch
from sglang_dflash_kernels.cases.sizes import Case

OVERWRITE_BYTES = 1 << 30  # more than any L2 cache


def time_us(launch: Callable[[], object], overwritten: torch.Tensor) -> Callable[[], float]:
    """Queue a launch between two events. Return a function for the microseconds, to call after a synchronisation."""
    start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
    overwritten.zero_()
    start.record()
    launch()
    end.record()
    return lambda: start.elapsed_time(end) * 1000


def measure(launches: Sequence[Callable[[], object]], n_rounds: int) -> list[list[float]]:
    """Return the microseconds of every launch in every round, after `n_rounds` // 10 rounds of warm-up."""
    overwritten = torch.empty(OVERWRITE_BYTES, dtype=torch.uint8, device="cuda")
    rounds = []
    for _ in range(n_rounds + n_rounds // 10):
        pending = [time_us(launch, overwritten) for launch in launches]
        torch.cuda.synchronize()
        rounds.append([read() for read in pending])
    return [list(times) for times in zip(*rounds[-n_rounds:], strict=True)]


def summary(case: Case, times_us: Sequence[float], bytes_per_us: float) -> dict[str, Any]:
    us, floor_us = statistics.median(times_us), case.n_bytes / bytes_per_us
    p10_us, *_, p90_us = statistics.quantiles(times_us, n=10)
    sizes = {"op": case.op, "shape": case.shape, "bytes": case.n_bytes}
    times = {"us": us, "p10_us": p10_us, "p90_us": p90_us}
    return sizes | times | {"gb_per_s": case.n_bytes / us / 1000, "share_of_floor": floor_us / us}


def timed(cases: Sequence[Case], n_rounds: int) -> tuple[float, list[dict[str, Any]]]:
    """Return the bandwidth of a plain copy in bytes per us, and a summary of each case. Does not check the results."""
    source, copy = (torch.empty(OVERWRITE_BYTES, dtype=torch.uint8, device="cuda") for _ in range(2))
    copy_times, *times = measure([lambda: copy.copy_(source), *(case.launch for case in cases)], n_rounds)
    bytes_per_us = 2 * OVERWRITE_BYTES / statistics.median(copy_times)
    return bytes_per_us, [summary(case, times_us, bytes_per_us) for case, times_us in zip(cases, times, strict=True)]
