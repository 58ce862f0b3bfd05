"""Recorder of a captured forward's launches. See `graph.py`."""

from __future__ import annotations

import functools
import traceback
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from operator import attrgetter
from typing import Any, NamedTuple

import torch
from torch.utils import _pytree as pytree
from torch.utils._python_dispatch import TorchDispatchMode

from sglang_dflash.platforms.rehearsal import host
from sglang_dflash.platforms.rehearsal.pool import Pool

# Operations that wait for the device, or whose result's shape depends on device data.
WAITS = {
    f"aten::{name}"
    for name in (
        *("_local_scalar_dense", "item", "is_nonzero", "equal", "nonzero", "nonzero_numpy", "argwhere"),
        *("masked_select", "_unique2", "unique_dim", "unique_consecutive", "bincount"),
    )
}
OF_HOST_DATA = {f"aten::{name}" for name in ("lift_fresh", "lift_fresh_copy", "_pin_memory")}
ALLOCATES = {f"aten::{name}" for name in ("empty", "new_empty", "empty_like", "empty_strided", "new_empty_strided")}
INDEXES = {"aten::index", "aten::index_put", "aten::index_put_"}


class CaptureError(RuntimeError):
    """Error for a forward that CUDA could not capture or replay correctly, or that breaks a rule of `cost.py`."""


class Node(NamedTuple):
    """One launch."""

    run: Callable[..., Any]
    args: tuple
    kwargs: dict[str, Any]
    outs: tuple[torch.Tensor | None, ...]  # destination of each result; None for a view; (): nothing to copy


class Tape(TorchDispatchMode):
    """Dispatch mode that records a forward's operations."""

    def __init__(self, pool: Pool) -> None:
        super().__init__()
        self.pool = pool
        self.nodes: list[Node] = []
        # Tensors outside the pool that launches use, by storage. On a GPU a replay uses them by address.
        self.outside: dict[int, torch.Tensor] = {}
        self.n_uses: dict[int, int] = {}  # number of references that this tape holds, by storage
        self.kept: list[torch.Tensor] = []  # passed to `record_stream`; their memory is kept until the capture ends

    def __torch_dispatch__(self, func: Any, types: Any, args: tuple = (), kwargs: dict | None = None) -> Any:
        kwargs = kwargs or {}
        if host.only(args, kwargs):  # host computation during capture is allowed
            return host.keep(func(*args, **kwargs))
        name = func._schema.name
        require_capturable(func, name, args, kwargs)
        parts = decomposed(self, func, args, kwargs)
        if parts is not NotImplemented:
            return parts
        out = func(*args, **kwargs)
        if name in ALLOCATES:
            return self.new(out)
        if name.startswith("c10d::"):  # writes to its arguments, but its schema does not declare this
            return self.record(functools.partial(run_collective, func), args, kwargs, out, mutates=True)
        return self.record(func, args, kwargs, out, mutates=func._schema.is_mutable)

    def record(self, run: Callable[..., Any], args: tuple, kwargs: dict, out: Any, *, mutates: bool) -> Any:
        """Record a launch that has just run, and copy its new outputs into the pool. A view is not recorded.

        Args:
            mutates: whether the launch may have written to its arguments.
        Returns:
            `out`, with new tensors in the pool.
        """
        given = {storage_of(tensor) for tensor in tensors((args, kwargs))}
        flat, spec = pytree.tree_flatten(out)
        is_new = [isinstance(leaf, torch.Tensor) and storage_of(leaf) not in given for leaf in flat]
        if not mutates and not any(is_new):
            return out
        args, kwargs = pytree.tree_map_only(torch.Tensor, self.address, (args, kwargs))
        placed = [self.place(leaf) if new else leaf for leaf, new in zip(flat, is_new, strict=True)]
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
        """Return an argument for a recorded launch: a tensor over the same memory that does not keep its block."""
        if not tensor.numel():
            return tensor
        if self.pool.owns(tensor):
            return self.pool.address(tensor)
        storage = storage_of(tensor)
        bare = torch.empty(0, dtype=tensor.dtype).set_(
            tensor.untyped_storage(), tensor.storage_offset(), tensor.shape, tensor.stride()
        )
        self.outside.setdefault(storage, bare)
        self.n_uses[storage] = self.n_uses.get(storage, 0) + 1
        return bare

    def place(self, tensor: torch.Tensor) -> torch.Tensor:
        """Copy a tensor into the pool."""
        return self.new(tensor).copy_(tensor)

    def new(self, tensor: torch.Tensor) -> torch.Tensor:
        """Return an uninitialised tensor in the pool, with the dtype, shape and strides of `tensor`."""
        return self.pool.like(tensor)

    def launching(self) -> AbstractContextManager[None]:
        """Return the context in which a launch runs; `BranchedTape` records the launch's accesses."""
        return nullcontext()

    def takes_part(self, stream: object) -> bool:
        """Return whether launches on `stream` are captured; always true if streams are not emulated."""
        return True

    def end(self) -> None:
        """Do nothing when a capture ends. `BranchedTape.end` checks that all streams were waited for."""

    def dangling(self) -> list[str]:
        """Return dtype and shape of tensors in `outside` that only this tape references.

        On a GPU the memory of such a tensor would be free, and replays would read other data.
        """
        held = torch._C._storage_Use_Count  # its argument counts as one more use
        return [
            f"{tensor.dtype} {tuple(tensor.shape)}"
            for storage, tensor in self.outside.items()
            if held(storage) <= self.n_uses[storage] + 1
        ]


