"""Recorder of memory accesses for `streams.py`. While the dispatch mode `Watch` is active, it sees every operation.

An operation runs on the current stream, or on the host if all its tensors are host tensors. The operations inside a
kernel's stand-in or inside a replay count as one launch on one stream (`launch`).

Host tensors result from `from_numpy` or `.cpu()`, lie in pinned memory, or were created without a device argument. The
results that the host computes from host tensors are host tensors too. All other tensors are device tensors.
`.to(device)` copies a host tensor, and the host waits for the copy unless `non_blocking` is set. With `non_blocking` a
pinned source is read later, and any other source at the call.

Not covered: other threads, memory written through numpy, and writes of interpreted Triton kernels that change no value.
Parts of a tensor are not distinguished: an access to one row counts as an access to the whole tensor.
"""

from __future__ import annotations

import contextlib
import functools
import logging
from collections.abc import Callable, Iterator
from operator import attrgetter
from typing import Any

import numpy as np
import torch
from torch._C import _len_torch_function_stack
from torch.utils._python_dispatch import TorchDispatchMode, _disable_current_modes

from sglang_dflash.platforms.rehearsal import host, streams
from sglang_dflash.platforms.rehearsal.operands import Tensors, is_hosts, operands, tensors
from sglang_dflash.platforms.rehearsal.pool import Pool
from sglang_dflash.platforms.rehearsal.streams import HOST, Access, Memory, access, current_stream
from sglang_dflash.platforms.rehearsal.tape import ALLOCATES, decomposed, same_bytes, waits

logger = logging.getLogger(__name__)

FACTORIES = ("tensor", "empty", "zeros", "ones", "full", "arange", "from_numpy", "randint")
NO_ACCESS = {f"aten::{name}" for name in ("detach_", "set_", "lift_fresh", "record_stream", "is_pinned")}
READS_NOTHING = ("aten::new_", "_like")  # operations that use only the shape and dtype of their argument

_watch: Watch | None = None
_n_launches = 0  # nesting depth of launches that are running
kernels_seen_by: list[Any] = []  # recorders of interpreted kernels; if there are any, the last replaces the Watch
_n_launched = 0  # number of launches inside a Watch since the start


