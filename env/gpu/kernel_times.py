"""Times of kernels in microseconds at the sizes of a 27B target, interleaved: medians of many rounds.

    python -m env.gpu.kernel_times FILE.json SECONDS

The kernels are `gdn_verify`, `copy_draft` after 32,768 tokens, and SGLang's causal convolution of a verify with its
windows in three layouts. With GPU_DRY=1 the CPU forms run at small sizes.
"""

import json
import statistics
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

import torch
from sglang_dflash_kernels.cases.make import copy_cases, gdn_cases
from sglang_dflash_kernels.cases.sizes import QWEN_27B, SMALL, Sizes
from sglang_dflash_kernels.cases.times import measure

from env.gpu import dry

REQUESTS, REQUESTS_DRY, BLOCKS = (1, 8, 32), (1, 2), (16, 8)
ROUNDS, ROUNDS_DRY = 100, 5
TAPS = 4  # of the causal convolution
FAMILY_S, FAMILY_DRY_S = 12.0, 3.0  # estimated seconds of a family, compilation included


class Timed(NamedTuple):
    kernel: str
    shape: str
    launch: Callable[[], object]


def gdn(sizes: Sizes, requests: Sequence[int], device: str) -> list[Timed]:
    _, H, _, V, K = sizes.recurrent
    states = torch.randn(1, max(requests) + 1, H, V, K, device=device)
    one_layer = replace(sizes, recurrent=sizes.recurrent._replace(L=1))
    found = []
    for N in BLOCKS:
        for B in requests:
            case = next(case for case in gdn_cases(B, N, states, one_layer) if case.op == "gdn_verify")
            found.append(Timed(case.op, case.shape, case.launch))
    return found


def copies(sizes: Sizes, requests: Sequence[int], device: str) -> list[Timed]:
    found = (copy_cases(B, 16, sizes, device)[0] for B in requests)
    return [Timed(case.op, case.shape, case.launch) for case in found]


def windows(layout: str, n_rows: int, n_tokens: int, channels: int, like: torch.Tensor) -> torch.Tensor:
    """Return a view [rows, tokens, channels, TAPS - 1] of the last inputs after each token of a block.

    Layouts: "own window per token" stores each window. The others store each input once: "channel-major strip" as
    [channels, tokens], "token-major strip" as [tokens, channels].
    """
    kept, length = TAPS - 1, n_tokens + TAPS - 2
    shape = n_rows, n_tokens, channels, kept
    if layout == "own window per token":
        return like.new_zeros(shape)
    if layout == "channel-major strip":
        strip = like.new_zeros(n_rows, channels, length)
        return strip.as_strided(shape, (strip.stride(0), 1, length, 1))
    assert layout == "token-major strip", layout
    strip = like.new_zeros(n_rows, length, channels)
    return strip.as_strided(shape, (strip.stride(0), channels, 1, channels))


LAYOUTS = "own window per token", "channel-major strip", "token-major strip"


def convolution(sizes: Sizes, requests: Sequence[int], device: str) -> list[Timed]:
    """Return launches of one layer's convolution in a verify, as SGLang's backend calls it."""
    if device == "cpu":
        from sglang_dflash.platforms.cpu.conv import causal_conv1d_update
    else:
        from sglang.kernels.ops.mamba.causal_conv1d_triton import causal_conv1d_update

    _, H, G, V, K = sizes.recurrent
    channels = 2 * G * K + H * V
    weight = torch.randn(channels, TAPS, device=device).to(sizes.dtype)
    states = torch.randn(max(requests) + 1, channels, TAPS - 1, device=device).to(sizes.dtype)
    found = []
    for N in BLOCKS:
        for B in requests:
            x = torch.randn(B * N, channels, device=device).to(sizes.dtype).view(B, N, channels).transpose(1, 2)
            slots = torch.arange(1, B + 1, device=device, dtype=torch.int32)
            rows = torch.arange(B, device=device, dtype=torch.int32)
            for layout in LAYOUTS:
                kept = windows(layout, max(requests) + 1, N, channels, weight)
                named = {"conv_state_indices": slots, "intermediate_conv_window": kept}
                named |= {"intermediate_state_indices": rows}

                def launch(x: torch.Tensor = x, named: dict[str, Any] = named) -> object:
                    return causal_conv1d_update(x, states, weight, None, "silu", **named)

                found.append(Timed("causal_conv1d_update", f"B={B} N={N}, {layout}", launch))
    return found


FAMILIES = {"gdn_verify": gdn, "convolution": convolution, "copy_draft": copies}


def on_cpu(launches: Sequence[Callable[[], object]], n_rounds: int) -> list[list[float]]:
    """Return the microseconds of every launch in every round, by the host's clock."""
    rounds = []
    for _ in range(n_rounds):
        times = []
        for launch in launches:
            began = time.perf_counter()
            launch()
            times.append((time.perf_counter() - began) * 1e6)
        rounds.append(times)
    return [list(times) for times in zip(*rounds, strict=True)]


def summary(timed: Timed, times_us: Sequence[float]) -> dict[str, Any]:
    low_us, *_, high_us = statistics.quantiles(times_us, n=10)
    times = {"us": round(statistics.median(times_us), 3), "p10_us": round(low_us, 3), "p90_us": round(high_us, 3)}
    return {"kernel": timed.kernel, "shape": timed.shape, **times}


def main(path: Path, limit_s: float) -> None:
    """Time one family after the other while time is left; write the document after each."""
    began, small = time.monotonic(), dry.is_dry()
    device, sizes = ("cpu", SMALL) if small else ("cuda", QWEN_27B)
    requests, n_rounds, estimate_s = (REQUESTS_DRY, ROUNDS_DRY, FAMILY_DRY_S) if small else (REQUESTS, ROUNDS, FAMILY_S)
    document: dict[str, Any] = {"rounds": n_rounds, "rows": [], "left_out": [], "failed": {}}
    torch.manual_seed(0)
    for name, make in FAMILIES.items():
        if time.monotonic() - began + estimate_s > limit_s:
            document["left_out"].append(name)
        else:
            try:
                timed = make(sizes, requests, device)
                launches = [one.launch for one in timed]
                times_us = on_cpu(launches, n_rounds) if small else measure(launches, n_rounds)
                document["rows"] += [summary(one, its) for one, its in zip(timed, times_us, strict=True)]
            except Exception as error:  # the next family may still succeed
                document["failed"][name] = f"{type(error).__name__}: {error}"[-1500:]
        path.write_text(json.dumps(document, indent=1) + "\n")
    if document["failed"]:
        sys.exit(f"failed: {document['failed']}")


if __name__ == "__main__":
    main(Path(sys.argv[1]), float(sys.argv[2]))
