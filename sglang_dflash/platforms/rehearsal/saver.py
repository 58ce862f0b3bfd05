"""Memory saver of the emulated GPU: regions whose memory is given back, and the rule that weights lie in regions.

`pause` overwrites all memory that was allocated in a tag's regions. `resume` restores what the region keeps a copy
of. Other memory stays overwritten, because on a GPU it has undefined values. Every byte is 255, which is NaN in all
floating-point formats, and -1 in integers.

Addresses stay the same, as on a GPU. There an access to released memory ends the process. Here a read gives NaN or -1,
and `resume` raises an error if released memory was written.
"""

from __future__ import annotations

import contextlib
import ctypes
import gc
import logging
import weakref
from collections.abc import Iterator
from typing import Any, NamedTuple, cast

import torch
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode

from sglang_dflash.platforms.cpu.saver import KeepingSaver
from sglang_dflash.platforms.rehearsal import graph, host
from sglang_dflash.platforms.rehearsal.pool import MIB
from sglang_dflash.platforms.rehearsal.tape import storage_of, tensors

logger = logging.getLogger(__name__)

GARBAGE = 255  # every byte of released memory
NOTICEABLE = 4096  # bytes; smaller tensors may lie outside all regions
WEIGHTS = "weights"  # SGLang's tag, as in `sglang.srt.constants`
OURS, NOT_OURS = ("sglang_dflash.", "sglang_dflash_kernels."), ("sglang_dflash.platforms.",)


class ReleasedMemory(RuntimeError):
    """Error for a server that a real memory saver would end, or whose memory it would not give back."""


class Region(NamedTuple):
    """Kind of region."""

    tag: str
    restored: bool  # a copy on the host keeps the values


class Piece(NamedTuple):
    """Released memory."""

    memory: Any  # owner of the bytes
    address: int
    n_bytes: int
    copy: bytes | None  # values before the release; None: they are lost


class Saver(KeepingSaver):
    """Stand-in for `torch_memory_saver.torch_memory_saver`."""

    def __init__(self) -> None:
        self.storages: dict[int, tuple[Region, weakref.ref[torch.UntypedStorage]]] = {}
        self.of_graphs: Region | None = None  # region of the captured graphs' pool, once one is captured in a region
        self.released: dict[str, list[Piece]] = {}

    @contextlib.contextmanager
    def region(self, tag: str, enable_cpu_backup: bool = False) -> Iterator[None]:
        with _Recorder(self, Region(tag, enable_cpu_backup)):
            yield

    @contextlib.contextmanager
    def cuda_graph(self, *, tag: str, enable_cpu_backup: bool = False, **options: Any) -> Iterator[None]:
        """Capture a graph whose memory can be released. All graphs share one pool, which is released as a whole."""
        self.of_graphs = Region(tag, enable_cpu_backup)
        with graph.graph(**options):
            yield

    def add(self, storage: torch.UntypedStorage, region: Region) -> None:
        """Note that a storage was allocated in `region`."""
        key = storage._cdata
        if storage.nbytes() and key not in self.storages:
            self.storages[key] = region, weakref.ref(storage, lambda _: self.storages.pop(key, None))

    def would_keep(self, tensor: torch.Tensor) -> bool:
        """Return whether `tensor` is a device tensor of noticeable size that no release gives back."""
        small = tensor.untyped_storage().nbytes() <= NOTICEABLE
        return not (small or storage_of(tensor) in self.storages or host.is_marked(tensor) or graph.pool().owns(tensor))

    def pause(self, tag: str) -> None:
        """Release the memory of a tag.

        Raises:
            ReleasedMemory: the tag is released already, or weights of this package lie outside all regions.
        """
        if tag in self.released:
            raise ReleasedMemory(f"{tag} is released twice; torch_memory_saver would end the process")
        if tag == WEIGHTS:
            require_inside(self)
        self.released[tag] = pieces = list(self._pieces(tag))
        for piece in pieces:
            ctypes.memset(piece.address, GARBAGE, piece.n_bytes)
        logger.info("memory saver: released %s", describe(tag, pieces))

    def resume(self, tag: str) -> None:
        """Map the memory of a tag again, and restore its values if there is a copy.

        Raises:
            ReleasedMemory: the tag is not released, or its memory was written since.
        """
        if tag not in self.released:
            raise ReleasedMemory(f"{tag} is not released; torch_memory_saver would end the process")
        pieces = self.released.pop(tag)
        for piece in pieces:
            if ctypes.string_at(piece.address, piece.n_bytes).strip(bytes([GARBAGE])):
                raise ReleasedMemory(f"{piece.n_bytes} bytes of {tag} were written while they were released")
            if piece.copy is not None:
                ctypes.memmove(piece.address, piece.copy, piece.n_bytes)
        logger.info("memory saver: resumed %s", describe(tag, pieces))

    def _pieces(self, tag: str) -> Iterator[Piece]:
        for region, reference in tuple(self.storages.values()):
            storage = reference()
            if region.tag == tag and storage is not None:
                yield _piece(storage, storage.data_ptr(), storage.nbytes(), region)
        if self.of_graphs is not None and self.of_graphs.tag == tag:
            pool = graph.pool()
            yield _piece(pool, pool.begin, pool.n_bytes, self.of_graphs)


