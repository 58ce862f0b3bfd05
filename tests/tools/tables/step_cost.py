"""Compute the time of a decode step on an H200, with this plugin and with SGLang's worker.

    python -m tests.tools.tables.step_cost

Setting: Qwen3.5-27B with its DFlash draft, blocks of 16 verified whole, short contexts, greedy. A row of the table is a
part of a step. Its time is the larger of bytes / bandwidth and FLOP / rate of a large matrix product. A step is the sum
of all rows. The times of n-gram copies were measured on an H200.

Recurrent states: this plugin's commit was measured on an H200 (kernels/README.md). Its verify is predicted from machine
code. The prediction is multiplied by measured / predicted time of the kernel's version of 2026-11-27, 1.3 to 1.6. For
SGLang's kernels only bytes are counted.

Convolution windows: SGLang's kernel writes three inputs per channel and token. The L2 cache writes sectors of 32 bytes.
In this plugin's strips, the channels of a token are adjacent, so sectors are full. In SGLang's strips, neighbouring
channels lie N + 2 inputs apart, so each input of 2 bytes takes a sector (tests/tools/conv_windows.py).
"""

from collections.abc import Iterator
from typing import NamedTuple

N, BATCHES = 16, (1, 8, 32)
BYTES_PER_MS, FLOP_PER_MS = 4.2e9, 0.68e12  # reached by large copies and products on an H200
STATE_BYTES_PER_MS = 4.8e9  # peak of the data sheet, for SGLang's recurrent states; favours SGLang's worker
VOCABULARY, HIDDEN = 248320, 5120
GDN_LAYERS, GDN_BYTES, ATTENTION_LAYERS, ATTENTION_BYTES, MLP_BYTES = 48, 231.7e6, 16, 209.7e6, 534.8e6
HEAD_BYTES = 2 * VOCABULARY * HIDDEN
DRAFT_BYTES, CONTEXT_KV_BYTES = 3.2e9, 367e6
STATES_BYTES = GDN_LAYERS * 4 * 48 * 128 * 128  # per request
OUTSIDE_MS = 0.1  # small kernels outside captured graphs, and the gaps between them
FOLD_MS = {1: 0.13, 8: 0.75, 32: 3.15}
VERIFY_US = {1: 5.4, 8: 8.3, 32: 33.2}  # a layer, predicted by kernel_waves.py
# The version of 2026-11-27, predicted in the same way, and measured minus an empty launch.
EARLIER_US, EARLIER_MEASURED_US = {1: 6.3, 8: 16.7, 32: 50.2}, {1: 8.1, 8: 24.4, 32: 80.4}
CONV_CHANNELS, CONV_KEPT, CONV_BYTES = 10240, 3, 2  # of a layer; inputs in a window, and bytes of an input
SECTOR_BYTES, L2_BYTES_PER_MS = 32, 5.5e9  # L2 rate: assumed from microbenchmarks of an H100
# `copy_draft` and `weigh_copies` by number of requests, with 32k tokens of history each, in
# launch/results/2026-11-27-h200-prove.json
COPY_MS = {1: 0.021, 8: 0.024, 32: 0.037}

TARGET_BYTES = GDN_LAYERS * (GDN_BYTES + MLP_BYTES) + ATTENTION_LAYERS * (ATTENTION_BYTES + MLP_BYTES) + HEAD_BYTES


class StageCost(NamedTuple):
    """Milliseconds that a part of a step takes, by number of requests, with this plugin and with SGLang's worker."""

    part: str
    ours: dict[int, float]
    sglang: dict[int, float]


def product(n_bytes: float, n_rows: int) -> float:
    """Return the milliseconds of a product of bf16 weights of `n_bytes` with `n_rows` rows of activations."""
    return max(n_bytes / BYTES_PER_MS, n_bytes * n_rows / FLOP_PER_MS)


def window_writes(bytes_per_input: int) -> dict[int, float]:
    """Return the milliseconds of writes to the L2 cache, by number of requests. An input takes `bytes_per_input`."""
    n_inputs = GDN_LAYERS * N * CONV_KEPT * CONV_CHANNELS
    return {B: B * n_inputs * bytes_per_input / L2_BYTES_PER_MS for B in BATCHES}


def rows() -> list[StageCost]:
    def both(part: str, ms: dict[int, float]) -> StageCost:
        return StageCost(part, ms, ms)

    verify = {B: GDN_LAYERS * VERIFY_US[B] * EARLIER_MEASURED_US[B] / EARLIER_US[B] / 1000 for B in BATCHES}
    snapshots = {B: B * STATES_BYTES * (1 + N) / STATE_BYTES_PER_MS for B in BATCHES}
    scatter = {B: B * STATES_BYTES * 2 / STATE_BYTES_PER_MS for B in BATCHES}
    return [
        both("the target's products", {B: product(TARGET_BYTES, B * N) for B in BATCHES}),
        both("logits to fp32, argmax", {B: 12 * B * N * VOCABULARY / BYTES_PER_MS for B in BATCHES}),
        StageCost("recurrent states, verify", verify, snapshots),
        StageCost("convolution windows", window_writes(CONV_BYTES), window_writes(SECTOR_BYTES)),
        StageCost("recurrent states, commit", FOLD_MS, scatter),
        both("the draft's layers", {B: product(DRAFT_BYTES, B * N) for B in BATCHES}),
        both("the draft's head", {B: product(HEAD_BYTES, B * (N - 1)) for B in BATCHES}),
        both("the drafts' argmax", {B: 2 * B * (N - 1) * VOCABULARY / BYTES_PER_MS for B in BATCHES}),
        both("draft K and V from features (append)", {B: product(CONTEXT_KV_BYTES, B * N) for B in BATCHES}),
        StageCost("n-gram copies", COPY_MS, dict.fromkeys(BATCHES, 0.0)),
        both("kernels outside graphs", dict.fromkeys(BATCHES, OUTSIDE_MS)),
    ]


def table() -> Iterator[str]:
    made = rows()
    total = StageCost("**step**", *({B: sum(side[B] for side in sides) for B in BATCHES} for sides in by_side(made)))
    heads = [f"{who} {B}" for B in BATCHES for who in ("plugin", "SGLang")]
    yield f"| ms, by requests | {' | '.join(heads)} |"
    yield "|---|" + "---:|" * len(heads)
    for row in (*made, total):
        yield f"| {row.part} | {' | '.join(f'{side[B]:.2f}' for B in BATCHES for side in (row.ours, row.sglang))} |"
    ratios = [f"**{total.ours[B] / total.sglang[B]:.2f}** | " for B in BATCHES]
    yield f"| plugin over SGLang | {' | '.join(ratios)}|"


def by_side(made: list[StageCost]) -> tuple[list[dict[int, float]], list[dict[int, float]]]:
    return [row.ours for row in made], [row.sglang for row in made]


if __name__ == "__main__":
    print("\n".join(table()))
