"""Check that a captured draft forward reads the target's head once for all requests, at the shapes of a 27B target.

The forward reads every weight of the layers of Qwen3.5-27B's draft and ends in `engine/draft/fill.py`, as in serving.
Attention is omitted, because it reads little over a short context. Weights are random.
"""

import statistics
from collections.abc import Callable, Sequence
from types import SimpleNamespace
from typing import NamedTuple

import torch
from sglang_dflash_kernels.cases.times import measure
from torch.nn.functional import linear, rms_norm, silu

from sglang_dflash.tools.prove.plugin import Finding, Found, check

BATCHES, N_ROUNDS = (1, 8, 32), 20
# Upper bound of (time for 8 requests) / (time for 1). The ratio would be about 4 if every request read the head of
# 2.5 GB again.
MOST_OF_ONE = 2.0


class Shapes(NamedTuple):
    """Sizes of Qwen3.5-27B's draft, and of the target's head."""

    n_layers: int = 5
    hidden: int = 5120
    heads: int = 32
    kv_heads: int = 8
    head_dim: int = 128
    intermediate: int = 17408
    n_vocab: int = 248320
    block: int = 16

    @property
    def weights(self) -> list[tuple[int, int]]:
        """Return (outputs, inputs) of each matrix: qkv, o, gate_up and down of each layer, then the head."""
        H, wide, inner = self.hidden, self.heads * self.head_dim, self.intermediate
        layer = [(wide + 2 * self.kv_heads * self.head_dim, H), (H, wide), (2 * inner, H), (H, inner)]
        return [*layer * self.n_layers, (self.n_vocab, H)]


def make(shapes: Shapes, device: str, dtype: torch.dtype) -> list[torch.Tensor]:
    return [torch.randn(n, m, device=device, dtype=dtype).mul_(m**-0.5) for n, m in shapes.weights]


def forward(weights: Sequence[torch.Tensor], n_requests: int, block: int) -> Callable[[], torch.Tensor]:
    """Return a function that fills `n_requests` blocks and returns their tokens, int64 [B, N]."""
    from sglang_dflash.engine.draft.fill import Blocks, Filling, filled  # imports SGLang, which takes seconds
    from sglang_dflash.engine.draft.layout import Layout
    from sglang_dflash.engine.draft.target_ends import TargetEnds

    filling = Filling(Layout.of(sample_from_anchor=False), None)
    *layers, head_VH = weights
    hidden_TH = torch.randn(n_requests * block, head_VH.shape[1], device=head_VH.device, dtype=head_VH.dtype)
    tokens_BN = torch.zeros(n_requests, block, dtype=torch.int64, device=head_VH.device)
    blocks = Blocks(tokens_BN, tokens_BN[:, 0])
    ends = TargetEnds(torch.nn.Identity(), SimpleNamespace(weight=head_VH), len(head_VH), 0, None)

    def run() -> torch.Tensor:
        x_TH = hidden_TH
        for qkv, o, gate_up, down in zip(*[iter(layers)] * 4, strict=True):
            x_TH = x_TH + linear(linear(normed(x_TH), qkv)[:, : o.shape[1]], o)
            gate_TI, up_TI = linear(normed(x_TH), gate_up).chunk(2, dim=-1)
            x_TH = x_TH + linear(silu(gate_TI) * up_TI, down)
        return filled(normed(x_TH), blocks, filling, ends)

    return run


def normed(x_TH: torch.Tensor) -> torch.Tensor:
    return rms_norm(x_TH, x_TH.shape[-1:])


@check("draft graph", "a captured draft forward reads the target's head once for all requests", 2, short=True, gpu=True,
       expected="H200: 1.65 / 1.85 / 4.45 ms (seen); with a head read per request 1.4 / 5.7 / 22")  # fmt: skip
def check_draft_graph(found: Found) -> None:
    """Compare the forward's median times at 1 and 8 requests. Each round runs every batch size once."""
    shapes = Shapes()
    weights = make(shapes, "cuda", torch.bfloat16)
    graphs = [captured(forward(weights, n_requests, shapes.block)) for n_requests in BATCHES]
    times_us = measure([graph.replay for graph in graphs], N_ROUNDS)
    found(judge({n: statistics.median(times) / 1e3 for n, times in zip(BATCHES, times_us, strict=True)}))


def captured(run: Callable[[], object]) -> torch.cuda.CUDAGraph:
    stream, graph = torch.cuda.Stream(), torch.cuda.CUDAGraph()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.inference_mode(), torch.cuda.stream(stream):
        run()
    torch.cuda.current_stream().wait_stream(stream)
    with torch.inference_mode(), torch.cuda.graph(graph):
        run()
    return graph


def judge(ms: dict[int, float]) -> Finding:
    text = f"{' / '.join(f'{value:.2f}' for value in ms.values())} ms for {', '.join(map(str, ms))} requests"
    return Finding(text, {"ms": ms}, ms[8] <= MOST_OF_ONE * ms[1])