class Watch(TorchDispatchMode):
    """Dispatch mode that records accesses to memory. Invariant: entered once, by the thread that launches."""

    def __init__(self, pool: Pool | None = None) -> None:
        super().__init__()
        self.pool, self.pool_memory = pool, Memory()
        self.in_factory = 0
        self.waits: set[tuple[str, str]] = set()  # (place in code, stream) of waits of the host that were logged

    def __enter__(self) -> Watch:
        global _watch
        streams.synchronize()
        _watch = self
        return super().__enter__()

    def __exit__(self, *error: Any) -> None:
        global _watch
        _watch = None
        super().__exit__(*error)

    def __torch_dispatch__(self, func: Any, types: Any, args: tuple = (), kwargs: dict | None = None) -> Any:
        kwargs = kwargs or {}
        parts = decomposed(self, func, args, kwargs)
        if parts is not NotImplemented:
            return parts
        out = func(*args, **kwargs)
        name = func._schema.name
        if name in NO_ACCESS or self.in_factory:
            return out
        written, read = operands(func, args, kwargs)
        given = {id(tensor.untyped_storage()) for tensor in (*written, *read)}
        made = [tensor for tensor in tensors((out,)) if id(tensor.untyped_storage()) not in given]
        if not written and not made and not waits(func, name, args, kwargs):
            return out  # a view
        if any(part in name for part in READS_NOTHING):
            read = []
        if not _n_launches and (written or read) and is_hosts(name, args, (*written, *read)):
            self.by_host(name, read, written)
            return host.keep(out)
        if name not in ALLOCATES:
            _launched()
        asynchronous = bool(kwargs.get("non_blocking") or (name == "aten::copy_" and args[2:3] == (True,)))
        by = self.by_stream(name, read, written, asynchronous)
        for tensor in made:
            self.make(tensor, by, written=name not in ALLOCATES)
        crosses = name == "aten::copy_" and len({*map(host.is_marked, (*written, *read))}) == 2
        if waits(func, name, args, kwargs) or (crosses and not asynchronous):
            self.wait()
        return out

    def memory(self, tensor: torch.Tensor) -> Memory:
        if self.pool is not None and self.pool.owns(tensor):
            return self.pool_memory
        return streams.memory_of(tensor)

    def by_host(self, what: str, read: Tensors, written: Tensors) -> None:
        by = access(HOST, what)
        for tensor in read:
            self.memory(tensor).read(by)
        for tensor in written:
            self.memory(tensor).write(by)

    def by_stream(self, what: str, read: Tensors, written: Tensors, asynchronous: bool) -> Access:
        at_once = [tensor for tensor in read if host.is_marked(tensor) and not (asynchronous and is_pinned(tensor))]
        if at_once:  # the host reads host tensors at the launch, except pinned sources of asynchronous copies
            self.by_host(what, at_once, [])
        by = access(current_stream(), what)
        for tensor in read:
            if not any(tensor is other for other in at_once):
                self.memory(tensor).read(by)
        for tensor in written:
            self.memory(tensor).write(by)
        return by

    def make(self, tensor: torch.Tensor, by: Access, *, written: bool) -> None:
        if not tensor.numel() or (self.pool is not None and self.pool.owns(tensor)):
            return
        memory = streams.allocated(tensor, by)
        if written:
            memory.write(by)

    def wait(self) -> None:
        """Let the host wait for the current stream. Does nothing inside a launch, which does not involve the host."""
        if _n_launches:
            return
        by = access(HOST, "")
        stream = current_stream()
        where = str(by), stream.name
        if where not in self.waits:
            self.waits.add(where)
            logger.info("The host waits for %s%s", stream.name, by)
        stream.synchronize()

    def host_reads(self, tensor: torch.Tensor, what: str) -> None:
        if not tensor.numel():
            return
        if host.is_marked(tensor) and not _n_launches:
            self.by_host(what, [tensor], [])
        else:
            self.by_stream(what, [tensor], [], False)
            self.wait()


def n_launched() -> int:
    """Return the number of launches and copies inside a Watch since the start. A replay of a graph counts as one."""
    return _n_launched


def _launched() -> None:
    global _n_launched
    if _watch is not None and not _n_launches:
        _n_launched += 1


@contextlib.contextmanager
def launch() -> Iterator[None]:
    """Count the operations inside the context as one launch."""
    global _n_launches
    _launched()
    _n_launches += 1
    try:
        yield
    finally:
        _n_launches -= 1


def interpreted(call: Callable[..., Any]) -> Callable[..., Any]:
    """Wrap the launch of a kernel in Triton's interpreter, to record its accesses.

    Arguments that the kernel changes count as written, all other arguments as read. The interpreter copies all
    arguments back after a launch, so a write that changes no value is not seen.
    """

    @functools.wraps(call)
    def launch_kernel(self: Any, *args: Any, **kwargs: Any) -> Any:
        watch = kernels_seen_by[-1] if kernels_seen_by else _watch
        if watch is None:
            return call(self, *args, **kwargs)
        given = [tensor for tensor in tensors((args, tuple(kwargs.values()))) if tensor.numel()]
        with _disable_current_modes():
            before = [tensor.clone() for tensor in given]
            out = call(self, *args, **kwargs)
            changed = [not same_bytes(*pair) for pair in zip(given, before, strict=True)]
        read = [tensor for tensor, is_new in zip(given, changed, strict=True) if not is_new]
        written = [tensor for tensor, is_new in zip(given, changed, strict=True) if is_new]
        watch.by_stream(self.fn.__name__, read, written, False)
        return out

    return launch_kernel


# -- host and device tensors ---------------------------------------------------------------------------------------


def is_pinned(tensor: torch.Tensor) -> bool:
    return "pinned" in tensor.untyped_storage().__dict__


