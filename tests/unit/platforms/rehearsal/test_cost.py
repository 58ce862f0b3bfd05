"""Cost rules of the GPU emulation: captured forwards that read a weight twice or launch too often must be refused."""

from collections.abc import Callable, Iterator
from types import SimpleNamespace
from typing import Any, cast

import pytest
import torch
from torch import nn

from sglang_dflash.engine.draft.fill import Blocks, Filling, filled
from sglang_dflash.engine.draft.layout import Layout
from sglang_dflash.engine.draft.sglang_model import DFlashDraftModel
from sglang_dflash.engine.draft.target_ends import TargetEnds
from sglang_dflash.engine.stages import budget
from sglang_dflash.platforms.rehearsal import cost, graph, streams
from sglang_dflash.platforms.rehearsal.graph import Graph, launch
from sglang_dflash.platforms.rehearsal.tape import CaptureError

B, N, H, V = 3, 4, 8, 20


class Tied(nn.Module):
    """Embedding that is also the head, and two layers whose weights are slices of one tensor."""

    def __init__(self) -> None:
        super().__init__()
        self.head = nn.Parameter(torch.randn(V, H), requires_grad=False)
        stack_LHH = torch.randn(2, H, H)
        self.first, self.second = (nn.Parameter(weight, requires_grad=False) for weight in stack_LHH)
        self.stack_LHH = stack_LHH


@pytest.fixture
def model(monkeypatch: pytest.MonkeyPatch) -> Iterator[Tied]:
    monkeypatch.setattr(cost, "_models", [])
    tied = Tied()
    cost.watch_parameters(tied)
    return tied


def capture(forward: Callable[[], Any]) -> Graph:
    captured = Graph()
    with torch.inference_mode(), graph.graph(captured):
        forward()
    return captured


def draft(model: Tied, hidden_TH: torch.Tensor) -> torch.Tensor:
    ends = TargetEnds(nn.Identity(), SimpleNamespace(weight=model.head), V, 0, cast(Any, None))
    return filled(
        hidden_TH,
        Blocks(torch.zeros(B, N, dtype=torch.int64), torch.arange(B)),
        Filling(Layout.of(sample_from_anchor=False), None),
        ends,
    )


def test_forward_that_reads_each_weight_once_is_captured(model: Tied) -> None:
    """Reading rows of the tied embedding does not count. Both layers and the head are read by one product each."""
    token_T = torch.zeros(B * N, dtype=torch.int64)

    def forward() -> torch.Tensor:
        hidden_TH = nn.functional.embedding(token_T, model.head)
        return draft(model, nn.functional.linear(hidden_TH @ model.first, model.second))

    assert len(capture(forward).nodes) > 4


def test_stack_of_layers_is_read_once_by_a_batched_product(model: Tied) -> None:
    hidden_TH = torch.randn(B * N, H)
    capture(lambda: torch.matmul(hidden_TH, model.stack_LHH))


def test_head_over_strided_blocks_is_refused(model: Tied) -> None:
    """For strided blocks PyTorch expands the weight to a batch, so a GPU reads it once per request."""
    hidden_BDH = torch.randn(B, N, H)[:, 1:]
    with pytest.raises(CaptureError, match=r"reads weights more than once: Tied\.head 3 times"):
        capture(lambda: hidden_BDH @ model.head.T)


def test_weight_used_twice_is_refused(model: Tied) -> None:
    hidden_TH = torch.randn(B * N, H)
    with pytest.raises(CaptureError, match=r"Tied\.first 2 times, Tied\.second 2 times"):
        capture(lambda: torch.matmul(hidden_TH @ model.first @ model.second, model.stack_LHH))


def test_weight_passed_to_two_kernels_is_refused(model: Tied) -> None:
    kernel = launch(lambda x_TH, weight_HH: x_TH @ weight_HH)
    hidden_TH = torch.randn(B * N, H)
    capture(lambda: kernel(hidden_TH, model.first))
    with pytest.raises(CaptureError, match=r"Tied\.first 2 times"):
        capture(lambda: kernel(kernel(hidden_TH, model.first), model.first))


def test_replays_on_two_streams_need_an_event_between(monkeypatch: pytest.MonkeyPatch) -> None:
    """All captured graphs share one memory pool, so even replays of unrelated graphs must be ordered."""
    monkeypatch.setattr(graph, "_last_replay", None)
    x_B, y_B = torch.zeros(4), torch.zeros(4)
    first, second = capture(lambda: x_B + 1), capture(lambda: y_B + 1)
    one, other = streams.Stream(), streams.Stream()
    for captured in (first, second, first):
        with streams.StreamContext(one):
            captured.replay()
    with streams.StreamContext(other), pytest.raises(streams.UnorderedAccess, match=r"Graph\.replay on stream"):
        second.replay()
    other.wait_stream(one)
    with streams.StreamContext(other):
        second.replay()


@pytest.mark.parametrize("reads_head", [False, True])
def test_a_head_beside_its_copied_rows_is_refused(monkeypatch: pytest.MonkeyPatch, reads_head: bool) -> None:
    monkeypatch.setattr(cost, "_models", [])
    monkeypatch.setattr(cost, "require_launches", lambda nodes: None)
    model, head = DFlashDraftModel.__new__(DFlashDraftModel), nn.Embedding(V, H).requires_grad_(False)
    nn.Module.__init__(model)
    rows_DH = head.weight[: V // 2].clone()
    ends = TargetEnds(nn.Identity(), head, V, 0, None, copy=cast(Any, SimpleNamespace(rows_DH=rows_DH)))
    object.__setattr__(model, "ends", ends)
    cost.watch_parameters(model)

    def forward() -> torch.Tensor:
        best = (torch.randn(N, H) @ rows_DH.T).argmax(-1)
        return best + (torch.randn(N, H) @ head.weight.T).argmax(-1) if reads_head else head(best)

    if not reads_head:
        capture(forward)
        return
    with pytest.raises(CaptureError, match=rf"whole head beside its copy of {V // 2} rows; read the copy only"):
        capture(forward)


def test_draft_forward_over_its_launches_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cost, "_models", [])
    model = DFlashDraftModel.__new__(DFlashDraftModel)
    nn.Module.__init__(model)
    model.weight = nn.Parameter(torch.ones(H, H), requires_grad=False)
    model.layers = nn.ModuleList([nn.Module()])
    monkeypatch.setattr("sglang.srt.runtime_context.get_parallel", lambda: SimpleNamespace(tp_size=1))
    model.candidate_selector, model.context = None, SimpleNamespace(qkv_LXH=torch.ones(1))
    model.domino = model.lilicorr = None
    model.fields = SimpleNamespace(gating="", hidden_act="silu", n_drafts=N - 1)
    model.ends = TargetEnds(nn.Identity(), None, V, 0, cast(Any, None))
    cost.watch_parameters(model)
    most = budget.draft_forward(1, second=False, ranks=False, fp8_head=False)

    def forward(n_launches: int) -> torch.Tensor:
        hidden_TH = torch.randn(N, H) @ model.weight
        for _ in range(n_launches - 2):  # `randn` and the product are the other two launches
            hidden_TH = hidden_TH + 1
        return hidden_TH

    capture(lambda: forward(most))
    with pytest.raises(CaptureError, match=rf"1 layers launches {most + 1} times, at most {most}"):
        capture(lambda: forward(most + 1))
