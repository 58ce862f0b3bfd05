"""Captured graphs of the GPU emulation must replay, reuse memory, and refuse operations that wait for the device."""

from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch

from sglang_dflash.platforms.rehearsal import graph, host
from sglang_dflash.platforms.rehearsal.exchange import CollectiveCounter
from sglang_dflash.platforms.rehearsal.graph import Graph, launch
from sglang_dflash.platforms.rehearsal.pool import MIB, Pool
from sglang_dflash.platforms.rehearsal.tape import CaptureError


def capture(fn: Callable[[], Any]) -> tuple[Graph, Any]:
    captured = Graph()
    fn()  # SGLang runs the forward once before capture
    with torch.inference_mode(), graph.graph(captured):
        out = fn()
    return captured, out


def test_a_replay_reads_current_inputs() -> None:
    x_TH, w_HH = torch.randn(4, 8), torch.randn(8, 8)

    def forward() -> tuple[torch.Tensor, Any]:
        hidden = torch.nn.functional.linear(x_TH, w_HH).relu()
        first, second = hidden.chunk(2, dim=-1)
        out = torch.cat([first * second, first], dim=-1)
        out += 1
        out[:, 0] = x_TH.sum(dim=1)
        return out.softmax(dim=-1), out.max(dim=1)

    captured, (out, top) = capture(forward)
    for _ in range(3):
        x_TH.copy_(torch.randn(4, 8))
        captured.replay()
        expected, expected_top = forward()
        torch.testing.assert_close(out, expected, rtol=0, atol=0)
        torch.testing.assert_close(top.values, expected_top.values, rtol=0, atol=0)
        assert torch.equal(top.indices, expected_top.indices)


def test_host_values_are_frozen_at_capture() -> None:
    x, n = torch.zeros(4), [1]
    captured, out = capture(lambda: x + n[0])
    n[0] = 5
    captured.replay()
    assert out.tolist() == [1.0] * 4


@pytest.fixture
def ranks() -> Iterator[None]:
    """Start a process group of one rank, in which a gather returns the rank's own values."""
    torch.distributed.init_process_group("gloo", store=torch.distributed.HashStore(), rank=0, world_size=1)
    yield
    torch.distributed.destroy_process_group()


@pytest.mark.usefixtures("ranks")
def test_collectives_run_in_every_replay() -> None:
    x_TH = torch.zeros(4, 8)

    def forward() -> torch.Tensor:
        gathered_TH = torch.empty_like(x_TH)
        torch.distributed.all_gather_single(gathered_TH, x_TH + 1)
        return gathered_TH * 2

    captured, out_TH = capture(forward)
    x_TH += 2
    captured.replay()
    assert torch.equal(out_TH, torch.full((4, 8), 6.0))


@pytest.mark.usefixtures("ranks")
def test_elements_of_all_collectives_are_counted() -> None:
    x_TH = torch.zeros(4, 8)
    with CollectiveCounter() as exchange:
        torch.distributed.all_reduce(x_TH)
        torch.distributed.broadcast(x_TH[0], src=0)
        torch.distributed.all_reduce(x_TH[1:2])
    assert exchange.elements == {"allreduce_": 32 + 8, "broadcast_": 8}


@pytest.mark.parametrize(
    "read",
    [
        pytest.param(lambda x: x.max().item(), id="item"),
        pytest.param(lambda x: bool((x > 0).any()), id="bool"),
        pytest.param(lambda x: int(x[0]), id="int"),
        pytest.param(lambda x: x[x > 0], id="mask"),
        pytest.param(lambda x: x.nonzero(), id="nonzero"),
        pytest.param(lambda x: x.tolist(), id="tolist"),
        pytest.param(lambda x: x.cpu(), id="cpu"),
        pytest.param(lambda x: x.numpy(), id="numpy"),
        pytest.param(lambda x: x + torch.tensor([1.0, 2.0, 3.0, 4.0]), id="tensor-of-host-data"),
        pytest.param(lambda x: x.long().repeat_interleave(x.long()), id="repeat_interleave"),
    ],
)
def test_operations_that_wait_for_the_device_are_refused(read: Callable[[torch.Tensor], Any]) -> None:
    x = torch.ones(4)
    with pytest.raises(CaptureError, match=r"test_graph\.py"):  # the error names the line
        capture(lambda: read(x) if graph.is_capturing() else None)
    assert not graph.is_capturing()
    assert x.tolist() == [1.0] * 4  # reading is allowed again