def install() -> None:
    """Wrap factories to mark host tensors, `.to` to copy them to the device, `tolist` and `numpy` to record reads."""
    for name in FACTORIES:
        setattr(torch, name, _factory(attrgetter(name)(torch)))
    for name in ("tolist", "numpy"):
        setattr(torch.Tensor, name, _host_read(name, attrgetter(name)(torch.Tensor)))
    torch.Tensor.to = _to(torch.Tensor.to)  # type: ignore[method-assign, assignment]


def pin(tensor: torch.Tensor, device: torch.device | None = None) -> torch.Tensor:
    """Mark a tensor as a pinned host tensor, so that copies from it may be asynchronous."""
    host.mark(tensor).untyped_storage().__dict__["pinned"] = True
    return tensor


def to_host(tensor: torch.Tensor, memory_format: torch.memory_format = torch.preserve_format) -> torch.Tensor:
    """Return a host copy of a device tensor, after the host has waited for the current stream."""
    if host.is_marked(tensor):
        return tensor
    copy = tensor.clone()
    if _n_launches:  # inside a launch the copy stays on the device, and the host does not wait
        return copy
    if _watch is not None:
        _watch.wait()
    return host.mark(copy)


def async_d2h(tensor: torch.Tensor) -> torch.Tensor:
    """Copy a tensor to pinned memory on the current stream. SGLang's own function does not copy "cpu" tensors."""
    if host.is_marked(tensor):
        return tensor
    pinned = torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=True)
    pinned.copy_(tensor, non_blocking=True)
    streams.record_stream(tensor, current_stream())
    return pinned


@contextlib.contextmanager
def _in_factory() -> Iterator[None]:
    if _watch is not None:
        _watch.in_factory += 1
    try:
        yield
    finally:
        if _watch is not None:
            _watch.in_factory -= 1


def _factory(original: Callable[..., torch.Tensor]) -> Callable[..., torch.Tensor]:
    @functools.wraps(original)
    def make(*args: Any, pin_memory: bool = False, **kwargs: Any) -> torch.Tensor:
        # `with torch.device(...)` puts a mode on the torch-function stack. An empty stack means the default device.
        on_host = kwargs.get("device") is None and not _len_torch_function_stack()
        data = args[0] if args else kwargs.get("data")
        if pin_memory and original is _tensor and isinstance(data, np.ndarray | torch.Tensor):
            return original(*args, pin_memory=True, **kwargs)  # torch raises an error for such data, on every machine
        if kwargs.get("out") is not None or _n_launches or not (pin_memory or on_host):
            tensor = original(*args, **kwargs)
            if original is _tensor and _watch is not None:
                _watch.wait()  # the data are copied from unpinned host memory, so the host waits
            return tensor
        with _in_factory():
            tensor = original(*args, **kwargs)
        return pin(tensor) if pin_memory else host.mark(tensor)

    return make


_tensor = torch.tensor


def _host_read(name: str, original: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(original)
    def read(self: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
        if _watch is not None:
            _watch.host_reads(self, f"Tensor.{name}")
        return original(self, *args, **kwargs)

    return read


def _to(original: Callable[..., torch.Tensor]) -> Callable[..., torch.Tensor]:
    @functools.wraps(original)
    def to(self: torch.Tensor, *args: Any, non_blocking: bool = False, **kwargs: Any) -> torch.Tensor:
        asked = kwargs.get("device", args[0] if args else None)
        if not isinstance(asked, str | torch.device) or _n_launches or not host.is_marked(self):
            return original(self, *args, **kwargs)
        with _disable_current_modes():
            copy = original(self, *args, **kwargs)
            if copy.untyped_storage()._cdata == self.untyped_storage()._cdata:
                copy = copy.clone()
        if _watch is not None and self.numel():
            by = _watch.by_stream("Tensor.to", [self], [], non_blocking)
            _launched()
            _watch.make(copy, by, written=True)
            if not non_blocking:
                _watch.wait()
        return copy

    return to