def decomposed(mode: TorchDispatchMode, func: Any, args: tuple, kwargs: dict) -> Any:
    """Run the parts of a composite operation under `mode`. Returns NotImplemented for other operations.

    In inference mode PyTorch does not decompose operations for dispatch modes. Without this function a mode would not
    see whether `matmul` launches `mm` or `bmm`.
    """
    TorchDispatchMode.__enter__(mode)  # not `mode.__enter__`, because `watch.Watch.__enter__` synchronizes all streams
    try:
        return func.decompose(*args, **kwargs)
    finally:
        TorchDispatchMode.__exit__(mode, None, None, None)


def run_collective(func: Any, *args: Any, **kwargs: Any) -> None:
    """Run a collective operation, and let the host wait for its end. On a GPU only the current stream waits."""
    out = func(*args, **kwargs)
    (out[-1] if isinstance(out, tuple) else out).wait()


def require_capturable(func: Any, name: str, args: tuple, kwargs: dict) -> None:
    """Check that CUDA permits an operation during capture, or raise CaptureError."""
    if name in OF_HOST_DATA:
        raise capture_error(f"{name} of host data, which replays would not read again")
    if reason := waits(func, name, args, kwargs):
        raise capture_error(reason)
    host.require_device(name, args, kwargs, capture_error)


def waits(func: Any, name: str, args: tuple, kwargs: dict) -> str:
    """Return the reason why an operation makes the host wait for the device; "" if the host does not wait."""
    if name in WAITS:
        return f"{name}, for which the host waits"
    if name in INDEXES and any(index is not None and index.dtype in (torch.bool, torch.uint8) for index in args[1]):
        return f"{name} with a mask, whose result has a size that only the device knows"
    if name == "aten::repeat_interleave" and kwargs.get("output_size") is None and func._overloadname != "self_int":
        return f"{name} without output_size, whose result has a size that only the device knows"
    return ""


def capture_error(what: str) -> CaptureError:
    """Return the error for an operation, with the innermost lines of code outside torch and the emulation."""
    stack, ours = traceback.extract_stack(), ("/torch/", "/sglang_dflash/platforms/rehearsal/")
    frames = [frame for frame in stack if not any(part in frame.filename for part in ours)]
    where = " < ".join(f"{'/'.join(frame.filename.rsplit('/', 2)[-2:])}:{frame.lineno}" for frame in frames[-4:][::-1])
    return CaptureError(f"{what}: not permitted while a stream is captured; at {where}")


def tensors(tree: Any) -> list[torch.Tensor]:
    return [leaf for leaf in pytree.tree_leaves(tree) if isinstance(leaf, torch.Tensor)]


def keep(result: Any, outs: tuple[torch.Tensor | None, ...]) -> None:
    """Copy a launch's results to `outs`. A result whose entry is None is not copied."""
    for cells, value in zip(outs, pytree.tree_leaves(result), strict=True):
        if cells is not None:
            cells.copy_(value)


def storage_of(tensor: torch.Tensor) -> int:
    return tensor.untyped_storage()._cdata


@functools.cache
def out_overload(func: Any) -> Any:
    """Return an operation's overload with the additional argument `out`; None if there is no such overload."""
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
    """Return the `out` overload of `func` if it writes exactly the bytes that `cells` already has; else None."""
    overload = out_overload(func)
    if overload is None:
        return None
    expected = cells.clone()
    try:
        overload(*args, **kwargs, out=cells)
    except (RuntimeError, NotImplementedError):  # the overload does not support these strides or dtypes
        cells.copy_(expected)
        return None
    if same_bytes(cells, expected):
        return overload
    cells.copy_(expected)
    return None


def same_bytes(*two: torch.Tensor) -> bool:
    """Return whether two tensors have equal bytes, so that NaN equals NaN."""
    return torch.equal(*(tensor.reshape(-1).view(torch.uint8) for tensor in two))
