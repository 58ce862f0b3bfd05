"""CUDA graphs without CUDA: the launches of a forward are recorded once, and replayed without the forward's Python.

Capture runs the forward under a dispatch mode. Every operation that writes memory becomes a node: the operation, its
tensor arguments by address, and its other arguments with their values at capture. Views and allocations are not nodes.
A call of a GPU kernel's stand-in (`launch`) is one node, and its Python code may read values from device tensors.

Operations that CUDA forbids during capture raise `CaptureError`. These are copies of values to the host, operations
whose result's shape depends on device data, and the creation of tensors from host data.

Replay runs the nodes in order, and writes their results to fixed addresses in `pool.py`'s memory.

Unlike on a GPU, the operations of a capture are also executed. So a capture writes K/V to the padding KV slot, and
writes other buffers.
"""

from __future__ import annotations

import contextlib
import functools
import json
import logging
import time
from collections import Counter
from collections.abc import Callable, Iterator
from typing import Any, TypeVar

import torch
from torch._ops import OpOverload
from torch.utils import _pytree as pytree
from torch.utils._python_dispatch import _disable_current_modes
from triton.runtime.interpreter import GridExecutor

from sglang_dflash.platforms.rehearsal import cost, host, streams, watch
from sglang_dflash.platforms.rehearsal.pool import MIB, Pool
from sglang_dflash.platforms.rehearsal.tape import CaptureError, Node, Tape, capture_error, keep

logger = logging.getLogger(__name__)

Function = TypeVar("Function", bound=Callable)

_pool = Pool(stream=streams.current_stream)
_tape: Tape | None = None
_last_replay: streams.Access | None = None
tape_of: Callable[[Pool], Tape] = Tape  # class that records a capture


class Graph:
    """Stand-in for `torch.cuda.CUDAGraph`."""

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
            raise CaptureError(
                "a captured forward reads tensors without references, whose memory is free when it is replayed: "
                f"{', '.join(dangling)}; keep a reference to them"
            )
        cost.require_cheap(self.nodes)
        seconds = time.perf_counter() - self._began
        logger.debug("captured %d launches in %.2f s, pool %d MiB", len(self.nodes), seconds, _pool.n_bytes // MIB)
        logger.debug("kernels: %s", json.dumps(Counter(filter(None, map(kernel_name, self.nodes)))))

    def instantiate(self) -> None:
        """Do nothing, because a tape needs no instantiation."""

    def replay(self) -> None:
        _in_order()
        with torch.inference_mode(), watch.launch():
            for run, args, kwargs, outs in self.nodes:
                result = run(*args, **kwargs)
                if outs:
                    keep(result, outs)

    def reset(self) -> None:
        self.nodes = []


def kernel_name(node: Node) -> str | None:
    """Return the name of the Triton kernel, or of the stand-in for a kernel, that `node` launches; None for others."""
    match node:
        case Node(run=OpOverload() | functools.partial()):  # a collective is partial
            return None
        case Node(args=[GridExecutor() as kernel, *_]):
            return str(kernel.fn.__name__)
    return node.run.__name__


def _in_order() -> None:
    """Check that this replay is ordered after the previous replay, because all graphs share memory.

    Raises:
        UnorderedAccess: the two replays run on different streams, and no event orders them.
    """
    global _last_replay
    by = streams.access(streams.current_stream(), "Graph.replay")
    if _last_replay is not None and not _last_replay.before(by.actor):
        raise streams.unordered(by, "replays into memory that another graph may still use", _last_replay)
    _last_replay = by


@contextlib.contextmanager
def graph(cuda_graph: Graph, pool: object = None, stream: object = None) -> Iterator[None]:
    """Capture a graph, in place of `torch.cuda.graph`."""
    with streams.StreamContext(stream) if isinstance(stream, streams.Stream) else contextlib.nullcontext():
        cuda_graph.capture_begin(pool)
        with contextlib.ExitStack() as on_failure:
            on_failure.callback(abandon)
            yield
            on_failure.pop_all()
        cuda_graph.capture_end()


def abandon() -> None:
    """End a capture after a failure."""
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
    """Wrap a kernel's stand-in, or a function that launches a kernel, so that a call is one launch and one node."""

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
    """CUDA's external event: if a call of `record` is captured, each replay repeats it at the same point."""

    record = launch(streams.Event.record)


def takes_part(stream: object) -> bool:
    """Return whether launches on `stream` are being captured."""
    return _tape is not None and _tape.takes_part(stream)


def record_stream(tensor: torch.Tensor, stream: streams.Stream) -> None:
    """Keep a tensor's memory until `stream` no longer uses it, or in a capture until the capture ends."""
    streams.record_stream(tensor, stream)
    if _tape is not None:
        _tape.kept.append(tensor)


def pool() -> Pool:
    return _pool


def addresses(tree: Any) -> Any:
    """Return `tree` with each tensor in the pool replaced by one that does not own its block (`Pool.address`)."""
    return pytree.tree_map_only(
        torch.Tensor, lambda tensor: _pool.address(tensor) if tensor.numel() and _pool.owns(tensor) else tensor, tree
    )
