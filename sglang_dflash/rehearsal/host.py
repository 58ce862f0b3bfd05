"""Marks of host tensors, which replace the device attribute, because here all memory is the CPU's.

Host tensors are results of `.cpu()`, `.pin_memory()` and pinned allocations, SGLang's `*_cpu` fields (by `seams.py`),
and results that the host computes from host tensors during capture. All others are device tensors. During capture the
host may read only host tensors. A device operation may read a host tensor only as a scalar: a larger one would be
copied once, at capture, which on a GPU is an error or a value that never changes.
"""

from __future__ import annotations

import contextlib
import weakref
from collections.abc import Callable, Iterator
from operator import attrgetter
from typing import Any

import torch
from torch.utils import _pytree as pytree

READS = ("tolist", "numpy", "cpu", "__array__", "pin_memory")  # tensor methods that copy values to the host

Refusal = Callable[[str], Exception]

_marked: dict[int, Any] = {}  # by storage; removed with the storage
_originals: dict[str, Callable[..., Any]] = {}
_refusal: Refusal | None = None


def mark(tensor: torch.Tensor) -> torch.Tensor:
    """Mark a tensor as the host's, and return it."""
    storage = tensor.untyped_storage()
    key = storage._cdata
    if key not in _marked and storage.nbytes():
        _marked[key] = weakref.finalize(storage, _marked.pop, key, None)
    return tensor


def is_marked(tensor: torch.Tensor) -> bool:
    return tensor.untyped_storage()._cdata in _marked


def only(args: tuple, kwargs: dict) -> bool:
    """Return whether an operation reads only host tensors, and at least one."""
    leaves = [leaf for leaf in pytree.tree_leaves((args, kwargs)) if isinstance(leaf, torch.Tensor)]
    return bool(leaves) and all(map(is_marked, leaves))


def keep(out: Any) -> Any:
    """Mark all tensors in `out` as the host's, and return it."""
    return pytree.tree_map_only(torch.Tensor, mark, out)


def require_device(name: str, args: tuple, kwargs: dict, refusal: Refusal) -> None:
    """Check that a device operation reads no host tensors except scalars, or raise the refusal."""
    for leaf in pytree.tree_leaves((args, kwargs)):
        if isinstance(leaf, torch.Tensor) and leaf.dim() and is_marked(leaf):
            raise refusal(f"{name} of a host tensor {tuple(leaf.shape)}, whose values would be those of the capture")


def watch(refusal: Refusal) -> None:
    """Make host reads of device tensors raise from now on."""
    global _refusal
    _refusal = refusal
    for name in READS:
        _originals[name] = attrgetter(name)(torch.Tensor)
        setattr(torch.Tensor, name, _watched(name, _originals[name]))


def unwatch() -> None:
    global _refusal
    _refusal = None
    for name, original in _originals.items():
        setattr(torch.Tensor, name, original)
    _originals.clear()


@contextlib.contextmanager
def unwatched() -> Iterator[None]:
    """Allow reads inside the context: a launch runs on the device."""
    global _refusal
    before, _refusal = _refusal, None
    try:
        yield
    finally:
        _refusal = before


def _watched(name: str, original: Callable[..., Any]) -> Callable[..., Any]:
    def read(self: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
        if _refusal is not None and not is_marked(self):
            raise _refusal(f"Tensor.{name} of a device tensor")
        return original(self, *args, **kwargs)

    return read
