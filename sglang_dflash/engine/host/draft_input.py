"""State that SGLang's scheduler passes from one decode step to the next, and the reservation of KV slots between steps.

The state is the anchor and `prefix_len` of each request. With the overlap schedule SGLang passes the state on the
device, in its `FutureMap` (here "the relay"). The host gets the state one step late. So before a step, KV slots are
reserved for the block that the step will verify, and for the block still in flight.

Invariant: when `prepare_for_decode` returns, a request's row of req_to_token has KV slots for positions 0 to
committed + w + W - 1. `committed` is the latest `prefix_len` that the host has (SGLang's `kv_committed_len`). W is the
widest verify: N, or more if n-gram copies continue blocks. w is the width of the step that may be in flight. If a row
has fewer, all rows get KV slots up to committed + 2 W - 1. So steps of one token need new ones only once in W steps.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from sglang.srt.managers.schedule_batch import ScheduleBatch
from sglang.srt.mem_cache.allocation import alloc_for_spec_decode
from sglang.srt.mem_cache.allocation_sizing import (
    get_alloc_page_size,
    get_alloc_reserve_per_decode,
    page_aligned_decode_alloc_lens,
)
from sglang.srt.speculative.spec_info import SpecInput, SpecInputType
from sglang.srt.utils import async_h2d


@dataclass
class DraftInput(SpecInput):
    """State between two steps. SGLang reads the fields `bonus_tokens`, `new_seq_lens` and `future_indices` by name."""

    bonus_tokens: torch.Tensor  # anchor_B, int64
    new_seq_lens: torch.Tensor  # prefix_len_B, int64
    future_indices: torch.Tensor | None = None  # index of each request in the relay; set by the overlap schedule
    n_in_flight: int = 1  # largest number of tokens per request that the step in flight may commit
    allocated_B_cpu: torch.Tensor | None = None  # int32, number of KV slots of each request; set by prepare_for_decode

    # Fields that SGLang's relay reads, but that only other algorithms use.
    topk_p = topk_index = hidden_states = draft_probs = None

    def __post_init__(self) -> None:
        super().__init__(spec_input_type=SpecInputType.DFLASH_DRAFT)
        self.num_tokens_per_req = self.num_tokens_for_logprob_per_req = 1

    @classmethod
    def idle(cls, device: torch.device) -> DraftInput:
        """Return the state of an empty batch."""
        empty = torch.empty(0, dtype=torch.int64, device=device)
        return cls(bonus_tokens=empty, new_seq_lens=empty)

    def prepare_for_decode(self, batch: ScheduleBatch) -> None:
        """Reserve KV slots for the next step. The scheduler may call this before it has the last step's outcome."""
        if batch.batch_size() == 0:
            return
        batch.maybe_evict_swa()
        self._reserve(batch, get_alloc_reserve_per_decode())
        committed = [req.kv.kv_committed_len for req in batch.reqs]
        # With the overlap schedule SGLang later replaces `seq_lens_cpu` by the lengths from the relay.
        batch.seq_lens_cpu = torch.tensor(committed, dtype=torch.int64)
        batch.seq_lens_sum = sum(committed)
        for req in batch.reqs:
            req.decode_batch_idx += 1

    def _reserve(self, batch: ScheduleBatch, reserve: int) -> None:
        """Allocate KV slots for `reserve` = 2 W tokens past the committed ones, if a row has too few for two steps."""
        allocated, least = [req.kv.kv_allocated_len for req in batch.reqs], self.n_in_flight + reserve // 2
        if all(n >= req.kv.kv_committed_len + least for n, req in zip(allocated, batch.reqs, strict=True)):
            self.allocated_B_cpu = torch.tensor(allocated, dtype=torch.int32)
            return
        allocated, needed, n_new = page_aligned_decode_alloc_lens(
            batch.reqs, reserve=reserve, page_size=batch.token_to_kv_pool_allocator.page_size
        )
        self.allocated_B_cpu = torch.tensor(needed, dtype=torch.int32)
        if n_new:
            device_2B = async_h2d([allocated, needed], dtype=torch.int32, device=batch.device)
            alloc_for_spec_decode(
                batch.tree_cache,
                batch.req_to_token_pool,
                reqs=batch.reqs,
                req_pool_indices=batch.req_pool_indices,
                cur_kv_lens=device_2B[0],
                cur_kv_lens_cpu=torch.tensor(allocated, dtype=torch.int32),
                nxt_kv_lens=device_2B[1],
                nxt_kv_lens_cpu=self.allocated_B_cpu,
                num_needed_tokens=n_new,
                batch=batch,
            )

    def filter_batch(self, new_indices: torch.Tensor, new_indices_cpu: list[int] | None = None) -> None:
        """Keep only the requests at these indices of the batch, int64."""
        self.allocated_B_cpu = None  # prepare_for_decode sets it before the next use
        if self.future_indices is not None:
            self.future_indices = self.future_indices[new_indices]
            return
        self.bonus_tokens = self.bonus_tokens[new_indices]
        self.new_seq_lens = self.new_seq_lens[new_indices]

    def merge_batch(self, spec_info: DraftInput) -> None:
        """Append the requests of another batch."""
        self.allocated_B_cpu = None
        self.n_in_flight = max(self.n_in_flight, spec_info.n_in_flight)
        if self.future_indices is not None:
            assert spec_info.future_indices is not None, "one schedule for both batches"
            self.future_indices = torch.cat([self.future_indices, spec_info.future_indices])
            return
        self.bonus_tokens = torch.cat([self.bonus_tokens, spec_info.bonus_tokens])
        self.new_seq_lens = torch.cat([self.new_seq_lens, spec_info.new_seq_lens])


def after_transfer(state: Any, *_: object) -> DraftInput:
    """Return the state before the first decode step of requests that another server has prefilled.

    Hook after `SpeculativeAlgorithm.build_disagg_draft_input`.
    """
    return DraftInput(
        bonus_tokens=state.bonus_tokens, new_seq_lens=state.new_seq_lens, future_indices=state.future_indices
    )


def row_headroom(headroom: int) -> int:
    """Return the number of entries that a row of req_to_token needs past the context length.

    When a request is one token short of the context length, 2 W more tokens are reserved, rounded up to whole pages
    (W: see the module docstring). At page size 1 SGLang's own number is only W + 4. So the reservation would overflow
    into the next request's row (sglang issue 33579).

    Args:
        headroom: number of entries that SGLang has computed.
    """
    return max(headroom, get_alloc_reserve_per_decode() + get_alloc_page_size() - 1)
