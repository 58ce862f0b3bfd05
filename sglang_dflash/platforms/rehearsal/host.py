"""Marks of host tensors. They replace the device attribute, because in the emulation every tensor is on the CPU.

Host tensors are:
- results of `.cpu()` and `.pin_memory()`
- pinned allocations of SGLang's LoRA and of FlashInfer
- `ForwardBatch.seq_lens_cpu` (`seams.py`)
- results that the host computes from host tensors during capture
- with the option `streams`, more tensors (`watch.py`, `overlap.py`)

All other tensors are device tensors. During capture the host may read only host tensors. A device operation may read a
host tensor only if it is a scalar. On a GPU a larger host tensor would raise an error, or be copied only at capture.
Then replays would read old values.
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

Refusal = Callable[[str], Exception]  # returns the error for the described operation

_marked: dict[int, Any] = {}  # finalizers by storage; an entry is removed when the storage is deleted
_originals: dict[str, Callable[..., Any]] = {}
_refusal: Refusal | None = None


def mark(tensor: torch.Tensor) -> torch.Tensor:
    """Mark a tensor as a host tensor, and return it. Tensors that share its memory are marked too."""
    storage = tensor.untyped_storage()
    key = storage._cdata
    if key not in _marked and storage.nbytes():
        _marked[key] = weakref.finalize(storage, _marked.pop, key, None)
    return tensor


def is_marked(tensor: torch.Tensor) -> bool:
    return tensor.untyped_storage()._cdata in _marked


def only(args: tuple, kwargs: dict) -> bool:
    """Return whether an operation reads at least one tensor, and all tensors that it reads are host tensors."""
    leaves = [leaf for leaf in pytree.tree_leaves((args, kwargs)) if isinstance(leaf, torch.Tensor)]
    return bool(leaves) and all(map(is_marked, leaves))


def keep(out: Any) -> Any:
    """Mark all tensors in `out` as host tensors, and return `out`."""
    return pytree.tree_map_only(torch.Tensor, mark, out)


def require_device(name: str, args: tuple, kwargs: dict, refusal: Refusal) -> None:
    """Check that a device operation reads no host tensors except scalars, or raise the error that `refusal` returns."""
    for leaf in pytree.tree_leaves((args, kwargs)):
        if isinstance(leaf, torch.Tensor) and leaf.dim() and is_marked(leaf):
            raise refusal(f"{name} of a host tensor {tuple(leaf.shape)}, whose values would be those of the capture")


def watch(refusal: Refusal) -> None:
    """Refuse host reads of device tensors from now on. A read raises the error that `refusal` returns."""
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
    """Allow host reads of device tensors inside the context. A launch needs this: its Python stands for a kernel."""
    global _refusal
    before, _refusal = _refusal, None
    try:
        yield
    finally:
        _refusal = before


def _watched(name: str, original: Callable[..., Any]) -> Callable[..., Any]:
    def read(self: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
        if _refusal is not None and not is_marked(self):
            raise _refusal(f"Tensor.{name} of a device tensor, for which the host waits")
        return original(self, *args, **kwargs)

    return read
