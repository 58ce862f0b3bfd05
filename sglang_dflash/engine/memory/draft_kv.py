"""Memory of the draft's context K/V, and hooks that make SGLang count this memory. There are two kinds:

Shared   A KV slot for each of the target's KV slots. SGLang allocates and counts this memory itself.
Rings    For a draft with a sliding window: a ring buffer of KV slots per request (`sizes.ring_slots`). Memory for all
         ring buffers is reserved, and the target's pool gets the remaining memory.
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

from sglang_dflash.engine.memory.sizes import ring_slots
from sglang_dflash.engine.memory.slots import DraftSlots, RingSlots, SharedSlots, rings_for
from sglang_dflash.errors import STOCK, NotSupported

logger = logging.getLogger(__name__)

READ_AGAIN = 64  # last input tokens that `leave_the_end` lets the target read again, despite a prefix cache hit

Hooks = dict[str, tuple[Callable[..., Any], HookType]]  # by hook names of `host/sglang-0.5.23.txt`
Pools = tuple[MemoryPoolConfig | None, ReqToTokenPool | None]
Gauges = dict[str, tuple[int, Callable[[], int]]]  # pool name -> size of the pool, and function for the number in use


class DraftKV(Protocol):
    """Storage of the draft's context K/V."""

    def hooks(self, *, recurrent: bool) -> Hooks:
        """Return hooks that make SGLang count this memory. With ring buffers, a hook also limits prefix cache hits.

        Args:
            recurrent: the target has recurrent layers, so hits are not limited, see `leave_the_end`.
        """

    def pools(self, target: MemoryPoolConfig | None, requests: ReqToTokenPool | None, device: str) -> Pools:
        """Return the draft's pool configuration and request table, derived from the target's."""

    def slots(self, target: ModelRunner, draft: ModelRunner) -> DraftSlots:
        """Return the finder of the draft's KV slots. Call this after pools and attention backends are created."""

    def gauges(self, requests: ReqToTokenPool) -> Gauges:
        """Return metrics: for each pool's name, its size and a function that returns the number in use."""


def draft_kv(window: int | None, widest: int, disaggregation: str) -> DraftKV:
    """Return the kind of memory for the draft's context K/V.

    Args:
        window: number of context tokens that the draft keeps; None: all.
        widest: largest number of tokens per request whose K/V a step writes.
        disaggregation: value of `--disaggregation-mode`.
    """
    return Shared(offloads=disaggregation == "decode") if window is None else Rings(window, widest)


class Shared:
    """Storage with a KV slot for each of the target's KV slots."""

    def __init__(self, *, offloads: bool) -> None:
        """`offloads`: SGLang copies K/V of retracted requests to the host, as on a decode server."""
        self.offloads = offloads

    def hooks(self, *, recurrent: bool) -> Hooks:
        """Return no hooks, because SGLang counts this memory itself."""
        return {}

    def pools(self, target: MemoryPoolConfig | None, requests: ReqToTokenPool | None, device: str) -> Pools:
        return target, requests

    def slots(self, target: ModelRunner, draft: ModelRunner) -> SharedSlots:
        """Return the target's KV slots. With `offloads`, also make SGLang copy the draft's K/V with the target's."""
        if self.offloads:
            copy_along(target.token_to_kv_pool_allocator, draft.token_to_kv_pool)
        return SharedSlots()

    def gauges(self, requests: ReqToTokenPool) -> Gauges:
        return {}


def copy_along(allocator: Any, pool: KVCache) -> None:
    """Wrap SGLang's copies of K/V to the host and back to include the draft's K/V in the same KV slots."""
    back_up, restore = allocator.get_cpu_copy, allocator.load_cpu_copy

    def get_cpu_copy(indices: torch.Tensor, **state: Any) -> tuple[Any, Any]:
        return back_up(indices, **state), pool.get_cpu_copy(indices)

    def load_cpu_copy(copies: tuple[Any, Any], indices: torch.Tensor, **state: Any) -> None:
        restore(copies[0], indices, **state)
        pool.load_cpu_copy(copies[1], indices)

    allocator.get_cpu_copy, allocator.load_cpu_copy = get_cpu_copy, load_cpu_copy


