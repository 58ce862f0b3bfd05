"""Time of a captured draft forward at the shapes of Qwen3.5-27B's draft: is the target's head read once?

The forward has every weight of the draft's layers and ends in `draft/fill.py`, as serving does. Attention over a short
context is left out: it reads next to nothing. Weights are random.
"""

from __future__ import annotations

import statistics
from collections.abc import Callable
from types import SimpleNamespace
from typing import NamedTuple

import torch
from torch.nn.functional import linear, rms_norm, silu

from sglang_dflash.prove.machine import Place
from sglang_dflash.prove.record import Finding, require

BATCHES, N_ROUNDS = (1, 8, 32), 20
# Bound of the time of 8 requests over one. A head of 2.5 GB read once per request would make it four.
MOST_OF_ONE = 2.0


class Shapes(NamedTuple):
    n_layers: int = 5
    hidden: int = 5120
    heads: int = 32
    kv_heads: int = 8
    head_dim: int = 128
    intermediate: int = 17408
    n_vocab: int = 248320
    block: int = 16


class Layer(NamedTuple):
    qkv: torch.Tensor
    o: torch.Tensor
    gate_up: torch.Tensor
    down: torch.Tensor


def make(shapes: Shapes, device: str, dtype: torch.dtype) -> tuple[list[Layer], torch.Tensor]:
    """Return random layers, and a head [V, H]."""

    def weight(n_out: int, n_in: int) -> torch.Tensor:
        return torch.randn(n_out, n_in, device=device, dtype=dtype).mul_(n_in**-0.5)

    wide, hidden = shapes.heads * shapes.head_dim, shapes.hidden
    layers = [
        Layer(
            weight(wide + 2 * shapes.kv_heads * shapes.head_dim, hidden),
            weight(hidden, wide),
            weight(2 * shapes.intermediate, hidden),
            weight(hidden, shapes.intermediate),
        )
        for _ in range(shapes.n_layers)
    ]
    return layers, weight(shapes.n_vocab, hidden)


def forward(layers: list[Layer], head_VH: torch.Tensor, n_requests: int, block: int) -> Callable[[], torch.Tensor]:
    """Return what fills `n_requests` blocks; a call returns tokens, int64 [B, N]."""
    from sglang_dflash.draft.fill import filled
    from sglang_dflash.draft.target_ends import TargetEnds

    hidden_TH = torch.randn(n_requests * block, head_VH.shape[1], device=head_VH.device, dtype=head_VH.dtype)
    tokens_BN = torch.zeros(n_requests, block, dtype=torch.int64, device=head_VH.device)
    ends = TargetEnds(torch.nn.Identity(), SimpleNamespace(weight=head_VH), len(head_VH), 0, None)

    def run() -> torch.Tensor:
        x_TH = hidden_TH
        for layer in layers:
            q_TX = linear(normed(x_TH), layer.qkv)[:, : layer.o.shape[1]]
            x_TH = x_TH + linear(q_TX, layer.o)
            gate_TI, up_TI = linear(normed(x_TH), layer.gate_up).chunk(2, dim=-1)
            x_TH = x_TH + linear(silu(gate_TI) * up_TI, layer.down)
        return filled(normed(x_TH), tokens_BN, None, ends)

    return run


def normed(x_TH: torch.Tensor) -> torch.Tensor:
    return rms_norm(x_TH, x_TH.shape[-1:])


def check(place: Place) -> Finding:
    """Time the captured forward at each batch size: medians of rounds that run the sizes in turn."""
    from sglang_dflash_kernels.cases.times import measure

    assert place.gpu is not None, "times are a GPU's"
    shapes = Shapes()
    layers, head_VH = make(shapes, "cuda", torch.bfloat16)
    graphs = [captured(forward(layers, head_VH, n_requests, shapes.block)) for n_requests in BATCHES]
    times_us = measure([graph.replay for graph in graphs], N_ROUNDS)
    return judge({n: statistics.median(times) / 1e3 for n, times in zip(BATCHES, times_us, strict=True)})


def captured(run: Callable[[], object]) -> torch.cuda.CUDAGraph:
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.inference_mode(), torch.cuda.stream(stream):
        run()
    torch.cuda.current_stream().wait_stream(stream)
    graph = torch.cuda.CUDAGraph()
    with torch.inference_mode(), torch.cuda.graph(graph):
        run()
    return graph


def judge(ms: dict[int, float]) -> Finding:
    """
    Raises:
        Failed: eight requests take as long as a head that is read once per request would.
    """
    shown = " / ".join(f"{value:.2f}" for value in ms.values())
    text = f"{shown} ms for {', '.join(map(str, ms))} requests"
    return require(ms[8] <= MOST_OF_ONE * ms[1], text, {"ms": {str(n): value for n, value in ms.items()}})
