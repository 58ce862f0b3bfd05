"""What verify and fold should take on an H200, from their machine code: `python -m launch.kernel_times`. Predicted, not
measured.

Three bounds, and the prediction is the largest: the bytes that must move, over the memory's bandwidth; the instructions
of all warps, one per cycle and scheduler; and one program's way from its first load to its last store (`sass.cycles`),
as often as programs have to follow one another on a multiprocessor.
"""

import math
from collections.abc import Iterator
from typing import NamedTuple

from sglang_dflash_kernels.gdn_verify import BLOCK_C
from sglang_dflash_kernels.record import record_width

from launch import sass
from launch.compile_kernels import DEVICES, Compiled, compilations, fold_launch, verify_launch
from sglang_dflash.capacity import geometry
from sglang_dflash.memory import sizes

ARCH, BYTES_PER_US, CYCLES_PER_US, SCHEDULERS = 90, 4.8e6, 1755, 4
MODEL, N = "Qwen3.5-27B", 16
BATCHES = (1, 8, 64)


class Bounds(NamedTuple):
    """Microseconds of one launch."""

    bytes: float
    issue: float
    latency: float


def bounds(compiled: Compiled, n_bytes: int, trips: int) -> Bounds:
    way = compiled.code.executed([trips] * len(compiled.code.loops))
    device, n_programs = DEVICES[ARCH], math.prod(compiled.grid)
    at_once = device.n_multiprocessors * device.resident(compiled.code.registers, compiled.n_warps, compiled.shared)
    issued = n_programs * compiled.n_warps * len(way) / SCHEDULERS / device.n_multiprocessors
    return Bounds(
        n_bytes / BYTES_PER_US, issued / CYCLES_PER_US, max(1, n_programs / at_once) * sass.cycles(way) / CYCLES_PER_US
    )


def verify_bytes(layers: sizes.RecurrentSizes, B: int) -> int:
    """Of one layer: states and inputs in, outputs and records out."""
    H, V, G, K = layers.n_value_heads, layers.value_width, layers.n_key_heads, layers.key_width
    rows = 2 * (2 * G * K + 2 * H * V + 2 * H) + 4 * record_width(H, V, G, K)
    return B * (4 * H * V * K + N * rows)


def fold_bytes(layers: sizes.RecurrentSizes, B: int) -> int:
    """Of all layers: states in and out, records of a block that is accepted whole."""
    H, V, G, K = layers.n_value_heads, layers.value_width, layers.n_key_heads, layers.key_width
    return layers.n_layers * B * (8 * H * V * K + 4 * N * record_width(H, V, G, K))


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
            (compiled,) = compilations(ARCH, iter([launch]))
            assert isinstance(compiled, Compiled), compiled
            each = [us * n_launches for us in bounds(compiled, n_bytes, trips)]
            cells = [f"**{us:,.0f}** us" if us == max(each) else f"{us:,.0f} us" for us in each]
            n_instructions = len(compiled.code.executed([trips] * len(compiled.code.loops)))
            yield f"| `{launch.kernel}` | {B} | {n_instructions:,} | {' | '.join(cells)} |"


if __name__ == "__main__":
    print("\n".join(rows()))
