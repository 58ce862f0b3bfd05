"""Streams of the GPU emulation: ordered accesses must pass, and unordered ones must raise an error."""

import contextlib
from collections.abc import Callable, Iterator

import numpy as np
import pytest
import torch

from sglang_dflash.platforms.rehearsal import graph, host, streams, watch
from sglang_dflash.platforms.rehearsal.graph import EventInGraph, Graph, launch
from sglang_dflash.platforms.rehearsal.streams import Event, Stream, StreamContext, UnorderedAccess, current_stream
from sglang_dflash.platforms.rehearsal.watch import Watch

Order = Callable[[Stream, Stream], None]


def no_order(first: Stream, then: Stream) -> None:
    """Leave the two streams unordered."""


@pytest.fixture
def watched() -> Iterator[Watch]:
    with torch.inference_mode(), Watch(graph.pool()) as entered:
        yield entered


def by_event(first: Stream, then: Stream) -> None:
    done = Event()
    done.record(first)
    then.wait_event(done)


def by_current(first: Stream, then: Stream) -> None:
    with StreamContext(first):
        done = Event()
        done.record()
    with StreamContext(then):
        done.wait()


def by_host(first: Stream, then: Stream) -> None:
    first.record_event().synchronize()  # orders the host's later launches on all streams


def by_third(first: Stream, then: Stream) -> None:
    third = Stream()
    third.wait_stream(first)
    then.wait_stream(third)


ORDERS = [
    pytest.param(lambda first, then: then.wait_stream(first), id="wait_stream"),
    pytest.param(by_event, id="event"),
    pytest.param(by_current, id="event-of-current"),
    pytest.param(by_host, id="host-waits-for-event"),
    pytest.param(lambda first, then: first.synchronize(), id="host-waits-for-stream"),
    pytest.param(lambda first, then: streams.synchronize(), id="host-waits-for-device"),
    pytest.param(by_third, id="third"),
]
NO_ORDERS = [
    pytest.param(no_order, id="nothing"),
    pytest.param(lambda first, then: first.wait_stream(then), id="wrong-way"),
    pytest.param(lambda first, then: then.wait_event(Event()), id="event-not-recorded"),
    pytest.param(lambda first, then: then.synchronize(), id="host-waits-for-another"),
]
HAZARDS = [
    pytest.param(lambda x: x.add_(1), lambda x: x * 2, id="read-after-write"),
    pytest.param(lambda x: x * 2, lambda x: x.add_(1), id="write-after-read"),
    pytest.param(lambda x: x.fill_(1), lambda x: x.fill_(2), id="write-after-write"),
    pytest.param(lambda x: x[1:].zero_(), lambda x: x[:1] + 1, id="views"),
    pytest.param(lambda x: x.fill_(1), lambda x: torch.add(x, 1, out=torch.empty(4, device="cpu")), id="out"),
    pytest.param(lambda x: x.fill_(1), lambda x: torch.zeros(4, device="cpu").copy_(x), id="copy"),
    pytest.param(lambda x: x.fill_(1), lambda x: torch.cat([torch.zeros(4, device="cpu"), x]), id="list"),
    pytest.param(lambda x: x.fill_(1), lambda x: int(x[0]), id="item"),
    pytest.param(lambda x: x.fill_(1), lambda x: x[x > 0], id="mask"),
]


def zeros(n: int) -> torch.Tensor:
    """Return zeros whose launch has completed."""
    x = torch.zeros(n, device="cpu")
    streams.synchronize()
    return x


def one_then_other(first: Callable, then: Callable, order: Order) -> None:
    x, one, other = zeros(4), Stream(), Stream()
    with StreamContext(one):
        kept = first(x)
    order(one, other)
    with StreamContext(other):
        then(x)
    del kept


@pytest.mark.parametrize("order", ORDERS)
@pytest.mark.parametrize(("first", "then"), HAZARDS)
def test_ordered_accesses_pass(watched: Watch, first: Callable, then: Callable, order: Order) -> None:
    one_then_other(first, then, order)


@pytest.mark.parametrize("order", NO_ORDERS)
@pytest.mark.parametrize(("first", "then"), HAZARDS)
def test_unordered_accesses_are_refused(watched: Watch, first: Callable, then: Callable, order: Order) -> None:
    with pytest.raises(UnorderedAccess, match=r"on stream \d+ .*test_streams\.py:\d+.*on stream \d+ .*test_streams"):
        one_then_other(first, then, order)


def test_two_readers_need_no_order(watched: Watch) -> None:
    one_then_other(lambda x: x * 2, lambda x: x + 1, no_order)


def test_an_event_orders_only_earlier_launches(watched: Watch) -> None:
    x, one, other, done = zeros(4), Stream(), Stream(), Event()
    with StreamContext(one):
        x.fill_(1)
        done.record()
        x.fill_(2)
    other.wait_event(done)
    with StreamContext(other), pytest.raises(UnorderedAccess):
        _ = x + 1