class Rings:
    """Storage with a ring buffer of KV slots for each request."""

    def __init__(self, window: int, widest: int) -> None:
        self.window, self.widest = window, widest

    @property
    def size(self) -> int:
        """Return the number of KV slots per ring. Valid only after SGLang has resolved its arguments."""
        return ring_slots(self.window, self.widest, get_schedule().page_size)

    def hooks(self, *, recurrent: bool) -> Hooks:
        """Return hooks that subtract the rings' bytes from the target's memory.

        For targets without recurrent layers, one more hook makes SGLang always prefill the end of a prompt, even if the
        prefix cache has it.
        """
        hooks: Hooks = {
            "kv_bytes": (self.available_bytes, HookType.AROUND),
            "kv_bytes_per_token": (target_alone, HookType.AROUND),
        }
        return hooks if recurrent else hooks | {"longest_hit": (leave_the_end, HookType.AFTER)}

    def pools(self, target: MemoryPoolConfig | None, requests: ReqToTokenPool | None, device: str) -> Pools:
        """Return the draft's pool configuration and request table.

        The pool has a ring for each request, and a ring for padding. A row of this request table lists the KV slots
        that a block of the request attends to. For any context length these are at most the KV slots of a ring.
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
        """Return the number of rings, and a function that returns the number of rings in use."""
        return {"rings": (requests.size, lambda: requests.size - requests.available_size())}

    def available_bytes(
        self, stock: Callable[[Any, float], int], configurator: Any, pre_model_load_memory: float
    ) -> int:
        """Return this rank's bytes for pools, minus the bytes of all rings.

        Hook around `KVCacheConfigurator._profile_available_bytes`.

        Raises:
            NotSupported: SGLang cannot compute the bytes of one KV slot of the draft.
            ValueError: the rings take all of the memory.
        """
        available = stock(configurator, pre_model_load_memory)
        slot_bytes = configurator.dflash_draft_cell_size_per_token
        if slot_bytes is None:
            raise NotSupported(
                "SGLang could not compute the size of a KV slot of the draft (see its warning above), which the "
                f"draft's ring buffers need; {STOCK}, or drop --speculative-draft-window-size if only this flag sets a "
                "window"
            )
        ring, n_requests = self.size, max(1, get_schedule().max_running_requests // configurator.attn_dp_size)
        if configurator.mambaish_config is not None:
            n_requests = min(n_requests, get_schedule().max_mamba_cache_size // configurator._calculate_mamba_ratio())
        rings = (n_requests + 1) * ring * slot_bytes
        logger.info(
            "draft KV: a ring of %d slots, %.2f MiB per request, %.2f MiB in all",
            *(ring, ring * slot_bytes / 2**20, rings / 2**20),
        )
        if rings >= available:
            raise ValueError(
                f"the draft's ring buffers for {n_requests} requests take {rings / 2**30:.1f} GiB, and "
                f"--mem-fraction-static leaves {available / 2**30:.1f} GiB for them and the target's K/V; raise it, "
                "or lower --max-running-requests or the draft window"
            )
        return available - rings


def target_alone(stock: Callable[..., int], *, target_cell_size_per_token: int, **draft: Any) -> int:
    """Return the bytes per token of the target's pool only. Hook around `scale_kv_cell_size_per_token_for_dflash`."""
    return target_cell_size_per_token


def leave_the_end(longest: int, request: Any, input_len: int) -> int:
    """Return the largest number of tokens that the prefix cache may provide.

    With this limit at least the last `READ_AGAIN` tokens of the input are read. The draft's ring buffer only contains
    context K/V of tokens that the target reads, and none of a cached prefix. Without the limit, a repeated prompt,
    n > 1 or a retracted request might read only a few tokens. Then the first answer tokens would have a lower
    acceptance length than after a full prefill (measured, see docs/tuning.md). An attention-only target takes hardly
    longer for 64 tokens than for one.

    Hook after `Req._compute_max_prefix_len`, not set for recurrent targets. Such targets resume from saved states,
    which may be far apart or missing, and always read the tokens after the last saved state.
    """
    return max(min(longest, input_len - READ_AGAIN), 0)


def fit_page_tables(draft_runner: ModelRunner) -> None:
    """Set the width of page tables in attention backends to the length of a row of the draft's request table.

    By default the width is the context length. For shared KV slots this is too small, because positions may be as far
    as two widest verifies past the target's context. For a ring it is much too large.
    """
    draft_runner.model_config.context_len = draft_runner.req_to_token_pool.req_to_token.shape[1]
