"""Memory of captured graphs: one private pool for all graphs of a process, as in SGLang.

Blocks are assigned by CUDACachingAllocator's rules. Sizes are rounded up to multiples of 512 bytes. The smallest free
block that fits is taken, and among equal blocks the one at the lowest address. A large enough remainder is split off,
and free neighbours are merged. Blocks of up to 1 MiB never share a segment with larger blocks. If no free block fits, a
segment is added: 2 MiB for blocks of up to 1 MiB, and 20 MiB for larger blocks below 10 MiB. From 10 MiB on the segment
has the block's size, rounded up to a multiple of 2 MiB.

A block is free when its last tensor is deleted. Then the next tensor of the same stream may reuse the block, in this or
a later graph. A segment belongs to the stream that requested it. Captured launches hold only addresses, so they do not
keep a block. If a launch reads a block that has been freed, the block may be overwritten, as on a GPU.
"""

from __future__ import annotations

import weakref
from bisect import bisect_right, insort
from collections.abc import Callable

import numpy as np
import torch
from torch import from_numpy  # the original, because `watch.py` replaces `torch.from_numpy` to mark host tensors

MIB = 1 << 20
ROUND = 512  # bytes; block sizes are multiples of this
SMALL, SMALL_SEGMENT = MIB, 2 * MIB  # bytes of the largest small block, and of its segment
# Bytes of a segment for blocks above `SMALL` and below `LARGE`. From `LARGE` bytes on the block's size is rounded up.
LARGE_SEGMENT, LARGE = 20 * MIB, 10 * MIB
CAPACITY = 4096 * MIB  # bytes of address space; the system provides memory for a page when it is first written


class Pool:
    """Pool of blocks. Invariant: `_free[segment]` lists (offset, size) of free blocks, ascending, no two adjacent."""

    def __init__(self, capacity: int = CAPACITY, stream: Callable[[], object] = lambda: None) -> None:
        """Create an empty pool of `capacity` bytes of address space; `stream` returns the current stream."""
        self.stream = stream
        self._memory = np.empty(capacity, np.uint8)
        self._whole = from_numpy(self._memory).untyped_storage()
        self._base = self._memory.ctypes.data
        self._kind: dict[int, tuple[bool, object]] = {}  # segment -> (whether its blocks are small, its stream)
        self._free: dict[int, list[tuple[int, int]]] = {}
        self.n_bytes = 0  # total size of the segments

    @property
    def begin(self) -> int:
        """Return the address of the first segment. The segments lie side by side."""
        return self._base

    def owns(self, tensor: torch.Tensor) -> bool:
        return self._base <= tensor.data_ptr() < self._base + self._memory.nbytes

    def like(self, tensor: torch.Tensor) -> torch.Tensor:
        """Return an uninitialised tensor with the dtype, shape and strides of `tensor`, in a new block of the pool."""
        if not tensor.numel():
            return torch.empty_like(tensor)
        n_bytes = extent(tensor) * tensor.element_size()
        segment, offset, size = self._take(-(-n_bytes // ROUND) * ROUND)
        block = self._memory[offset : offset + n_bytes]
        weakref.finalize(block, self._give, segment, offset, size).atexit = False
        return from_numpy(block).view(tensor.dtype).as_strided(tensor.shape, tensor.stride())

    def span(self, tensor: torch.Tensor) -> tuple[int, int]:
        """Return the address of the first byte of a tensor's block, and the address after the block's last byte.

        A tensor from `address` owns no block. For such a tensor the result is the range of its own elements.
        """
        storage = tensor.untyped_storage()
        if storage.data_ptr() != self._base or storage.nbytes() != self._memory.nbytes:
            return storage.data_ptr(), storage.data_ptr() + storage.nbytes()
        return tensor.data_ptr(), tensor.data_ptr() + extent(tensor) * tensor.element_size()

    def address(self, tensor: torch.Tensor) -> torch.Tensor:
        """Return a tensor over the same memory that does not own its block. Captured launches hold such tensors."""
        offset = (tensor.data_ptr() - self._base) // tensor.element_size()
        return torch.empty(0, dtype=tensor.dtype).set_(self._whole, offset, tensor.shape, tensor.stride())

    def _take(self, size: int) -> tuple[int, int, int]:
        small = size <= SMALL
        kind = small, self.stream()
        fits = [
            (n, offset, segment)
            for segment, free in self._free.items()
            if self._kind[segment] == kind
            for offset, n in free
            if n >= size
        ]
        n, offset, segment = min(fits) if fits else self._new_segment(size)
        self._free[segment].remove((offset, n))
        rest = n - size
        if rest >= ROUND if small else rest > SMALL:
            insort(self._free[segment], (offset + size, rest))
            n = size
        return segment, offset, n

    def _new_segment(self, size: int) -> tuple[int, int, int]:
        n = -(-size // (2 * MIB)) * 2 * MIB
        if size < LARGE:
            n = SMALL_SEGMENT if size <= SMALL else LARGE_SEGMENT
        if self.n_bytes + n > self._memory.nbytes:
            raise MemoryError(
                f"the rehearsal's graphs need more than {self._memory.nbytes // MIB} MiB; capture fewer sizes "
                "(--cuda-graph-bs-decode, SGLANG_DFLASH_WIDTHS)"
            )
        segment = self.n_bytes
        self.n_bytes += n
        self._kind[segment] = size <= SMALL, self.stream()
        self._free[segment] = [(segment, n)]
        return n, segment, segment

    def _give(self, segment: int, offset: int, size: int) -> None:
        free = self._free[segment]
        at = bisect_right(free, (offset, 0))
        if at < len(free) and free[at][0] == offset + size:
            size += free.pop(at)[1]
        if at and sum(free[at - 1]) == offset:
            before = free.pop(at - 1)
            offset, size = before[0], before[1] + size
        insort(free, (offset, size))


def extent(tensor: torch.Tensor) -> int:
    """Return the number of elements from a tensor's first to its last in memory, including skipped elements."""
    return 1 + sum((size - 1) * stride for size, stride in zip(tensor.shape, tensor.stride(), strict=True))
