"""Which tensors are the host's. On a GPU their device says it; here all memory is one, so they are marked.

Marked are results of `.cpu()`, `.pin_memory()` and of allocations that ask for pinned memory, SGLang's `*_cpu` fields
(by `seams.py`), and what the host computes of marked tensors while it captures. Everything else is the device's.
In a captured region the host may read what is its own, and nothing else; and a device operation may read a host tensor
only as a scalar: anything larger would be copied once, at capture, on a GPU an error or a value that never changes.
"""

from __future__ import annotations

import contextlib
import weakref
from collections.abc import Callable, Iterator
from operator import attrgetter
from typing import Any

import torch
from torch.utils import _pytree as pytree

READS = ("tolist", "numpy", "cpu", "__array__", "pin_memory")  # methods of a tensor that hand its values to the host

Refusal = Callable[[str], Exception]

_marked: dict[int, Any] = {}  # by storage; kept as long as the storage
_originals: dict[str, Callable[..., Any]] = {}
_refusal: Refusal | None = None


def mark(tensor: torch.Tensor) -> torch.Tensor:
    """The host's from now on."""
    storage = tensor.untyped_storage()
    key = storage._cdata
    if key not in _marked and storage.nbytes():
        _marked[key] = weakref.finalize(storage, _marked.pop, key, None)
    return tensor


def is_marked(tensor: torch.Tensor) -> bool:
    return tensor.untyped_storage()._cdata in _marked


def only(args: tuple, kwargs: dict) -> bool:
    """Whether an operation reads host tensors and no others."""
    leaves = [leaf for leaf in pytree.tree_leaves((args, kwargs)) if isinstance(leaf, torch.Tensor)]
    return bool(leaves) and all(map(is_marked, leaves))


def keep(out: Any) -> Any:
    """What the host computed of its own is its own."""
    return pytree.tree_map_only(torch.Tensor, mark, out)


def require_device(name: str, args: tuple, kwargs: dict, refusal: Refusal) -> None:
    """No device operation reads a host tensor, but for a scalar.

    Raises:
        refusal's: one does.
    """
    for leaf in pytree.tree_leaves((args, kwargs)):
        if isinstance(leaf, torch.Tensor) and leaf.dim() and is_marked(leaf):
            raise refusal(f"{name} of a host tensor {tuple(leaf.shape)}, whose values would be those of the capture")


def watch(refusal: Refusal) -> None:
    """From now on a host read of a device tensor raises."""
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
    """Inside a launch: there is no host in it."""
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
