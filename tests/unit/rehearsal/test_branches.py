"""Streams inside of a captured forward: what CUDA's capture asks of them, and whose memory is whose."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from sglang.srt.models import qwen3_5

from sglang_dflash.rehearsal import graph, qwen
from sglang_dflash.rehearsal.branches import BranchedTape
from sglang_dflash.rehearsal.graph import Graph, launch
from sglang_dflash.rehearsal.streams import Event, Stream, StreamContext, UnorderedAccess, current_stream
from sglang_dflash.rehearsal.tape import CaptureError

Forward = Callable[[], Any]


@pytest.fixture(autouse=True)
def _branched(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(graph, "tape_of", BranchedTape)


def capture(fn: Forward) -> tuple[Graph, Any]:
    captured = Graph()
    with torch.inference_mode(), graph.graph(captured):
        out = fn()
    return captured, out


def forked(
    beside: Forward, then: Callable[[Any], Any], *, fork: bool = True, join: bool = True, main: Forward = lambda: None
) -> Forward:
    """Run `beside` on another stream, `main` on the first and `then` after both, as SGLang's models do."""
    other = Stream()

    def forward() -> Any:
        first = current_stream()
        if fork:
            other.wait_stream(first)
        main()
        with StreamContext(other):
            made = beside()
        if join:
            first.wait_stream(other)
        return then(made)

    return forward


def test_a_branch_that_is_joined_is_replayed():
    x, y = torch.arange(4.0), torch.ones(4)
    captured, out = capture(forked(lambda: x * 2, lambda made: made + y))
    x.fill_(3)
    captured.replay()
    assert out.tolist() == [7.0] * 4


def test_a_branch_that_waits_for_nothing_is_not_captured():
    x = torch.zeros(4)
    forward = forked(lambda: x + 1, lambda made: made, fork=False)
    with pytest.raises(CaptureError, match=r"which has not waited for the stream that is captured: .*test_branches"):
        capture(forward)
    capture(lambda: x + 1)  # and the next one is as if nothing had been


def test_a_stream_takes_part_from_its_first_wait():
    other = Stream()

    def forward() -> list[bool]:
        before = graph.takes_part(other)
        other.wait_stream(current_stream())
        return [before, graph.takes_part(other), graph.takes_part(current_stream())]

    assert capture(forward)[1] == [False, True, True]
    assert not graph.takes_part(other)


def test_a_wait_in_an_earlier_capture_is_none_in_this_one():
    x, other = torch.zeros(4), Stream()

    def forward(*, fork: bool) -> None:
        if fork:
            other.wait_stream(current_stream())
        with StreamContext(other):
            _ = x + 1
        current_stream().wait_stream(other)

    capture(lambda: forward(fork=True))
    with pytest.raises(CaptureError, match="has not waited"):
        capture(lambda: forward(fork=False))


def test_a_result_that_is_not_waited_for_is_not_read():
    x = torch.zeros(4)
    with pytest.raises(UnorderedAccess, match=r"aten::mul .*reads what may not be written yet: aten::add"):
        capture(forked(lambda: x + 1, lambda made: made * 2, join=False))


def test_a_branch_that_is_not_joined_does_not_end():
    x = torch.zeros(4)
    with pytest.raises(CaptureError, match=r"before it has waited for stream \d+ .*aten::add"):
        capture(forked(lambda: x + 1, lambda made: None, join=False))


def test_branches_that_write_what_the_other_reads_are_refused():
    x = torch.zeros(4)

    @launch
    def kernel() -> None:
        x[int(x[0])] = 1

    for write in (lambda: x.add_(1), lambda: x[1:].zero_(), kernel):
        with pytest.raises(UnorderedAccess, match=r"aten::mul .*reads what may not be written yet"):
            capture(forked(lambda: x * 2, lambda made: made, main=write))
    capture(forked(lambda: x * 2, lambda made: made, main=lambda: x + 1))  # both only read
    capture(forked(lambda: x * 2, lambda made: x.add_(1)))  # written after both


def test_a_launch_s_own_memory_is_no_hazard():
    x = torch.zeros(4)

    @launch
    def kernel() -> torch.Tensor:
        scratch = x + 1
        scratch.add_(1)
        return scratch * 2

    _, out = capture(forked(kernel, lambda made: made + 1, main=kernel))
    assert out.tolist() == [5.0] * 4


def test_a_free_block_goes_to_its_own_stream_alone():
    x, other = torch.zeros(200), Stream()

    def forward() -> tuple[int, int, int]:
        first = current_stream()
        other.wait_stream(first)
        with StreamContext(other):
            made = x + 1
        first.wait_stream(other)
        _ = made + 1  # still read here when its block is free again
        block = made.data_ptr()
        del made
        on_first = (x + 2).data_ptr()
        other.wait_stream(first)
        with StreamContext(other):
            on_other = (x + 3).data_ptr()
        first.wait_stream(other)
        return block, on_first, on_other

    _, (block, on_first, on_other) = capture(forward)
    assert on_other == block != on_first


def test_a_block_still_read_on_another_stream_is_not_given_away():
    x, other = torch.zeros(200), Stream()

    def forward(*, recorded: bool) -> None:
        first = current_stream()
        other.wait_stream(first)
        with StreamContext(other):
            made = x + 1
        first.wait_stream(other)
        _ = made * 2
        if recorded:
            graph.record_stream(made, first)
        del made
        with StreamContext(other):  # which has not waited for the product
            _ = x + 3
        first.wait_stream(other)

    with pytest.raises(UnorderedAccess, match=r"may be given the memory .*still in use: aten::mul"):
        capture(lambda: forward(recorded=False))
    capture(lambda: forward(recorded=True))


