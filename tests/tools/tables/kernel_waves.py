"""Compute the tables of kernels/README.md: waves of every kernel on an H200, and predicted times of two.

    python -m tests.tools.tables.kernel_waves

A wave is as many programs as the GPU runs at once. A launch whose programs fill 1.2 waves takes as long as one of 2, if
all programs take equally long. Measured times are from `launch/results`, minus the time of an empty launch.

Three bounds of a launch's time are predicted from machine code:
- bytes: the bytes that must move, divided by the memory's bandwidth.
- issue: instructions of all warps, at one per cycle and scheduler.
- latency: cycles of one program, times the whole number of waves.
"""

import json
import math
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

from tests.tools import sass
from tests.tools.compile_kernels import (  # first, because it removes TRITON_INTERPRET
    DEVICES,
    QWEN_27B,
    Compiled,
    KernelLaunch,
    append_launches,
    compilations,
    copy_launches,
    fold_launch,
    penalise_launches,
    second_launches,
    step_launches,
    verify_launch,
)

# isort: split
from sglang_dflash_kernels import gdn_geometry
from sglang_dflash_kernels.record import record_width

from sglang_dflash.engine.memory import sizes
from sglang_dflash.tools.capacity import geometry
from sglang_dflash.tools.capacity import known_models as models

ARCH, BYTES_PER_US, CYCLES_PER_US, SCHEDULERS = 90, 4.8e6, 1755, 4
MODEL, N, BATCHES, TEXT = "Qwen3.5-27B", 16, (1, 8, 32), 32768
MEASURED = Path(__file__).parents[3] / "launch/results/2026-11-27-h200-prove.json"


class Bounds(NamedTuple):
    """Microseconds of a launch."""

    bytes: float
    issue: float
    latency: float


def layers() -> sizes.RecurrentSizes:
    found = geometry.read_target(MODEL).recurrent
    assert found is not None
    return found


def launches(B: int) -> Iterator[KernelLaunch]:
    """Yield a launch of every kernel for B requests, in the order of the tables."""
    plan, _, accept_tracked = step_launches(B, N)
    yield from (plan, accept_tracked)
    yield next(penalise_launches(B, N, 2))
    yield next(append_launches(geometry.read_draft(models.draft_of(MODEL)).attention, B * N, B, ARCH))
    yield verify_launch(layers(), B, N)
    yield fold_launch(layers(), B, N, tracked=False)
    first, _, select = second_launches(QWEN_27B.second, B, N)
    yield from (first, select, *copy_launches(B, N, context=TEXT + N))


def compile_one(launch: KernelLaunch) -> Compiled:
    (compiled,) = compilations(ARCH, iter([launch]))
    assert isinstance(compiled, Compiled), compiled
    return compiled


def measured() -> dict[tuple[str, int], float]:
    """Return the microseconds of a launch by kernel and number of requests, minus those of an empty launch."""
    (bandwidth,) = [one for one in json.loads(MEASURED.read_text())["results"] if one["name"] == "bandwidth"]
    cases = bandwidth["numbers"]["cases"]
    (empty_us,) = {case["us"] for case in cases if case["op"] == "launch"}
    return {
        (case["op"], B): case["us"] - empty_us for case in cases for B in BATCHES if f"B={B} N={N}" in case["shape"]
    }


def waves(by_batch: dict[int, list[Compiled]]) -> Iterator[str]:
    us, device = measured(), DEVICES[ARCH]
    heads = [f"{what} {B}" for what in ("waves", "us") for B in BATCHES]
    yield f"| kernel | registers | per multiprocessor | {' | '.join(heads)} |"
    yield "| --- |" + " ---: |" * (2 + 2 * len(BATCHES))
    for row in zip(*by_batch.values(), strict=True):
        name = row[0].launch.kernel
        registers = dict.fromkeys(one.code.registers for one in row)
        resident = dict.fromkeys(one.resident(device) for one in row)
        cells = [", ".join(map(str, registers)), ", ".join(map(str, resident))]
        cells += [two_digits(one.waves(device)) for one in row] + [f"{us[name, B]:,.1f}" for B in BATCHES]
        yield f"| `{name}` | {' | '.join(cells)} |"


def two_digits(n_waves: float) -> str:
    return "< 0.01" if n_waves < 0.01 else f"{n_waves:.2f}" if n_waves < 10 else f"{n_waves:.0f}"


def bounds(compiled: Compiled, n_bytes: int, trips: int) -> Bounds:
    device = DEVICES[ARCH]
    way = compiled.code.executed([trips] * len(compiled.code.loops))
    issued = compiled.n_programs * compiled.n_warps * len(way) / SCHEDULERS / device.n_multiprocessors
    cycles = math.ceil(compiled.waves(device)) * sass.cycles(way)
    return Bounds(n_bytes / BYTES_PER_US, issued / CYCLES_PER_US, cycles / CYCLES_PER_US)


def verify_bounds(compiled: Compiled, B: int) -> Bounds:
    """Return bounds of one layer: reads of states and inputs, writes of outputs and records."""
    L = layers()
    H, V, G, K = L.n_value_heads, L.value_width, L.n_key_heads, L.key_width
    rows = 2 * (2 * G * K + 2 * H * V + 2 * H) + 4 * record_width(H, V, G, K)
    columns = gdn_geometry.geometry(B * H, gdn_geometry.SMALLEST, V).columns
    return bounds(compiled, B * (4 * H * V * K + N * rows), K // columns)


def fold_bounds(compiled: Compiled, B: int) -> Bounds:
    """Return bounds of all layers: reads and writes of states, reads of the records of whole blocks."""
    L = layers()
    H, V, G, K = L.n_value_heads, L.value_width, L.n_key_heads, L.key_width
    return bounds(compiled, L.n_layers * B * (8 * H * V * K + 4 * N * record_width(H, V, G, K)), N)


def times(by_batch: dict[int, list[Compiled]]) -> Iterator[str]:
    yield "| kernel | requests | bytes | issue | latency |"
    yield "| --- | ---: | ---: | ---: | ---: |"
    for B, row in by_batch.items():
        for compiled in row:
            name = compiled.launch.kernel
            if name not in ("gdn_verify", "gdn_fold"):
                continue
            each = verify_bounds(compiled, B) if name == "gdn_verify" else fold_bounds(compiled, B)
            cells = [f"**{us:,.1f}**" if us == max(each) else f"{us:,.1f}" for us in each]
            yield f"| `{name}` | {B} | {' | '.join(cells)} |"


def tables() -> list[str]:
    by_batch = {B: [compile_one(launch) for launch in launches(B)] for B in BATCHES}
    return ["\n".join(waves(by_batch)), "\n".join(times(by_batch))]


if __name__ == "__main__":
    print("\n\n".join(tables()))
