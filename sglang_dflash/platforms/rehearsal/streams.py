"""Streams without a device: operations run immediately, and are recorded as if they might still be running.

Streams and the host are actors. Each actor has a vector clock: the part of every other actor's work that is certainly
finished. A launch is ordered after the host's earlier actions. `wait_stream`, `wait_event` and waits of the host join
clocks. Nothing else orders two actors. For each piece of memory the last write and later reads are recorded. An access
must be ordered after earlier accesses that conflict with it. Otherwise `UnorderedAccess` is raised, with both places in
code.

Views share the memory of their storage, and the pool of captured graphs is one piece of memory. By the rule of CUDA's
caching allocator, freed memory returns to its stream, whose next tensor may reuse it. The reuse must be ordered after
all uses by other streams. Otherwise `record_stream` is needed, which makes the allocator wait for these streams.

`watch.py` determines which operations touch which memory.
"""

from __future__ import annotations

import sys
import time
import weakref
from collections.abc import Callable, Iterator
from types import TracebackType
from typing import Any, NamedTuple

import torch

Clock = dict["Actor", int]
Place = tuple[tuple[str, int], ...]  # (file, line) of calls, innermost first

MIB = 1 << 20
# Messages omit code in such paths.
NOT_SHOWN = ("/torch/", "/triton/", "/sglang_dflash/platforms/rehearsal/", "/contextlib.py")
N_SHOWN = 3  # number of lines of code per access in a message


class UnorderedAccess(RuntimeError):
    """Error for two unordered accesses to the same memory, one of them a write: a race on a GPU."""


class Actor:
    """The host, or a stream. Invariant: ticks of each actor `a` up to `clock[a]` precede this actor's next action."""

    def __init__(self, name: str) -> None:
        self.name = name
        self.clock: Clock = {}
        self.freed: list[Memory] = []  # freed memory of this actor that other actors may still use

    def join(self, clock: Clock) -> None:
        for actor, done in clock.items():
            if self.clock.get(actor, 0) < done:
                self.clock[actor] = done

    def act(self) -> int:
        """Begin an action after the host's earlier actions: advance this actor's clock, and return the new tick."""
        if self is not HOST:
            self.join(HOST.clock)
        self.clock[self] = self.clock.get(self, 0) + 1
        return self.clock[self]


HOST = Actor("the host")


class Access(NamedTuple):
    """One access to memory: by `actor` at tick `time` of its clock, in operation `what`, called from `place`."""

    actor: Actor
    time: int
    what: str
    place: Place

    def before(self, actor: Actor) -> bool:
        return actor is self.actor or actor.clock.get(self.actor, 0) >= self.time

    def __str__(self) -> str:
        where = " < ".join(f"{'/'.join(file.rsplit('/', 2)[-2:])}:{line}" for file, line in self.place)
        return f"{self.what} on {self.actor.name} at {where}"


def access(actor: Actor, what: str) -> Access:
    """Return a new access by `actor`. Its place is the innermost code outside torch and the emulation."""
    return Access(actor, actor.act(), what, tuple(here()))


def here() -> Iterator[tuple[str, int]]:
    frame, shown = sys._getframe(1), 0
    while frame.f_back is not None and shown < N_SHOWN:
        frame = frame.f_back
        file = frame.f_code.co_filename
        if not any(part in file for part in NOT_SHOWN):
            shown += 1
            yield file, frame.f_lineno


class Memory:
    """Record of the last write to one piece of memory, and of later reads."""

    def __init__(self, owner: Actor | None = None, n_bytes: int = 0) -> None:
        """Create an empty record; `owner`: the stream that allocated the memory, None if unknown."""
        self.owner, self.n_bytes = owner, n_bytes
        self.written: Access | None = None
        self.reads: dict[Actor, Access] = {}

    def read(self, by: Access) -> None:
        if self.written is not None and not self.written.before(by.actor):
            raise unordered(by, "reads what may not be written yet", self.written)
        self.reads[by.actor] = by

    def write(self, by: Access) -> None:
        for earlier in self.uses():
            if not earlier.before(by.actor):
                raise unordered(by, "writes what may still be in use", earlier)
        self.written, self.reads = by, {}

    def uses(self) -> list[Access]:
        """Return the recorded accesses. The next write must be ordered after all of them."""
        return [*self.reads.values(), *filter(None, [self.written])]

    def used_elsewhere(self) -> bool:
        return any(use.actor is not self.owner for use in self.uses())

    def hand_over(self, by: Access) -> None:
        """Check that the allocator may give this memory to `by`, or raise UnorderedAccess."""
        for earlier in self.uses():
            if not earlier.before(by.actor):
                does = "may be given the memory of a tensor that is gone but still in use"
                raise unordered(by, does, earlier, "`wait_event`, `wait_stream` or `record_stream`")


def unordered(by: Access, does: str, earlier: Access, cure: str = "`wait_event` or `wait_stream`") -> UnorderedAccess:
    return UnorderedAccess(f"{by}: {does}: {earlier}. On a GPU nothing orders the two; {cure} would")