@pytest.mark.parametrize(
    "wait", [lambda: current_stream().synchronize(), lambda: Event().query()], ids=["stream", "event"]
)
def test_the_host_does_not_wait_inside_of_a_capture(wait):
    with pytest.raises(CaptureError, match="waiting for"):
        capture(wait)
    wait()


# -- SGLang's own forwards -----------------------------------------------------------------------------------------


@pytest.fixture
def qwen_captured(monkeypatch: pytest.MonkeyPatch) -> None:
    """Qwen3.5 as it is while a GPU captures."""
    monkeypatch.setattr(torch.cuda, "current_stream", current_stream)
    monkeypatch.setattr(torch.cuda, "stream", StreamContext)
    monkeypatch.setattr(qwen3_5, "get_is_capture_mode", lambda: True)
    monkeypatch.setattr(qwen3_5, "check_cuda_graph_backend", lambda *of: False)
    for name in ("_gdn_use_alt_stream", "_qknorm_use_alt_stream"):
        monkeypatch.setattr(qwen3_5, name, True)


class Layer:
    """Attributes of a layer that two forwards of Qwen3.5 read."""

    head_dim = 4
    _fused_in_proj_weight = None

    def __init__(self, alt_stream: Stream) -> None:
        self.alt_stream = alt_stream
        self.x = torch.ones(2, 8)
        self.q_norm = self.k_norm = lambda x: x * 2
        self.in_proj_qkvz = self.in_proj_ba = lambda x: (x + 1, None)


class Forgetful(Stream):
    """Leave out the wait with this number."""

    forgotten = 1

    def __init__(self) -> None:
        super().__init__()
        self.n_waits = 0

    def wait_stream(self, stream: Stream) -> None:
        self.n_waits += 1
        if self.n_waits != self.forgotten:
            super().wait_stream(stream)


def gdn_projections(layer: Layer) -> torch.Tensor:
    qkvz, ba = qwen3_5.Qwen3_5GatedDeltaNet._forward_input_proj(layer, layer.x)
    return qkvz + ba


def qk_norm(layer: Layer) -> torch.Tensor:
    q, k = qwen3_5.Qwen3_5AttentionDecoderLayer._apply_qk_norm(layer, layer.x, layer.x)
    return q + k


@pytest.mark.usefixtures("qwen_captured")
@pytest.mark.parametrize("forward", [gdn_projections, qk_norm])
def test_qwen3_5_s_branches_are_ordered(forward, monkeypatch):
    used = []

    def watching(pool: Any) -> BranchedTape:
        used.append(BranchedTape(pool))
        return used[-1]

    monkeypatch.setattr(graph, "tape_of", watching)
    alt = Stream()
    layer, forgetful = Layer(alt), Layer(Forgetful())
    _, out = capture(lambda: forward(layer))
    assert out.unique().tolist() == [4.0]
    assert alt in used[0].last
    with pytest.raises(CaptureError, match="has not waited for the stream that is captured"):
        capture(lambda: forward(forgetful))
    with (
        StreamContext(Forgetful()),  # the captured stream itself: it does not wait for the branch
        pytest.raises(UnorderedAccess, match="reads what may not be written yet"),
    ):
        capture(lambda: forward(layer))


def test_qk_norm_rope_gate_is_the_layer_s_parts_one_by_one():
    """Gemma's norm, the first half of each head rotated with its lane's axis, the rest and the gates as they are."""
    generator = torch.Generator().manual_seed(0)
    T, n_q, n_k, E, R = 3, 2, 1, 8, 4
    q_gate, k = torch.randn(T, n_q * 2 * E, generator=generator), torch.randn(T, n_k * E, generator=generator)
    weights = torch.randn(2, E, generator=generator)
    angles = torch.rand(10, R // 2, generator=generator)
    table = torch.cat([angles.cos(), angles.sin()], dim=1)
    positions, axis = torch.tensor([[1, 2, 3], [4, 5, 6], [7, 8, 9]]), torch.tensor([0, 2], dtype=torch.int32)
    for where, lanes in ((positions, axis), (positions[0], None)):
        q_out, k_out, gate = qwen.qk_norm_rope_gate(
            q_gate, k, *weights, table, where, 1e-6, n_q, n_k, E, R, mrope_axis_map=lanes
        )
        for t in range(T):
            for h in range(n_q + n_k):
                x = q_gate[t].view(n_q, 2, E)[h, 0] if h < n_q else k[t]
                x = x / (x.square().mean() + 1e-6).sqrt() * (1 + weights[0 if h < n_q else 1])
                want = x.clone()
                for lane in range(R // 2):
                    at = where[axis[lane], t] if lanes is not None else where[t]
                    turn = torch.polar(torch.ones(()), angles[at, lane]) * torch.complex(x[lane], x[lane + R // 2])
                    want[lane], want[lane + R // 2] = turn.real, turn.imag
                got = q_out[t].view(n_q, E)[h] if h < n_q else k_out[t]
                torch.testing.assert_close(got, want)
            assert torch.equal(gate[t], q_gate[t].view(n_q, 2, E)[:, 1])
