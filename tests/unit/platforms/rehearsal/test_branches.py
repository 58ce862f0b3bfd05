"""Side streams in a captured forward must be ordered as CUDA's capture requires. Unsafe memory reuse is refused."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from sglang.srt.models import qwen3_5

from sglang_dflash.platforms.rehearsal import graph, qwen
from sglang_dflash.platforms.rehearsal.branches import BranchedTape
from sglang_dflash.platforms.rehearsal.graph import Graph, launch
from sglang_dflash.platforms.rehearsal.streams import Event, Stream, StreamContext, UnorderedAccess, current_stream
from sglang_dflash.platforms.rehearsal.tape import CaptureError

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
    """Return a forward that runs `beside` on another stream, `main` on the first, and then `then` on the first.

    `fork`: the other stream waits for the first before `beside`. `join`: the first waits for the other before `then`.
    """
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


def test_joined_branches_are_replayed():
    x, y = torch.arange(4.0), torch.ones(4)
    captured, out = capture(forked(lambda: x * 2, lambda made: made + y))
    x.fill_(3)
    captured.replay()
    assert out.tolist() == [7.0] * 4


def test_a_branch_that_waits_for_nothing_is_refused():
    x = torch.zeros(4)
    forward = forked(lambda: x + 1, lambda made: made, fork=False)
    with pytest.raises(CaptureError, match=r"which has not waited for the stream that is captured: .*test_branches"):
        capture(forward)
    capture(lambda: x + 1)  # a failed capture does not affect the next


def test_a_stream_joins_the_capture_at_its_first_wait():
    other = Stream()

    def forward() -> list[bool]:
        before = graph.takes_part(other)
        other.wait_stream(current_stream())
        return [before, graph.takes_part(other), graph.takes_part(current_stream())]

    assert capture(forward)[1] == [False, True, True]
    assert not graph.takes_part(other)


def test_a_wait_in_an_earlier_capture_does_not_count():
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


def test_reading_an_unordered_result_is_refused():
    x = torch.zeros(4)
    with pytest.raises(UnorderedAccess, match=r"aten::mul .*reads what may not be written yet: aten::add"):
        capture(forked(lambda: x + 1, lambda made: made * 2, join=False))


def test_an_unjoined_branch_is_refused():
    x = torch.zeros(4)
    with pytest.raises(CaptureError, match=r"captured stream waited for stream \d+ .*last operation: aten::add"):
        capture(forked(lambda: x + 1, lambda made: None, join=False))


def test_branches_that_write_what_the_other_reads_are_refused():
    x = torch.zeros(4)

    @launch
    def kernel() -> None:
        x[int(x[0])] = 1

    for write in (lambda: x.add_(1), lambda: x[1:].zero_(), kernel):
        with pytest.raises(UnorderedAccess, match=r"aten::mul .*reads what may not be written yet"):
            capture(forked(lambda: x * 2, lambda made: made, main=write))
    capture(forked(lambda: x * 2, lambda made: made, main=lambda: x + 1))  # both branches only read x
    capture(forked(lambda: x * 2, lambda made: x.add_(1)))  # x is written after the join


def test_scratch_memory_of_a_launch_is_no_hazard():
    x = torch.zeros(4)

    @launch
    def kernel() -> torch.Tensor:
        scratch = x + 1
        scratch.add_(1)
        return scratch * 2

    _, out = capture(forked(kernel, lambda made: made + 1, main=kernel))
    assert out.tolist() == [5.0] * 4


def test_free_blocks_are_reused_on_their_own_stream_only():
    x, other = torch.zeros(200), Stream()

    def forward() -> tuple[int, int, int]:
        first = current_stream()
        other.wait_stream(first)
        with StreamContext(other):
            made = x + 1
        first.wait_stream(other)
        _ = made + 1  # the first stream reads `made`
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


def test_reuse_of_a_block_read_on_another_stream_is_refused():
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
        with StreamContext(other):  # without waiting for `made * 2`
            _ = x + 3
        first.wait_stream(other)

    with pytest.raises(UnorderedAccess, match=r"may be given the memory .*still in use: aten::mul"):
        capture(lambda: forward(recorded=False))
    capture(lambda: forward(recorded=True))


@pytest.mark.parametrize(
    "wait", [lambda: current_stream().synchronize(), lambda: Event().query()], ids=["stream", "event"]
)
def test_host_waits_inside_a_capture_are_refused(wait):
    with pytest.raises(CaptureError, match=r"a wait of the host for .*: not permitted while a stream is captured"):
        capture(wait)
    wait()


@pytest.fixture
def qwen_captured(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let SGLang's Qwen3.5 layers use their alternative stream, as they do during capture on a GPU."""
    monkeypatch.setattr(torch.cuda, "current_stream", current_stream)
    monkeypatch.setattr(torch.cuda, "stream", StreamContext)
    monkeypatch.setattr(qwen3_5, "get_is_capture_mode", lambda: True)
    monkeypatch.setattr(qwen3_5, "check_cuda_graph_backend", lambda *of: False)
    for name in ("_gdn_use_alt_stream", "_qknorm_use_alt_stream"):
        monkeypatch.setattr(qwen3_5, name, True)


class Layer:
    """Stand-in for a Qwen3.5 layer, with the attributes that `gdn_projections` and `qk_norm` need."""

    head_dim = 4
    _fused_in_proj_weight = None

    def __init__(self, alt_stream: Stream) -> None:
        self.alt_stream = alt_stream
        self.x = torch.ones(2, 8)
        self.q_norm = self.k_norm = lambda x: x * 2
        self.in_proj_qkvz = self.in_proj_ba = lambda x: (x + 1, None)


class OmitsWait(Stream):
    """Stream whose first `wait_stream` does nothing."""

    omitted = 1

    def __init__(self) -> None:
        super().__init__()
        self.n_waits = 0

    def wait_stream(self, stream: Stream) -> None:
        self.n_waits += 1
        if self.n_waits != self.omitted:
            super().wait_stream(stream)


def gdn_projections(layer: Layer) -> torch.Tensor:
    qkvz, ba = qwen3_5.Qwen3_5GatedDeltaNet._forward_input_proj(layer, layer.x)
    return qkvz + ba


def qk_norm(layer: Layer) -> torch.Tensor:
    q, k = qwen3_5.Qwen3_5AttentionDecoderLayer._apply_qk_norm(layer, layer.x, layer.x)
    return q + k


@pytest.mark.usefixtures("qwen_captured")
@pytest.mark.parametrize("forward", [gdn_projections, qk_norm])
def test_branches_of_qwen3_5_are_ordered(forward, monkeypatch):
    used = []

    def watching(pool: Any) -> BranchedTape:
        used.append(BranchedTape(pool))
        return used[-1]

    monkeypatch.setattr(graph, "tape_of", watching)
    alt = Stream()
    layer, omits_wait = Layer(alt), Layer(OmitsWait())
    _, out = capture(lambda: forward(layer))
    assert out.unique().tolist() == [4.0]
    assert alt in used[0].last
    with pytest.raises(CaptureError, match="has not waited for the stream that is captured"):
        capture(lambda: forward(omits_wait))
    with (
        StreamContext(OmitsWait()),  # the captured stream itself does not wait for the branch
        pytest.raises(UnorderedAccess, match="reads what may not be written yet"),
    ):
        capture(lambda: forward(layer))


def test_qk_norm_rope_gate_equals_the_layers_parts():
    """The definition applies Gemma's norm (1 + weight) to each head and rotates the head's first half.

    Lane i is rotated by the position on axis `axis[i]`, or by the only position if there are no axes. The second half
    and the gates are not rotated.
    """
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
