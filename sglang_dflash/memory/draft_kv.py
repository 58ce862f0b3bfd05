"""The memory of the draft's context K/V and how SGLang counts it: one of two ways, chosen when the server starts.

Shared   the draft's pool has a slot for each of the target's, as SGLang makes and counts it
Rings    with a window: a ring of slots per request. Its size follows from window and block, so rings are counted per
         request, and the target's pool gets the rest
"""

from __future__ import annotations

import dataclasses
import logging
from collections.abc import Callable
from typing import Any, Protocol

import torch
from sglang.srt.mem_cache.memory_pool import KVCache, ReqToTokenPool
from sglang.srt.model_executor.model_runner import ModelRunner
from sglang.srt.model_executor.pool_configurator import MemoryPoolConfig
from sglang.srt.plugins.hook_registry import HookType
from sglang.srt.runtime_context import get_exec, get_schedule

from sglang_dflash.errors import NotSupported
from sglang_dflash.memory.sizes import ring_slots
from sglang_dflash.memory.slots import DraftSlots, RingSlots, SharedSlots, rings_for

logger = logging.getLogger(__name__)

READ_AGAIN = 64  # tokens at the end of a prompt that are read although they are in the prefix cache

Hooks = dict[str, tuple[Callable[..., Any], HookType]]  # by the names of `host/sglang-0.5.23.txt`
Pools = tuple[MemoryPoolConfig | None, ReqToTokenPool | None]
Gauges = dict[str, tuple[int, Callable[[], int]]]  # a pool's size, and how much of it requests hold


class DraftKV(Protocol):
    """Storage of the draft's context K/V."""

    def hooks(self, *, recurrent: bool) -> Hooks:
        """Return hooks on what SGLang counts; `recurrent`: the target has recurrent layers."""

    def pools(self, target: MemoryPoolConfig | None, requests: ReqToTokenPool | None, device: str) -> Pools:
        """Return the draft's pool and request table, derived from the target's."""

    def slots(self, target: ModelRunner, draft: ModelRunner) -> DraftSlots:
        """Return where K/V go; pools and attention backends exist."""

    def gauges(self, requests: ReqToTokenPool) -> Gauges:
        """Return pool sizes and fill levels for metrics."""


def draft_kv(window: int | None, widest: int, disaggregation: str) -> DraftKV:
    """Return the kind of memory that the draft's context K/V get.

    Args:
        window: context tokens that the draft keeps; None: all.
        widest: the most tokens of a request that a step writes.
        disaggregation: `--disaggregation-mode`.
    """
    return Shared(offloads=disaggregation == "decode") if window is None else Rings(window, widest)


class Shared:
    """A slot for each of the target's."""

    def __init__(self, *, offloads: bool) -> None:
        """`offloads`: SGLang copies the K/V of retracted requests to the host, as a decode server does."""
        self.offloads = offloads

    def hooks(self, *, recurrent: bool) -> Hooks:
        """Return none: SGLang counts such a pool right."""
        return {}

    def pools(self, target: MemoryPoolConfig | None, requests: ReqToTokenPool | None, device: str) -> Pools:
        """Return the target's sizes and table."""
        return target, requests

    def slots(self, target: ModelRunner, draft: ModelRunner) -> SharedSlots:
        """Return the target's slots, and have the draft's K/V follow the target's to the host."""
        if self.offloads:
            copy_along(target.token_to_kv_pool_allocator, draft.token_to_kv_pool)
        return SharedSlots()

    def gauges(self, requests: ReqToTokenPool) -> Gauges:
        """Return none."""
        return {}


def copy_along(allocator: Any, pool: KVCache) -> None:
    """Copy the draft's K/V in the same slots wherever SGLang copies the target's to the host and back."""
    back_up, restore = allocator.get_cpu_copy, allocator.load_cpu_copy

    def get_cpu_copy(indices: torch.Tensor, **state: Any) -> tuple[Any, Any]:
        return back_up(indices, **state), pool.get_cpu_copy(indices)

    def load_cpu_copy(copies: tuple[Any, Any], indices: torch.Tensor, **state: Any) -> None:
        restore(copies[0], indices, **state)
        pool.load_cpu_copy(copies[1], indices)

    allocator.get_cpu_copy, allocator.load_cpu_copy = get_cpu_copy, load_cpu_copy