def test_a_writer_waits_for_all_readers(watched: Watch) -> None:
    x, one, other, writer = zeros(4), Stream(), Stream(), Stream()
    for reader in (one, other):
        with StreamContext(reader):
            kept = x + 1
    writer.wait_stream(one)
    with StreamContext(writer), pytest.raises(UnorderedAccess, match=other.name.split(" (")[0]):
        x.zero_()
    del kept


@pytest.fixture
def whose(monkeypatch: pytest.MonkeyPatch) -> None:
    """Install the rules of `watch.py` that assign a tensor to the host or the device by the way it is created."""
    for name in watch.FACTORIES:
        monkeypatch.setattr(torch, name, getattr(torch, name))
    for name in ("tolist", "numpy", "to", "cpu"):
        monkeypatch.setattr(torch.Tensor, name, getattr(torch.Tensor, name))
    watch.install()
    torch.Tensor.cpu = watch.to_host


@pytest.mark.parametrize(
    "read",
    [
        pytest.param(lambda y: y.tolist(), id="tolist"),
        pytest.param(lambda y: y.numpy(), id="numpy"),
        pytest.param(lambda y: int(y[0]), id="int"),
        pytest.param(lambda y: y + 1, id="computing"),
    ],
)
def test_the_host_may_read_only_completed_copies(watched: Watch, whose: None, read: Callable) -> None:
    def copied() -> tuple[torch.Tensor, Event]:
        with StreamContext(Stream()):
            x = torch.zeros(4, device="cpu")
            pinned, done = watch.async_d2h(x), Event()
            done.record()
        return pinned, done

    pinned, done = copied()
    assert host.is_marked(pinned)
    with pytest.raises(UnorderedAccess, match=r"on the host at .*reads what may not be written yet: aten::copy_"):
        read(pinned)
    pinned, done = copied()
    done.synchronize()
    read(pinned)


def test_the_host_reads_device_memory_on_the_current_stream(watched: Watch, whose: None) -> None:
    one_then_other(lambda x: x.fill_(1), lambda x: x.tolist(), lambda first, then: then.wait_stream(first))
    with pytest.raises(UnorderedAccess, match=r"Tensor\.tolist on stream"):
        one_then_other(lambda x: x.fill_(1), lambda x: x.tolist(), no_order)


def test_blocking_copies_are_complete(watched: Watch, whose: None) -> None:
    with StreamContext(Stream()):
        x, y = torch.zeros(4, device="cpu"), torch.empty(4, pin_memory=True)
        y.copy_(x)
        assert x.cpu().tolist() == y.tolist() == [0.0] * 4


def test_pinned_memory_is_reusable_after_its_copy(watched: Watch, whose: None) -> None:
    stream = Stream()
    with StreamContext(stream):
        pinned = torch.zeros(4, pin_memory=True)
        x = pinned.to("cpu", non_blocking=True)
        assert not host.is_marked(x)
        with pytest.raises(UnorderedAccess, match=r"on the host.*writes what may still be in use: Tensor\.to"):
            pinned.fill_(1)
        stream.synchronize()
        pinned.fill_(1)
    pageable = torch.zeros(4)
    x = pageable.to("cpu", non_blocking=True)  # pageable memory is staged before the call returns
    pageable.fill_(1)


@pytest.mark.parametrize("data", [np.arange(3), torch.arange(3)])
def test_numpy_arrays_and_tensors_cannot_be_pinned_as_data(watched: Watch, whose: None, data: object) -> None:
    """On a GPU torch refuses to pin them, so the emulation must refuse it too."""
    with pytest.raises(RuntimeError, match="Can't pin tensor constructed from"):
        torch.tensor(data, pin_memory=True)
    assert torch.tensor([1, 2], pin_memory=True).tolist() == [1, 2]


def test_the_hosts_own_tensors_have_no_stream(watched: Watch, whose: None) -> None:
    lengths = torch.tensor([1, 2])
    for _ in range(2):
        with StreamContext(Stream()):
            lengths += 1
            lengths[[0, 1]] += 1
            assert int(lengths.sum()) == lengths.sum().item()


def test_freed_memory_returns_to_its_stream(watched: Watch) -> None:
    made_on, used_on = Stream(), Stream()

    def use_and_forget(how: Callable[[torch.Tensor], object]) -> None:
        with StreamContext(made_on):
            x = torch.zeros(8, device="cpu")
        used_on.wait_stream(made_on)
        with StreamContext(used_on):
            _ = x + 1
        how(x)

    def make() -> None:
        with StreamContext(made_on):
            torch.zeros(4, device="cpu")

    use_and_forget(lambda x: None)
    with StreamContext(used_on):
        torch.zeros(4, device="cpu")  # gets new memory: the freed memory is reused only on `made_on`
    with pytest.raises(
        UnorderedAccess, match=r"aten::zeros .*memory of a tensor that is gone.*aten::add.*record_stream"
    ):
        make()
    made_on.wait_stream(used_on)
    make()
    use_and_forget(lambda x: streams.record_stream(x, used_on))
    make()
    use_and_forget(lambda x: made_on.wait_stream(used_on))
    make()