def _piece(memory: Any, address: int, n_bytes: int, region: Region) -> Piece:
    return Piece(memory, address, n_bytes, ctypes.string_at(address, n_bytes) if region.restored else None)


def describe(tag: str, pieces: list[Piece]) -> str:
    """Return the tag and its bytes in words."""
    kept = sum(piece.n_bytes for piece in pieces if piece.copy is not None)
    total = sum(piece.n_bytes for piece in pieces)
    return f"{total} bytes ({total / MIB:.2f} MiB) of {tag}, {kept} bytes of them with a copy"


class _Recorder(TorchDispatchMode):
    """Dispatch mode that notes every allocation of a region."""

    def __init__(self, saver: Saver, region: Region) -> None:
        super().__init__()
        self.saver, self.of = saver, region

    def __torch_dispatch__(self, func: Any, types: Any, args: tuple = (), kwargs: dict | None = None) -> Any:
        out = func(*args, **(kwargs or {}))
        given = {storage_of(tensor) for tensor in tensors((args, kwargs))}
        for tensor in tensors(out):
            if storage_of(tensor) not in given and not host.is_marked(tensor):
                self.saver.add(tensor.untyped_storage(), self.of)
        return out


# -- the rule ------------------------------------------------------------------------------------------------------


def require_inside(saver: Saver) -> None:
    """Check that this package's objects hold no large device tensor outside the regions, or raise ReleasedMemory."""
    outside = {storage_of(tensor): name for name, tensor in held() if saver.would_keep(tensor)}
    if outside:
        raise ReleasedMemory(
            f"a release would not give back {', '.join(sorted(outside.values()))}; allocate them inside a region of "
            "engine/saver.py"
        )


def objects() -> list[Any]:
    """Return all objects that Python's collector knows, also those that SGLang has frozen after its start."""
    is_frozen = gc.get_freeze_count() > 0
    gc.unfreeze()
    found = gc.get_objects()
    if is_frozen:
        gc.freeze()
    return found


def held() -> Iterator[tuple[str, torch.Tensor]]:
    """Yield the tensors that this package's objects hold, with their names."""
    for thing in objects():
        kind = type(thing)
        module = str(kind.__module__)  # some classes have a descriptor instead of a name
        if module.startswith(OURS) and not module.startswith(NOT_OURS):
            yield from ((f"{kind.__name__}.{name}", tensor) for name, tensor in tensors_of(thing))


def tensors_of(thing: Any) -> Iterator[tuple[str, torch.Tensor]]:
    """Yield the tensors in attributes of an object, and the parameters and buffers of a module, with their names."""
    if isinstance(thing, nn.Module) and "_parameters" in vars(thing):  # else it is under construction
        yield from thing.named_parameters()
        yield from thing.named_buffers()
    fields = cast(Any, thing)._asdict() if isinstance(thing, tuple) else vars(thing)
    for name, value in fields.items():
        yield from ((name, tensor) for tensor in tensors(value))
