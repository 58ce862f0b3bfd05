"""Memory of the draft's context K/V, and its accounting in SGLang, of one of two kinds.

Shared   a slot for each of the target's slots, as SGLang allocates and counts it
Rings    with a sliding window: a ring buffer of slots per request, sized by window and block. Rings are counted per
         request, and the target's pool gets the remaining memory
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

READ_AGAIN = 64  # tokens at the end of a prompt that are always read, even if they are in the prefix cache

Hooks = dict[str, tuple[Callable[..., Any], HookType]]  # by hook names of `host/sglang-0.5.23.txt`
Pools = tuple[MemoryPoolConfig | None, ReqToTokenPool | None]
Gauges = dict[str, tuple[int, Callable[[], int]]]  # by pool: its size, and the amount that requests hold


class DraftKV(Protocol):
    """Storage of the draft's context K/V."""

    def hooks(self, *, recurrent: bool) -> Hooks:
        """Return hooks on what SGLang counts; `recurrent`: the target has recurrent layers."""

    def pools(self, target: MemoryPoolConfig | None, requests: ReqToTokenPool | None, device: str) -> Pools:
        """Return the draft's pool configuration and request table, derived from the target's."""

    def slots(self, target: ModelRunner, draft: ModelRunner) -> DraftSlots:
        """Return the draft's slots. Call this after pools and attention backends are created."""

    def gauges(self, requests: ReqToTokenPool) -> Gauges:
        """Return pool sizes and functions for fill levels, for metrics."""


def draft_kv(window: int | None, widest: int, disaggregation: str) -> DraftKV:
    """Return the kind of memory for the draft's context K/V.

    Args:
        window: context tokens that the draft keeps; None: all.
        widest: the most tokens of a request that a step writes.
        disaggregation: `--disaggregation-mode`.
    """
    return Shared(offloads=disaggregation == "decode") if window is None else Rings(window, widest)


class Shared:
    """Storage with a slot for each of the target's slots."""

    def __init__(self, *, offloads: bool) -> None:
        """`offloads`: SGLang copies K/V of retracted requests to the host, as on a decode server."""
        self.offloads = offloads

    def hooks(self, *, recurrent: bool) -> Hooks:
        """Return no hooks, because SGLang counts such a pool."""
        return {}

    def pools(self, target: MemoryPoolConfig | None, requests: ReqToTokenPool | None, device: str) -> Pools:
        return target, requests

    def slots(self, target: ModelRunner, draft: ModelRunner) -> SharedSlots:
        """Return the target's slots. With `offloads`, the draft's K/V will be copied with the target's."""
        if self.offloads:
            copy_along(target.token_to_kv_pool_allocator, draft.token_to_kv_pool)
        return SharedSlots()

    def gauges(self, requests: ReqToTokenPool) -> Gauges:
        return {}


def copy_along(allocator: Any, pool: KVCache) -> None:
    """Wrap SGLang's copies of K/V to the host and back to include the draft's K/V of the same slots."""
    back_up, restore = allocator.get_cpu_copy, allocator.load_cpu_copy

    def get_cpu_copy(indices: torch.Tensor, **state: Any) -> tuple[Any, Any]:
        return back_up(indices, **state), pool.get_cpu_copy(indices)

    def load_cpu_copy(copies: tuple[Any, Any], indices: torch.Tensor, **state: Any) -> None:
        restore(copies[0], indices, **state)
        pool.load_cpu_copy(copies[1], indices)

    allocator.get_cpu_copy, allocator.load_cpu_copy = get_cpu_copy, load_cpu_copy


class Rings:
    """Storage with a ring buffer of slots for each request."""

    def __init__(self, window: int, widest: int) -> None:
        self.window, self.widest = window, widest

    @property
    def size(self) -> int:
        """Return the number of slots per ring. Valid only after SGLang has resolved its arguments."""
        return ring_slots(self.window, self.widest, get_schedule().page_size)

    def hooks(self, *, recurrent: bool) -> Hooks:
        """Return hooks that subtract rings from the target's memory, and that make SGLang read the end of prompts."""
        hooks: Hooks = {
            "kv_bytes": (self.available_bytes, HookType.AROUND),
            "kv_bytes_per_token": (target_alone, HookType.AROUND),
        }
        return hooks if recurrent else hooks | {"longest_hit": (leave_the_end, HookType.AFTER)}

    def pools(self, target: MemoryPoolConfig | None, requests: ReqToTokenPool | None, device: str) -> Pools:
        """Return the configuration of a pool with a ring per request-table row, padding row 0 included, and a table.

        A table row lists the slots that a block attends to, at most a ring for any context length.
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
        """Return ring slots of the kind that the draft's attention backend needs."""
        return rings_for(draft)(target, draft, size=self.size, window=self.window, widest=self.widest)

    def gauges(self, requests: ReqToTokenPool) -> Gauges:
        """Return the number of rings, and a function that counts those in use."""
        return {"rings": (requests.size, lambda: requests.size - requests.available_size())}

    def available_bytes(
        self, stock: Callable[[Any, float], int], configurator: Any, pre_model_load_memory: float
    ) -> int:
        """Return this rank's available bytes minus the rings. AROUND `KVCacheConfigurator._profile_available_bytes`.

        Raises:
            NotSupported: SGLang cannot compute the bytes of a slot of the draft.
        """
        available = stock(configurator, pre_model_load_memory)
        slot_bytes = configurator.dflash_draft_cell_size_per_token
        if slot_bytes is None:
            raise NotSupported(
                "SGLang has no size for a slot of the draft's KV (see its warning above), and a draft window needs it; "
                "drop --speculative-draft-window-size"
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
    """Return the bytes per token of the target's pool only. AROUND `scale_kv_cell_size_per_token_for_dflash`."""
    return target_cell_size_per_token


def leave_the_end(longest: int, request: Any, input_len: int) -> int:
    """Return the longest allowed prefix hit, in tokens. AFTER `Req._compute_max_prefix_len`.

    A prefix hit fills no slot of the draft's ring, whose window begins with the tokens that are read. A new question is
    enough context. If almost nothing is new (a repeated prompt, n > 1, a retracted request), drafts fail for about
    thirty tokens (measured, see the log). So the end of a prompt is always read. An attention-only target takes hardly
    longer for 64 tokens than for one.

    Recurrent targets do not have this hook. They resume from checkpoints, which may be sparse or missing, and read the
    tokens after the last checkpoint anyway.
    """
    return max(min(longest, input_len - READ_AGAIN), 0)


def fit_page_tables(draft_runner: ModelRunner) -> None:
    """Make the page tables of attention backends as wide as a row of the draft's request table.

    By default backends use the context length. But a block may end 2 N past the target's context, and a ring is much
    shorter.
    """
    draft_runner.model_config.context_len = draft_runner.req_to_token_pool.req_to_token.shape[1]
