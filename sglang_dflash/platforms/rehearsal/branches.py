"""Streams inside a captured forward, with the rules of CUDA's capture (option `streams`).

A capture begins on one stream, the origin. Another stream takes part in the capture once it has waited for a stream
that takes part. The origin must wait for every other stream before the capture ends. If two streams use the same
memory, such waits must order their launches, because a replay keeps no other order. A block of the graphs' pool belongs
to one stream. So a freed block is reused only by a launch of this stream. The launch must be ordered after the last use
of the block by every other stream.

A replay is one launch on one stream, so the order inside a graph is checked only at capture.
"""

from __future__ import annotations

import functools
import logging
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode

from sglang_dflash.platforms.rehearsal import host, streams, watch
from sglang_dflash.platforms.rehearsal.operands import Tensors, operands, tensors
from sglang_dflash.platforms.rehearsal.pool import Pool
from sglang_dflash.platforms.rehearsal.streams import Access, Memory, access, current_stream
from sglang_dflash.platforms.rehearsal.tape import CaptureError, Tape, capture_error, storage_of
from sglang_dflash.platforms.rehearsal.tape import tensors as leaves

logger = logging.getLogger(__name__)

Span = tuple[int, int]  # first address of a tensor's memory, and the address after its last

_used: set[str] = set()  # names of the streams, other than the origin, that captured forwards have used


class BranchedTape(Tape):
    """Tape that records the stream of each launch, and checks that launches on the same memory are ordered."""

    def __init__(self, pool: Pool) -> None:
        super().__init__(pool)
        self.origin = current_stream()
        self.began = self.origin.act()
        self.last: dict[streams.Actor, Access] = {}  # last launch by stream
        self.outside_memory: dict[int, Memory] = {}
        self.pool_memory: dict[Span, Memory] = {}
        self.touched = Touched()

    def __enter__(self) -> BranchedTape:
        streams.refuse_waits(capture_error)
        super().__enter__()
        return self

    def __exit__(self, *error: Any) -> None:
        streams.refuse_waits(None)
        super().__exit__(*error)

    def new(self, tensor: torch.Tensor) -> torch.Tensor:
        cells = super().new(tensor)
        if not cells.numel():
            return cells
        by, taken = self.launch("the allocator"), self.pool.span(cells)
        for other in overlapping(self.pool_memory, taken):
            self.pool_memory.pop(other).hand_over(by)
        self.pool_memory[taken] = Memory()
        return cells

    @contextmanager
    def launching(self) -> Iterator[None]:
        self.touched = Touched()
        watch.kernels_seen_by.append(self.touched)
        try:
            with self.touched:
                yield
        finally:
            watch.kernels_seen_by.pop()

    def record(self, run: Callable[..., Any], args: tuple, kwargs: dict, out: Any, *, mutates: bool) -> Any:
        n_nodes, touched = len(self.nodes), self.touched
        self.touched = Touched()  # drops the references to the tensors of this launch
        placed = super().record(run, args, kwargs, out, mutates=mutates)
        if len(self.nodes) == n_nodes:
            return placed  # a view
        name, read, written = operands_of(run, args, kwargs, touched)
        given = {storage_of(tensor) for tensor in (*leaves((args, kwargs)), *written, *read)}
        made = [tensor for tensor in leaves(placed) if tensor.numel() and storage_of(tensor) not in given]
        by = self.launch(name)
        for tensor in read:
            for memory in self.memories(tensor):
                memory.read(by)
        for tensor in (*written, *made):
            for memory in self.memories(tensor):
                memory.write(by)
        self.last[by.actor] = by
        return placed

    def launch(self, what: str) -> Access:
        """Record a launch on the current stream.

        Raises:
            CaptureError: the stream does not take part in the capture.
        """
        stream = current_stream()
        if stream is not self.origin:
            if not self.takes_part(stream):
                raise capture_error(f"{what} on {stream.name}, which has not waited for the stream that is captured")
            if stream.name not in _used:
                _used.add(stream.name)
                logger.info("A captured forward also runs on %s", stream.name)
        return access(stream, what)

    def takes_part(self, stream: object) -> bool:
        assert isinstance(stream, streams.Stream)
        return stream is self.origin or stream.clock.get(self.origin, 0) >= self.began

    def memories(self, tensor: torch.Tensor) -> list[Memory]:
        """Return the records of all memory that overlaps with the tensor's memory; none for a host tensor."""
        if host.is_marked(tensor):
            return []
        if not self.pool.owns(tensor):
            return [self.outside_memory.setdefault(tensor.untyped_storage().data_ptr(), Memory())]
        where = self.pool.span(tensor)
        self.pool_memory.setdefault(where, Memory())
        return [self.pool_memory[other] for other in overlapping(self.pool_memory, where)]

    def end(self) -> None:
        """Check that the origin has waited for all other streams, or raise CaptureError."""
        for stream, last in self.last.items():
            if not last.before(self.origin):
                raise CaptureError(
                    f"the capture ended before the captured stream waited for {stream.name} (last operation: {last})"
                )


class Touched(TorchDispatchMode):
    """Recorder of a launch's reads and writes in memory that existed before the launch."""

    def __init__(self) -> None:
        super().__init__()
        self.read: Tensors = []
        self.written: Tensors = []
        self.made: set[int] = set()  # storages of tensors that the launch has created

    def __torch_dispatch__(self, func: Any, types: Any, args: tuple = (), kwargs: dict | None = None) -> Any:
        kwargs = kwargs or {}
        out = func(*args, **kwargs)
        name = func._schema.name
        if name in watch.NO_ACCESS:
            return out
        written, read = operands(func, args, kwargs)
        given = {storage_of(tensor) for tensor in (*written, *read)}
        made = {storage_of(tensor) for tensor in tensors((out,))} - given
        if any(part in name for part in watch.READS_NOTHING):
            read = []
        if written or made or not any(True for _ in tensors((out,))):  # otherwise a view
            self.by_stream(name, read, written, False)
        self.made |= made
        return out

    def by_stream(self, what: str, read: Tensors, written: Tensors, asynchronous: bool) -> None:
        """Record the accesses of an operation, or of a kernel in Triton's interpreter."""
        self.read += [tensor for tensor in read if storage_of(tensor) not in self.made]
        self.written += [tensor for tensor in written if storage_of(tensor) not in self.made]


def operands_of(run: Callable[..., Any], args: tuple, kwargs: dict, touched: Touched) -> tuple[str, Tensors, Tensors]:
    """Return a launch's name, the tensors that it reads, and the tensors that it writes."""
    if isinstance(run, torch._ops.OpOverload):
        name = run._schema.name
        written, read = operands(run, args, kwargs)
        return name, [] if any(part in name for part in watch.READS_NOTHING) else read, written
    if isinstance(run, functools.partial):
        # A collective operation (`run_collective`). Its schema declares no writes, so all its tensors count as written.
        return "a collective operation", [], [tensor for tensor in leaves((args, kwargs)) if tensor.numel()]
    return run.__qualname__, touched.read, touched.written


def overlapping(memories: dict[Span, Memory], where: Span) -> list[Span]:
    start, end = where
    return [(first, last) for first, last in memories if first < end and start < last]