class Rings:
    """A ring buffer of slots for each request."""

    def __init__(self, window: int, widest: int) -> None:
        self.window, self.widest = window, widest

    @property
    def size(self) -> int:
        """Return the slots of a request's ring, once the server's arguments are resolved."""
        return ring_slots(self.window, self.widest, get_schedule().page_size)

    def hooks(self, *, recurrent: bool) -> Hooks:
        """Return hooks that take rings off the target's memory and leave the end of a prompt to be read."""
        hooks: Hooks = {
            "kv_bytes": (self.available_bytes, HookType.AROUND),
            "kv_bytes_per_token": (target_alone, HookType.AROUND),
        }
        return hooks if recurrent else hooks | {"longest_hit": (leave_the_end, HookType.AFTER)}

    def pools(self, target: MemoryPoolConfig | None, requests: ReqToTokenPool | None, device: str) -> Pools:
        """Return a ring for each row of the request table, the padding row 0 included.

        A row lists what a block sees, at most its ring, whatever the context.
        """
        assert target is not None, "the target's pools are made first"
        assert target.max_running_requests is not None, "SGLang decides it with the target's pool"
        pool = dataclasses.replace(target, max_total_num_tokens=(target.max_running_requests + 1) * self.size)
        table = ReqToTokenPool(
            size=target.max_running_requests,
            max_context_len=self.size,
            device=device,
            enable_memory_saver=get_exec().features.enable_memory_saver,
        )
        return pool, table

    def slots(self, target: ModelRunner, draft: ModelRunner) -> RingSlots:
        """Return the kind of rings that the draft's attention backend can plan with."""
        return rings_for(draft)(target, draft, size=self.size, window=self.window, widest=self.widest)

    def gauges(self, requests: ReqToTokenPool) -> Gauges:
        """Return how many rings are in use."""
        return {"rings": (requests.size, lambda: requests.size - requests.available_size())}

    def available_bytes(
        self, stock: Callable[[Any, float], int], configurator: Any, pre_model_load_memory: float
    ) -> int:
        """AROUND `KVCacheConfigurator._profile_available_bytes`: return the bytes left beside the rings, on this rank.

        Raises:
            NotSupported: SGLang does not know the bytes of a slot.
        """
        available = stock(configurator, pre_model_load_memory)
        slot_bytes = configurator.dflash_draft_cell_size_per_token
        if slot_bytes is None:
            raise NotSupported(
                "SGLang could not say how many bytes a slot of the draft's KV takes (see its warning above), and a "
                "draft with a window needs to know; drop --speculative-draft-window-size"
            )
        ring, n_requests = self.size, get_schedule().max_running_requests
        if configurator.mambaish_config is not None:
            n_requests = min(n_requests, get_schedule().max_mamba_cache_size // configurator._calculate_mamba_ratio())
        rings = (n_requests + 1) * ring * slot_bytes
        logger.info(
            "draft KV: a ring of %d slots, %.2f MiB per request, %.2f MiB in all",
            *(ring, ring * slot_bytes / 2**20, rings / 2**20),
        )
        return available - rings


def target_alone(stock: Callable[..., int], *, target_cell_size_per_token: int, **draft: Any) -> int:
    """AROUND `scale_kv_cell_size_per_token_for_dflash`: count the bytes of the target's pool only, per token."""
    return target_cell_size_per_token


def leave_the_end(longest: int, request: Any, input_len: int) -> int:
    """AFTER `Req._compute_max_prefix_len`: how long a hit may be.

    A hit fills nothing of the draft's ring: its window begins with the tokens that are read. After another question
    that is context enough. Where next to nothing is new (the same prompt again, n > 1, a request that was retracted),
    drafts fail for some thirty tokens (the log has the measurement). So the end of a prompt is always read: an
    attention-only target takes hardly longer for 64 tokens than for one. A recurrent target resumes from checkpoints,
    which may be far between or missing, and what lies behind the last one is read anyway: a hit is left as it is there.
    """
    return max(min(longest, input_len - READ_AGAIN), 0)


def fit_page_tables(draft_runner: ModelRunner) -> None:
    """Make the page tables of attention backends as wide as a row of the draft's request table.

    Backends take the context length for that width. A block may end 2 N past the target's context, and a ring is far
    shorter than it.
    """
    draft_runner.model_config.context_len = draft_runner.req_to_token_pool.req_to_token.shape[1]