def capture(fn: Callable[[], object]) -> Graph:
    captured = Graph()
    with torch.inference_mode(), graph.graph(captured):
        fn()
    return captured


def test_a_replay_accesses_memory_on_its_stream() -> None:
    x, y = torch.zeros(4), torch.zeros(4)

    @launch
    def kernel(x: torch.Tensor, y: torch.Tensor) -> None:
        y[int(x.max())] = 1

    for forward in (lambda: torch.add(x, 1, out=y), lambda: y.add_(x), lambda: kernel(x, y)):
        replayed = capture(forward)
        for touch in (x, y):
            with Watch(graph.pool()):
                one = Stream()
                with StreamContext(one):
                    replayed.replay()
                with pytest.raises(UnorderedAccess, match=r"writes what may still be in use"):
                    touch.zero_()
                current_stream().wait_stream(one)
                touch.zero_()


def test_outputs_are_overwritten_by_the_next_replay() -> None:
    x, outs = torch.zeros(4), []
    replayed = capture(lambda: outs.append(x + 1))
    with Watch(graph.pool()):
        one, other = Stream(), Stream()
        with StreamContext(one):
            replayed.replay()
        other.wait_stream(one)
        with StreamContext(other):
            _ = outs[0] * 2
        with StreamContext(one), pytest.raises(UnorderedAccess, match=r"aten::add .*in use: aten::mul"):
            replayed.replay()


def test_each_replay_must_be_ordered_after_the_last_one() -> None:
    """All graphs share memory, so it is not enough that a replay is ordered after the one before the last."""
    x, y = torch.zeros(4), torch.zeros(4)
    first, second = capture(lambda: x.add_(1)), capture(lambda: y.add_(1))
    with Watch(graph.pool()):
        one, other = Stream(), Stream()
        with StreamContext(one):
            first.replay()
        other.wait_stream(one)
        with StreamContext(one):
            first.replay()
        with StreamContext(other), pytest.raises(UnorderedAccess, match="replays into memory that another graph may"):
            second.replay()
        other.wait_stream(one)
        with StreamContext(other):
            second.replay()


def test_an_event_inside_a_graph_is_recorded_in_place() -> None:
    first, second, read = torch.zeros(4), torch.zeros(4), EventInGraph()

    def forward() -> torch.Tensor:
        out = first + 1
        read.record()
        return out + second

    replayed = capture(forward)
    with Watch(graph.pool()):
        one = Stream()
        with StreamContext(one):
            replayed.replay()
        read.wait()
        first.zero_()
        with pytest.raises(UnorderedAccess, match="aten::zero_"):
            second.zero_()


def test_a_launch_reads_device_memory_without_the_host(watched: Watch) -> None:
    stream = Stream()
    x, y = zeros(4), zeros(4)

    @launch
    def kernel() -> None:
        y[int(x.max())] = 1

    with StreamContext(stream):
        kernel()
    with pytest.raises(UnorderedAccess):
        y.zero_()


def test_a_launch_that_copies_to_the_host_stays_on_its_stream(watched: Watch, whose: None) -> None:
    """A PyTorch form of a kernel may call `.cpu()`, as SGLang's MoE experts do.

    The call is part of the launch, and must not count as a wait of the host. On a GPU the kernel makes no such call.
    """
    x = zeros(4)

    @launch
    def kernel() -> None:
        x[: int(x.cpu().numpy().sum())] = 1

    with StreamContext(Stream()):
        kernel()
    with pytest.raises(UnorderedAccess):
        x.zero_()


def test_interpreted_kernels_write_only_changed_arguments(watched: Watch) -> None:
    """Triton's interpreter copies every argument back. Only arguments whose values changed count as written."""

    class Executor:
        @staticmethod
        def fn() -> None: ...

        @watch.interpreted
        def __call__(self, x: torch.Tensor, out: torch.Tensor) -> None:
            x.copy_(x.clone())
            out.copy_(x + 1)

    for touched, is_error in ((0, False), (1, True)):
        given = zeros(4), zeros(4)
        with StreamContext(Stream()):
            Executor()(*given)
        with pytest.raises(UnorderedAccess) if is_error else contextlib.nullcontext():
            given[touched].sum()


def test_each_place_where_the_host_waits_is_recorded_once(watched: Watch) -> None:
    x = zeros(4)
    before = len(watched.waits)
    for _ in range(2):
        x.sum().item()
    assert len(watched.waits) == before + 1


def test_stream_contexts_nest_and_are_reentrant() -> None:
    default, one, other = current_stream(), Stream(), Stream()
    context = StreamContext(one)
    with context, StreamContext(other), context, StreamContext(None):
        assert current_stream() is one
    assert current_stream() is default


def test_accesses_outside_a_watch_pass() -> None:
    one_then_other(lambda x: x.add_(1), lambda x: x * 2, no_order)
