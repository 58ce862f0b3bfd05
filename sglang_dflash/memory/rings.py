"""The memory of the draft's context K/V, when it is a ring per request, and how SGLang counts it.

SGLang gives the draft's pool a slot for each of the target's, window or not, and counts its bytes with every token. The
size of a ring follows from window and block: rings are counted per request, and the target's pool gets the rest.
"""

from __future__ import annotations

import dataclasses
import logging
from collections.abc import Callable
from typing import Any

from sglang.srt.mem_cache.memory_pool import ReqToTokenPool
from sglang.srt.model_executor.model_runner import ModelRunner
from sglang.srt.model_executor.pool_configurator import MemoryPoolConfig
from sglang.srt.runtime_context import get_exec, get_schedule

from sglang_dflash.errors import NotSupported
from sglang_dflash.memory.sizes import ring_slots

logger = logging.getLogger(__name__)

READ_AGAIN = 64  # tokens at the end of a prompt that are read although they are in the prefix cache


def ring_of(window: int, block_size: int) -> int:
    """Slots of a request's ring, on a server whose arguments are resolved."""
    return ring_slots(window, block_size, get_schedule().page_size)


def ring_pool(target: MemoryPoolConfig, ring: int) -> MemoryPoolConfig:
    """The draft's pool: a ring for each row of the request table, the padding row 0 included."""
    assert target.max_running_requests is not None, "SGLang decides it with the target's pool"
    return dataclasses.replace(target, max_total_num_tokens=(target.max_running_requests + 1) * ring)


def ring_table(target: MemoryPoolConfig, ring: int, device: str) -> ReqToTokenPool:
    """The draft's request table. A row lists what a block sees, at most its ring, whatever the context."""
    return ReqToTokenPool(
        size=target.max_running_requests,
        max_context_len=ring,
        device=device,
        enable_memory_saver=get_exec().features.enable_memory_saver,
    )


def fit_page_tables(draft_runner: ModelRunner) -> None:
    """Attention backends take the context length for the width of their page tables: give them a row of the draft's
    request table instead. A block may end 2 N past the target's context, and a ring is far shorter than it."""
    draft_runner.model_config.context_len = draft_runner.req_to_token_pool.req_to_token.shape[1]


def target_alone(stock: Callable[..., int], *, target_cell_size_per_token: int, **draft: Any) -> int:
    """AROUND `scale_kv_cell_size_per_token_for_dflash`: a token takes bytes of the target's pool only."""
    return target_cell_size_per_token


def leave_room(window: int, block_size: int) -> Callable[[Callable[[Any, float], int], Any, float], int]:
    """AROUND `KVCacheConfigurator._profile_available_bytes`: bytes that are left beside the rings, on this rank.

    What it returns raises NotSupported where SGLang does not know the bytes of a slot.
    """

    def available_bytes(stock: Callable[[Any, float], int], configurator: Any, pre_model_load_memory: float) -> int:
        available = stock(configurator, pre_model_load_memory)
        slot_bytes = configurator.dflash_draft_cell_size_per_token
        if slot_bytes is None:
            raise NotSupported(
                "SGLang could not say how many bytes a slot of the draft's KV takes (see its warning above), and a "
                "draft with a window needs to know; drop --speculative-draft-window-size"
            )
        ring, n_requests = ring_of(window, block_size), get_schedule().max_running_requests
        if configurator.mambaish_config is not None:
            n_requests = min(n_requests, get_schedule().max_mamba_cache_size // configurator._calculate_mamba_ratio())
        rings = (n_requests + 1) * ring * slot_bytes
        logger.info(
            "draft KV: a ring of %d slots, %.2f MiB per request, %.2f MiB in all",
            *(ring, ring * slot_bytes / 2**20, rings / 2**20),
        )
        return available - rings

    return available_bytes


def leave_the_end(longest: int, request: Any, input_len: int) -> int:
    """AFTER `Req._compute_max_prefix_len`: how long a hit may be.

    A hit fills nothing of the draft's ring: its window begins with the tokens that are read. After another question
    that is context enough. Where next to nothing is new (the same prompt again, n > 1, a request that was retracted),
    drafts fail for some thirty tokens; launch/measure_hits.py has the curves. So the end of a prompt is always read: an
    attention-only target takes hardly longer for 64 tokens than for one. A recurrent target resumes from checkpoints,
    which may be far between or missing, and what lies behind the last one is read anyway: a hit is left as it is there.
    """
    return max(min(longest, input_len - READ_AGAIN), 0)
