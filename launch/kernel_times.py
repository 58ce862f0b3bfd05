"""Predict from machine code how long verify, fold and copies take on an H200: `python -m launch.kernel_times`.

Three bounds, and the prediction is the largest: the bytes that must move, over the memory's bandwidth; the instructions
of all warps, one per cycle and scheduler; and one program's way from its first load to its last store (`sass.cycles`),
as often as programs have to follow one another on a multiprocessor.
"""

import math
from collections.abc import Iterator
from typing import NamedTuple

from sglang_dflash_kernels import copy_draft
from sglang_dflash_kernels.gdn_verify import BLOCK_C
from sglang_dflash_kernels.record import record_width

from sglang_dflash.capacity import geometry
from sglang_dflash.memory import sizes
from tests.tools import sass
from tests.tools.compile_kernels import (
    DEVICES,
    Compiled,
    Launch,
    compilations,
    copy_launches,
    fold_launch,
    verify_launch,
)

ARCH, BYTES_PER_US, CYCLES_PER_US, SCHEDULERS = 90, 4.8e6, 1755, 4
MODEL, N = "Qwen3.5-27B", 16
BATCHES = (1, 8, 64)
COPY_BATCHES, COPY_TEXTS = (1, 8, 32), (32768, 131072)


class Bounds(NamedTuple):
    """Microseconds of one launch."""

    bytes: float
    issue: float
    latency: float


class Stage(NamedTuple):
    """Programs of a launch that execute the same instructions."""

    n_programs: int
    way: list[sass.Instruction]  # of each warp


def bounds(compiled: Compiled, n_bytes: int, *stages: Stage) -> Bounds:
    """`stages` follow each other: the second begins when the last program of the first has finished."""
    device = DEVICES[ARCH]
    at_once = device.n_multiprocessors * device.resident(compiled.code.registers, compiled.n_warps, compiled.shared)
    issued = sum(stage.n_programs * len(stage.way) for stage in stages) * compiled.n_warps
    cycles = sum(max(1, stage.n_programs / at_once) * sass.cycles(stage.way) for stage in stages)
    return Bounds(
        n_bytes / BYTES_PER_US, issued / SCHEDULERS / device.n_multiprocessors / CYCLES_PER_US, cycles / CYCLES_PER_US
    )


def compile_one(launch: Launch) -> Compiled:
    (compiled,) = compilations(ARCH, iter([launch]))
    assert isinstance(compiled, Compiled), compiled
    return compiled


def verify_bytes(layers: sizes.RecurrentSizes, B: int) -> int:
    """Of one layer: states and inputs in, outputs and records out."""
    H, V, G, K = layers.n_value_heads, layers.value_width, layers.n_key_heads, layers.key_width
    rows = 2 * (2 * G * K + 2 * H * V + 2 * H) + 4 * record_width(H, V, G, K)
    return B * (4 * H * V * K + N * rows)


def fold_bytes(layers: sizes.RecurrentSizes, B: int) -> int:
    """Of all layers: states in and out, records of a block that is accepted whole."""
    H, V, G, K = layers.n_value_heads, layers.value_width, layers.n_key_heads, layers.key_width
    return layers.n_layers * B * (8 * H * V * K + 4 * N * record_width(H, V, G, K))


def copy_bounds(B: int, n_text: int) -> tuple[Compiled, list[sass.Instruction], Bounds]:
    """Return the code for B texts of `n_text` tokens, what a warp that decides executes, and the time.

    The loop over tiles has no branch, so the texts' content changes nothing.
    """
    compiled = compile_one(next(copy_launches(B, N, context=n_text + N)))
    n_tiles = -(-(n_text + copy_draft.PLACES - 1) // copy_draft.TILE)
    n_searching = min(n_tiles, compiled.grid[1])
    way = compiled.code.executed([-(-n_tiles // n_searching)])
    beyond_the_text, search, *decide = sass.stages(way)
    stages = Stage(B * n_searching, beyond_the_text + search), Stage(B, [i for stage in decide for i in stage])
    return compiled, way, bounds(compiled, B * (4 * n_text + 20 * N + 8 * (N - 1)), *stages)


def row(name: str, B: int, n_instructions: int, each: list[float]) -> str:
    cells = [f"**{us:,.0f}** us" if us == max(each) else f"{us:,.0f} us" for us in each]
    return f"| {name} | {B} | {n_instructions:,} | {' | '.join(cells)} |"


def rows() -> Iterator[str]:
    """The table in Markdown: kernel, requests, instructions of a warp, and microseconds of all layers."""
    layers = geometry.read_target(MODEL).recurrent
    assert layers is not None
    yield "| kernel | requests | instructions a warp | bytes | issue | latency |"
    yield "| --- | ---: | ---: | ---: | ---: | ---: |"
    for B in BATCHES:
        for launch, n_bytes, trips, n_launches in (
            (verify_launch(layers, B, N), verify_bytes(layers, B), layers.key_width // BLOCK_C, layers.n_layers),
            (fold_launch(layers, B, N, tracked=False), fold_bytes(layers, B), N, 1),
        ):
            compiled = compile_one(launch)
            way = compiled.code.executed([trips] * len(compiled.code.loops))
            each = bounds(compiled, n_bytes, Stage(math.prod(compiled.grid), way))
            yield row(f"`{launch.kernel}`", B, len(way), [us * n_launches for us in each])
    for n_text in COPY_TEXTS:
        for B in COPY_BATCHES:
            _, way, each = copy_bounds(B, n_text)
            yield row(f"`copy_draft`, {n_text >> 10}k tokens", B, len(way), list(each))


if __name__ == "__main__":
    print("\n".join(rows()))
