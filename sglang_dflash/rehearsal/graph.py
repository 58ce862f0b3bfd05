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
import traceback
from collections.abc import Callable, Iterator
from operator import attrgetter
from typing import Any, NamedTuple, TypeVar

import torch
from torch.utils import _pytree as pytree
from torch.utils._python_dispatch import TorchDispatchMode, _disable_current_modes

from sglang_dflash.rehearsal import host
from sglang_dflash.rehearsal.pool import MIB, Pool

logger = logging.getLogger(__name__)

Function = TypeVar("Function", bound=Callable)

# What waits for the device, or has a shape that only the device knows, or is made of host data.
WAITS = {
    f"aten::{name}"
    for name in (
        *("_local_scalar_dense", "item", "is_nonzero", "equal", "nonzero", "nonzero_numpy", "argwhere"),
        *("masked_select", "_unique2", "unique_dim", "unique_consecutive", "bincount"),
        *("lift_fresh", "lift_fresh_copy", "_pin_memory"),
    )
}
ALLOCATES = {f"aten::{name}" for name in ("empty", "new_empty", "empty_like", "empty_strided", "new_empty_strided")}
INDEXES = {"aten::index", "aten::index_put", "aten::index_put_"}


class CaptureError(RuntimeError):
    """An operation that CUDA does not permit while a stream is captured."""


class Node(NamedTuple):
    """One launch. `outs`: cells its results are copied to; None where it writes them itself, or they are views."""

    run: Callable[..., Any]
    args: tuple
    kwargs: dict[str, Any]
    outs: tuple[torch.Tensor | None, ...]


_pool = Pool()
_tape: Tape | None = None


class Tape(TorchDispatchMode):
    """Takes down what runs while it is entered."""

    def __init__(self) -> None:
        super().__init__()
        self.nodes: list[Node] = []
        # Storages that the forward neither made nor was given by the pool: on a GPU, memory a replay reads by address.
        self.outside: dict[int, torch.Tensor] = {}
        self.n_uses: dict[int, int] = {}

    def __torch_dispatch__(self, func: Any, types: Any, args: tuple = (), kwargs: dict | None = None) -> Any:
        kwargs = kwargs or {}
        if host.only(args, kwargs):  # the host computes while it captures, as it does beside a GPU
            return host.keep(func(*args, **kwargs))
        name = func._schema.name
        require_capturable(func, name, args, kwargs)
        out = func(*args, **kwargs)
        if name in ALLOCATES:
            return _pool.like(out)
        return self.record(func, args, kwargs, out, mutates=func._schema.is_mutable)

    def record(self, run: Callable[..., Any], args: tuple, kwargs: dict, out: Any, *, mutates: bool) -> Any:
        """Take a launch down that has just run, and give its new outputs cells in the pool.

        Args:
            mutates: whether it may have written to its arguments.
        Returns:
            `out`, in those cells.
        """
        given = {storage_of(tensor) for tensor in tensors((args, kwargs))}
        flat, spec = pytree.tree_flatten(out)
        is_new = [isinstance(leaf, torch.Tensor) and storage_of(leaf) not in given for leaf in flat]
        if not mutates and not any(is_new):
            return out
        args, kwargs = pytree.tree_map_only(torch.Tensor, self.address, (args, kwargs))
        placed = [place(leaf) if new else leaf for leaf, new in zip(flat, is_new, strict=True)]
        outs = tuple(self.address(leaf) if new else None for leaf, new in zip(placed, is_new, strict=True))
        into = None
        if not mutates and len(outs) == 1 and outs[0] is not None:
            into = writes_into(run, args, kwargs, outs[0])
        if into is not None:
            self.nodes.append(Node(into, args, kwargs | {"out": outs[0]}, ()))
        else:
            self.nodes.append(Node(run, args, kwargs, outs if any(is_new) else ()))
        return pytree.tree_unflatten(placed, spec)

    def address(self, tensor: torch.Tensor) -> torch.Tensor:
        """What a launch knows of an argument: where it lies, not whose it is."""
        if not tensor.numel():
            return tensor
        if _pool.owns(tensor):
            return _pool.address(tensor)
        storage = storage_of(tensor)
        bare = torch.empty(0, dtype=tensor.dtype).set_(
            tensor.untyped_storage(), tensor.storage_offset(), tensor.shape, tensor.stride()
        )
        self.outside.setdefault(storage, bare)
        self.n_uses[storage] = self.n_uses.get(storage, 0) + 1
        return bare

    def dangling(self) -> list[str]:
        """Outside memory that this tape alone keeps: on a GPU it is free, and replays read whatever comes there."""
        held = torch._C._storage_Use_Count  # counts the question as well
        return [
            f"{tensor.dtype} {tuple(tensor.shape)}"
            for storage, tensor in self.outside.items()
            if held(storage) <= self.n_uses[storage] + 1
        ]