def memory_of(tensor: torch.Tensor) -> Memory:
    """Return the record of a tensor's memory. It is kept as an attribute of the tensor's storage."""
    storage = tensor.untyped_storage()
    memory = storage.__dict__.get("memory")
    if memory is None:
        memory = storage.__dict__["memory"] = Memory()
    return memory


def allocated(tensor: torch.Tensor, by: Access) -> Memory:
    """Record a new tensor on a device, and return the record of its memory.

    Raises:
        UnorderedAccess: the tensor may reuse freed memory that a stream still uses.
    """
    storage = tensor.untyped_storage()
    n_bytes, owner = storage.nbytes(), by.actor
    owner.freed = [memory for memory in owner.freed if not all(use.before(owner) for use in memory.uses())]
    for memory in owner.freed:  # the allocator does not use small blocks for large tensors, or large ones for small
        if memory.n_bytes >= n_bytes and (memory.n_bytes > MIB) == (n_bytes > MIB):
            memory.hand_over(by)
    memory = storage.__dict__["memory"] = Memory(owner, n_bytes)
    weakref.finalize(storage, _free, memory).atexit = False
    return memory


def _free(memory: Memory) -> None:
    if memory.owner is not None and memory.used_elsewhere():
        memory.owner.freed.append(memory)


def record_stream(tensor: torch.Tensor, stream: Stream) -> None:
    """Let the allocator wait for `stream` before it reuses the tensor's memory. So the reuse is no longer checked."""
    memory_of(tensor).owner = None


class Stream(Actor):
    """Stand-in for `torch.cuda.Stream`."""

    def __init__(self, device: object = None, priority: int = 0) -> None:
        file, line = next(here(), ("", 0))
        super().__init__(f"stream {len(_streams)} (of {file.rsplit('/', 1)[-1]}:{line})")
        _streams.append(self)

    @property
    def stream_id(self) -> int:
        return id(self)

    def wait_stream(self, stream: Stream) -> None:
        self.wait_event(stream.record_event())

    def wait_event(self, event: Event) -> None:
        self.act()
        self.join(event.clock)

    def record_event(self, event: Event | None = None) -> Event:
        event = event or Event()
        event.record(self)
        return event

    def query(self) -> bool:
        """Synchronise and return True, because unfinished work is not emulated."""
        self.synchronize()
        return True

    def synchronize(self) -> None:
        require_waiting(f"a wait of the host for {self.name}")
        self.act()
        HOST.join(self.clock)


class Event:
    """Stand-in for `torch.cuda.Event`. As on a GPU, waiting for an unrecorded event has no effect."""

    def __init__(
        self, enable_timing: bool = False, blocking: bool = False, interprocess: bool = False, external: bool = False
    ) -> None:
        self.clock: Clock = {}
        self.recorded_at = 0.0

    def record(self, stream: Stream | None = None) -> None:
        stream = stream or current_stream()
        stream.act()
        self.clock, self.recorded_at = dict(stream.clock), time.perf_counter()

    def wait(self, stream: Stream | None = None) -> None:
        (stream or current_stream()).wait_event(self)

    def synchronize(self) -> None:
        require_waiting("a wait of the host for an event")
        HOST.join(self.clock)

    def query(self) -> bool:
        """Synchronise and return True, because unfinished work is not emulated."""
        self.synchronize()
        return True

    def elapsed_time(self, end: Event) -> float:
        """Return the milliseconds between two events, on the host's clock."""
        return (end.recorded_at - self.recorded_at) * 1e3


_refusal: Callable[[str], Exception] | None = None


def refuse_waits(refusal: Callable[[str], Exception] | None) -> None:
    """Refuse waits of the host from now on. A wait raises the error that `refusal` returns; None allows waits again."""
    global _refusal
    _refusal = refusal


def require_waiting(what: str) -> None:
    """Check that the host may wait, or raise the error set by `refuse_waits`."""
    if _refusal is not None:
        raise _refusal(what)


_streams: list[Stream] = []
_current = [Stream()]
_current[0].name = "the default stream"


class StreamContext:
    """Reusable context that makes a stream the current stream. If the stream is None, nothing changes."""

    def __init__(self, stream: Stream | None) -> None:
        self.stream = stream

    def __enter__(self) -> None:
        _current.append(self.stream or _current[-1])

    def __exit__(self, kind: type | None, error: BaseException | None, traceback: TracebackType | None) -> None:
        _current.pop()


def current_stream(device: object = None) -> Stream:
    return _current[-1]


def default_stream(device: object = None) -> Stream:
    return _current[0]


def set_stream(stream: Stream) -> None:
    _current[-1] = stream


def synchronize(device: object = None) -> None:
    """Let the host wait for every stream."""
    for stream in _streams:
        stream.synchronize()


def names() -> dict[str, Any]:
    """Return this module's replacements for attributes of `torch.cpu`, by name of the attribute."""
    return {
        "Stream": Stream,
        "Event": Event,
        "StreamContext": StreamContext,
        "stream": StreamContext,
        "current_stream": current_stream,
        "default_stream": default_stream,
        "set_stream": set_stream,
        "synchronize": synchronize,
    }