def test_host_tensors_may_be_read_during_capture() -> None:
    x, lengths_cpu = torch.zeros(4), host.mark(torch.tensor([3, 5]))
    captured, out = capture(lambda: x + int((lengths_cpu + 1).max()) + len(lengths_cpu.tolist()))
    captured.replay()
    assert out.tolist() == [8.0] * 4


def test_device_operations_on_host_tensors_are_refused() -> None:
    x, lengths_cpu = torch.zeros(2), host.mark(torch.tensor([3.0, 5.0]))
    with pytest.raises(CaptureError, match="host tensor"):
        capture(lambda: x + lengths_cpu if graph.is_capturing() else None)


def test_a_graph_overwrites_the_output_of_one_captured_later() -> None:
    """The first graph's scratch memory is free when the second is captured, so it becomes the second's output."""
    x = torch.ones(1000)
    first, _ = capture(lambda: ((x * 2) + 1).sum())
    second, out = capture(lambda: x * 3)
    second.replay()
    assert out[0] == 3
    first.replay()
    assert out[0] != 3


def test_a_launch_is_one_node_and_may_read_data() -> None:
    x, into = torch.arange(4.0), torch.zeros(8)

    @launch
    def kernel(x: torch.Tensor, into: torch.Tensor) -> torch.Tensor:
        into[int(x.max())] = x.sum()
        return x * 2

    captured, out = capture(lambda: kernel(x, into))
    assert len(captured.nodes) == 1
    x.copy_(torch.tensor([5.0, 0, 0, 0]))
    into.zero_()
    captured.replay()
    assert into[5] == 5
    assert out[0] == 10


def test_inputs_freed_before_replay_are_refused() -> None:
    def forward() -> torch.Tensor:
        if not graph.is_capturing():
            return torch.zeros(4)
        gone = outside.pop()
        return gone + 1

    outside = [torch.randn(3, 4)]
    with pytest.raises(CaptureError, match=r"free when it is replayed: torch.float32 \(3, 4\); keep a reference"):
        capture(forward)


def test_blocks_are_split_and_joined() -> None:
    pool = Pool(capacity=8 * MIB)
    kib = torch.empty(1024, dtype=torch.uint8)
    first, second, third = pool.like(kib), pool.like(kib), pool.like(kib)
    starts = [tensor.data_ptr() for tensor in (first, second, third)]
    assert starts == [starts[0], starts[0] + 1024, starts[0] + 2048]
    del first, second
    assert pool.like(torch.empty(2048, dtype=torch.uint8)).data_ptr() == starts[0]  # the memory of `first` and `second`
    del third
    assert pool.like(torch.empty(MIB, dtype=torch.uint8)).data_ptr() == starts[0]
    assert pool.n_bytes == 2 * MIB


def test_a_view_keeps_its_block() -> None:
    pool, like = Pool(capacity=8 * MIB), torch.empty(100, 10)
    view = pool.like(like).view(10, 100)[3]
    block = view.untyped_storage().data_ptr()
    assert pool.like(like).data_ptr() != block
    del view
    assert pool.like(like).data_ptr() == block


def test_the_smallest_fitting_block_is_used() -> None:
    pool = Pool(capacity=8 * MIB)
    sizes = (4096, 512, 1024, 512, 4096)
    blocks = [pool.like(torch.empty(size, dtype=torch.uint8)) for size in sizes]
    where = blocks[2].data_ptr()
    blocks[0] = blocks[2] = None
    assert pool.like(torch.empty(700, dtype=torch.uint8)).data_ptr() == where
