"""FlashInfer's plans: the numbers of queries and keys of each request, written by the host and read by kernels.

The host writes a plan into the wrapper's integer workspace, from which the kernel reads it. So a replay uses the plan
of its own step, not the plan of the capture. The kernel splits and merges a request's keys by the planned length, but
counts partial results by the length on the device. If the lengths differ, partial results of different queries are
mixed (scheduler.cuh, prefill.cuh). So every launch that reads a plan compares the two lengths.

Dimension key: as in `attention.py`.
"""

from __future__ import annotations

from collections.abc import Iterator
from itertools import pairwise
from typing import NamedTuple

import torch

from sglang_dflash.platforms.rehearsal import graph
from sglang_dflash.platforms.rehearsal.attention import require_int32

NHD = 0  # FlashInfer's number for this layout; 1 is HND
CHUNK = 128  # smallest number of keys in a part of a split request


class Planned(NamedTuple):
    """Plan: the index of each request's first query, and its number of pages."""

    first_query_B1: list[int]
    n_pages_B: list[int]  # for packed keys without pages, numbers of keys

    def write(self, int_workspace: torch.Tensor) -> list[int]:
        """Write the plan into device memory, and return its host part, the list `[number of requests]`.

        A captured graph keeps the host part from its capture. A replay reads only device memory again.
        """
        assert not graph.is_capturing(), "a plan in a captured forward: it reads lengths, for which the host waits"
        numbers = torch.tensor([*self.first_query_B1, *self.n_pages_B], dtype=torch.int32)
        int_workspace.view(torch.int32)[: len(numbers)] = numbers
        return [len(self.n_pages_B)]

    @classmethod
    def read(cls, int_workspace: torch.Tensor, plan_info: list[int]) -> Planned:
        (B,) = plan_info
        numbers = int_workspace.view(torch.int32)[: 2 * B + 1].tolist()
        return cls(numbers[: B + 1], numbers[B + 1 :])

    def requests(self, first_query_B1: torch.Tensor, first_page_B1: torch.Tensor) -> Iterator[tuple[int, slice]]:
        """Yield the index of each request that has queries, and the rows of its queries.

        Raises:
            AssertionError: the lengths on the device differ from the planned lengths, except for padding requests.
        """
        starts, n_pages_B = first_query_B1.tolist(), first_page_B1.diff().tolist()
        assert starts == self.first_query_B1, f"queries start at {starts}, but at {self.first_query_B1} in the plan"
        assert len(n_pages_B) == len(self.n_pages_B), f"{len(n_pages_B)} requests, {len(self.n_pages_B)} in the plan"
        for b, (n_pages, planned) in enumerate(zip(n_pages_B, self.n_pages_B, strict=True)):
            n_queries = starts[b + 1] - starts[b]
            # A graph's padding request is planned with a wrong length. Its few keys are not split, so this is harmless.
            is_padding = planned <= n_queries and n_pages <= CHUNK
            assert n_pages == planned or is_padding, (
                f"request {b} has {n_pages} pages of keys on the device and was planned with {planned} on the host: "
                "FlashInfer would split by one length and merge by the other"
            )
            if n_queries:
                yield b, slice(starts[b], starts[b + 1])


class Paged(NamedTuple):
    """Paged keys and values. The requests' lists of pages are packed in one tensor, without a fixed row width."""

    k_cache: torch.Tensor  # [pages, page size, G, E]
    v_cache: torch.Tensor
    first_page_B1: torch.Tensor
    pages: torch.Tensor
    last_page_len_B: torch.Tensor

    @classmethod
    def of(cls, k_cache: torch.Tensor, v_cache: torch.Tensor, layout: int, *where: torch.Tensor) -> Paged:
        require_int32(first_page_B1=where[0], pages=where[1], last_page_len_B=where[2])
        if layout != NHD:
            k_cache, v_cache = k_cache.transpose(1, 2), v_cache.transpose(1, 2)
        return cls(k_cache, v_cache, *where)

    def n_keys(self) -> list[int]:
        starts, page = self.first_page_B1.tolist(), self.k_cache.shape[1]
        last = self.last_page_len_B.tolist()
        assert len(last) == len(starts) - 1, f"{len(last)} lengths of last pages for {len(starts) - 1} requests"
        assert all(1 <= n <= page for n in last), f"last pages hold {last} keys, not 1 to {page}"
        n_pages = [end - start for start, end in pairwise(starts)]
        return [max(n - 1, 0) * page + (n > 0) * rest for n, rest in zip(n_pages, last, strict=True)]

    def keys(self, b: int, n_keys: int) -> tuple[torch.Tensor, torch.Tensor]:
        start, end = self.first_page_B1[b : b + 2].tolist()
        assert end <= len(self.pages), f"request {b} has entries {start} to {end} of a list of {len(self.pages)} pages"
        pages, n_pages = self.pages[start:end].long(), len(self.k_cache)
        assert ((pages >= 0) & (pages < n_pages)).all(), f"pages {pages.tolist()} of a cache with {n_pages} pages"
        k, v = (cache.index_select(0, pages).flatten(0, 1)[:n_keys] for cache in (self.k_cache, self.v_cache))
        return k, v