def require_capturable(func: Any, name: str, args: tuple, kwargs: dict) -> None:
    """
    Raises:
        CaptureError: CUDA would not permit it.
    """
    if name in WAITS:
        raise capture_error(name)
    if name in INDEXES and any(index is not None and index.dtype in (torch.bool, torch.uint8) for index in args[1]):
        raise capture_error(f"{name} with a mask, whose result has a size that only the device knows")
    if name == "aten::repeat_interleave" and kwargs.get("output_size") is None and func._overloadname != "self_int":
        raise capture_error(f"{name} without output_size")
    host.require_device(name, args, kwargs, capture_error)


def capture_error(what: str) -> CaptureError:
    """With where it came from: the innermost lines outside of torch and of the rehearsal."""
    stack, ours = traceback.extract_stack(), ("/torch/", __file__)
    frames = [frame for frame in stack if not any(part in frame.filename for part in ours)]
    where = " < ".join(f"{'/'.join(frame.filename.rsplit('/', 2)[-2:])}:{frame.lineno}" for frame in frames[-4:][::-1])
    return CaptureError(f"{what}: not permitted while a stream is captured; at {where}")


def tensors(tree: Any) -> list[torch.Tensor]:
    return [leaf for leaf in pytree.tree_leaves(tree) if isinstance(leaf, torch.Tensor)]


def addresses(tree: Any) -> Any:
    """The tree with tensors in the pool as a captured launch knows them, which does not keep their cells theirs."""
    return pytree.tree_map_only(
        torch.Tensor, lambda tensor: _pool.address(tensor) if tensor.numel() and _pool.owns(tensor) else tensor, tree
    )


def keep(result: Any, outs: tuple[torch.Tensor | None, ...]) -> None:
    """Copy what a launch has returned to the cells it is read from."""
    for cells, value in zip(outs, pytree.tree_leaves(result), strict=True):
        if cells is not None:
            cells.copy_(value)


def storage_of(tensor: torch.Tensor) -> int:
    return tensor.untyped_storage()._cdata


def place(tensor: torch.Tensor) -> torch.Tensor:
    """The same values in the pool."""
    return _pool.like(tensor).copy_(tensor)


@functools.cache
def out_overload(func: Any) -> Any:
    """The overload of an operation that writes into a given tensor and has otherwise the same arguments; or None."""
    if not isinstance(func, torch._ops.OpOverload):
        return None
    wanted = [(argument.name, str(argument.type)) for argument in func._schema.arguments]
    for name in func.overloadpacket.overloads():
        overload = attrgetter(name)(func.overloadpacket)
        arguments = overload._schema.arguments
        rest = [(argument.name, str(argument.type)) for argument in arguments if not argument.is_out]
        if rest == wanted and [argument.name for argument in arguments if argument.is_out] == ["out"]:
            return overload
    return None


def writes_into(func: Any, args: tuple, kwargs: dict, cells: torch.Tensor) -> Any:
    """The overload of `func` that leaves in `cells` what is there already; None where there is none that does."""
    overload = out_overload(func)
    if overload is None:
        return None
    expected = cells.clone()
    try:
        overload(*args, **kwargs, out=cells)
    except (RuntimeError, NotImplementedError):  # it does not take these strides, or this type
        cells.copy_(expected)
        return None
    if torch.equal(*(tensor.reshape(-1).view(torch.uint8) for tensor in (cells, expected))):  # NaN for NaN
        return overload
    cells.copy_(expected)
    return None


class Graph:
    """What stands for `torch.cuda.CUDAGraph`."""

    def __init__(self, keep_graph: bool = False) -> None:
        self.nodes: list[Node] = []
        self.n_replays = 0

    def capture_begin(self, pool: object = None, capture_error_mode: str = "global") -> None:
        global _tape
        assert _tape is None, "one stream is captured at a time"
        host.watch(capture_error)
        self._began = time.perf_counter()
        _tape = Tape()
        _tape.__enter__()

    def capture_end(self) -> None:
        global _tape
        assert _tape is not None, "no capture has begun"
        tape, _tape = _tape, None
        tape.__exit__(None, None, None)
        host.unwatch()
        self.nodes = tape.nodes
        if dangling := tape.dangling():
            raise CaptureError(f"a captured forward reads memory that is free when it is replayed: {dangling}")
        seconds = time.perf_counter() - self._began
        logger.debug("captured %d launches in %.2f s, pool %d MiB", len(self.nodes), seconds, _pool.n_bytes // MIB)

    def instantiate(self) -> None:
        """Nothing: a tape runs as it is."""

    def replay(self) -> None:
        self.n_replays += 1
        with torch.inference_mode():
            for run, args, kwargs, outs in self.nodes:
                result = run(*args, **kwargs)
                if outs:
                    keep(result, outs)

    def reset(self) -> None:
        self.nodes = []


@contextlib.contextmanager
def graph(cuda_graph: Graph, pool: object = None, stream: object = None) -> Iterator[None]:
    """What stands for `torch.cuda.graph`."""
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
            return fn(*args, **kwargs)
        _tape = None
        try:
            with _disable_current_modes(), host.unwatched():
                out = fn(*args, **kwargs)
                return tape.record(fn, args, kwargs, out, mutates=True)
        finally:
            _tape = tape

    return call  # type: ignore[return-value]
