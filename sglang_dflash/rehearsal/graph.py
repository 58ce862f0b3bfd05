"""CUDA graphs without CUDA: what a forward launches is taken down once, and launched again without its Python.

Capture runs the forward under a dispatch mode. Every operation that writes is a node: the operation, its arguments by
address, its host values as they were. Views are no nodes, they alias; allocations are none either. What stands in for
a GPU kernel (`launch`) is one node whatever it does inside: it is one launch, and a launch may read device memory.
Whatever a device cannot do while its stream is captured raises `CaptureError`: handing a value to the host, a shape
that only the device knows, a tensor made of host data.

Replay runs the nodes in order into the cells of their outputs, which lie in `pool.py`'s memory.

Unlike a GPU's, a capture here also computes: what the forward writes to memory of its own (K/V of the padding slots,
buffers) is written once more than on a GPU.
"""

from __future__ import annotations

import contextlib
import functools
import logging
import time
from collections.abc import Callable, Iterator
from typing import Any, TypeVar

import torch
from torch.utils import _pytree as pytree
from torch.utils._python_dispatch import _disable_current_modes

from sglang_dflash.rehearsal import cost, host, streams, watch
from sglang_dflash.rehearsal.pool import MIB, Pool
from sglang_dflash.rehearsal.tape import CaptureError, Node, Tape, capture_error, keep

logger = logging.getLogger(__name__)

Function = TypeVar("Function", bound=Callable)

_pool = Pool(stream=streams.current_stream)
_tape: Tape | None = None
_last_replay: streams.Access | None = None
tape_of: Callable[[Pool], Tape] = Tape  # what takes a capture down


class Graph:
    """What stands for `torch.cuda.CUDAGraph`."""

    def __init__(self, keep_graph: bool = False) -> None:
        self.nodes: list[Node] = []

    def capture_begin(self, pool: object = None, capture_error_mode: str = "global") -> None:
        global _tape
        assert _tape is None, "one stream is captured at a time"
        host.watch(capture_error)
        self._began = time.perf_counter()
        _tape = tape_of(_pool)
        _tape.__enter__()

    def capture_end(self) -> None:
        global _tape
        assert _tape is not None, "no capture has begun"
        tape, _tape = _tape, None
        tape.__exit__(None, None, None)
        host.unwatch()
        tape.end()
        self.nodes = tape.nodes
        if dangling := tape.dangling():
            raise CaptureError(f"a captured forward reads memory that is free when it is replayed: {dangling}")
        cost.require_cheap(self.nodes)
        seconds = time.perf_counter() - self._began
        logger.debug("captured %d launches in %.2f s, pool %d MiB", len(self.nodes), seconds, _pool.n_bytes // MIB)

    def instantiate(self) -> None:
        """Nothing: a tape runs as it is."""

    def replay(self) -> None:
        _in_order()
        with torch.inference_mode(), watch.launch():
            for run, args, kwargs, outs in self.nodes:
                result = run(*args, **kwargs)
                if outs:
                    keep(result, outs)

    def reset(self) -> None:
        self.nodes = []


def _in_order() -> None:
    """All graphs share memory, so one replay must come after the other, whatever streams they run on.

    Raises:
        UnorderedAccess: it runs on another stream than the last one, and no event orders the two.
    """
    global _last_replay
    by = streams.access(streams.current_stream(), "Graph.replay")
    if _last_replay is not None and not _last_replay.before(by.actor):
        raise streams.unordered(by, "replays into memory that another graph may still use", _last_replay)
    _last_replay = by


@contextlib.contextmanager
def graph(cuda_graph: Graph, pool: object = None, stream: object = None) -> Iterator[None]:
    """What stands for `torch.cuda.graph`."""
    with streams.StreamContext(stream) if isinstance(stream, streams.Stream) else contextlib.nullcontext():
        cuda_graph.capture_begin(pool)
        with contextlib.ExitStack() as on_failure:
            on_failure.callback(abandon)
            yield
            on_failure.pop_all()
        cuda_graph.capture_end()


def abandon() -> None:
    """End a capture that has failed."""
    global _tape
    assert _tape is not None
    _tape.__exit__(None, None, None)
    _tape = None
    host.unwatch()


def graph_pool_handle() -> tuple[int, int]:
    return 0, 1


def is_capturing() -> bool:
    return _tape is not None


def launch(fn: Function) -> Function:
    """Make a function one launch: the stand-in of a kernel, or what starts one."""

    @functools.wraps(fn)
    def call(*args: Any, **kwargs: Any) -> Any:
        global _tape
        tape = _tape
        if tape is None:
            with watch.launch():
                return fn(*args, **kwargs)
        _tape = None
        try:
            with watch.launch(), _disable_current_modes(), host.unwatched():
                with tape.launching():
                    out = fn(*args, **kwargs)
                return tape.record(fn, args, kwargs, out, mutates=True)
        finally:
            _tape = tape

    return call  # type: ignore[return-value]


class EventInGraph(streams.Event):
    """Recorded while a graph is captured, it is recorded at that point of every replay (CUDA's external events)."""

    record = launch(streams.Event.record)


def takes_part(stream: object) -> bool:
    """Return whether launches on `stream` are captured now."""
    return _tape is not None and _tape.takes_part(stream)


def record_stream(tensor: torch.Tensor, stream: streams.Stream) -> None:
    """The allocator does not give this memory away before `stream` is done with it; while it captures, not at all."""
    streams.record_stream(tensor, stream)
    if _tape is not None:
        _tape.kept.append(tensor)


def pool() -> Pool:
    return _pool


def addresses(tree: Any) -> Any:
    """The tree with tensors in the pool as a captured launch knows them, which does not keep their cells theirs."""
    return pytree.tree_map_only(
        torch.Tensor, lambda tensor: _pool.address(tensor) if tensor.numel() and _pool.owns(tensor) else tensor, tree
    )
