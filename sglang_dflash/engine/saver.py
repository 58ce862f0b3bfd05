"""Regions of SGLang's memory saver (`--enable-memory-saver`) for tensors that this package allocates itself.

`/release_memory_occupation` gives the memory of a region back to the GPU. `/resume_memory_occupation` maps memory at
the same addresses again, so captured graphs stay valid. SGLang loads models and allocates KV caches inside regions.
Larger tensors that this package allocates later need a region too. Otherwise their memory would never be given back.

Tensors outside all regions keep their values. Small ones stay outside, such as addresses, row numbers and counts.
"""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext
from typing import Any

from sglang.srt.constants import GPU_MEMORY_ALL_TYPES, GPU_MEMORY_TYPE_KV_CACHE, GPU_MEMORY_TYPE_WEIGHTS
from sglang.srt.runtime_context import get_context, get_exec
from sglang.srt.utils.torch_memory_saver_adapter import TorchMemorySaverAdapter


def is_on() -> bool:
    """Return whether this process is a server with `--enable-memory-saver`."""
    return get_context().is_config_namespace_published("exec") and get_exec().features.enable_memory_saver


def weights() -> AbstractContextManager[None]:
    """Return a context whose allocations are released with the weights, and restored from a copy on the host.

    Allocate no temporary tensors inside it: their memory stays in the region.
    """
    return _region(GPU_MEMORY_TYPE_WEIGHTS, restored=True)


def kv_cache() -> AbstractContextManager[None]:
    """Return a context whose allocations are released with the KV cache. Their values are undefined after a resume.

    SGLang releases the KV cache only while no request runs, and drops all cached prefixes then.
    """
    return _region(GPU_MEMORY_TYPE_KV_CACHE, restored=False)


def _region(tag: str, *, restored: bool) -> AbstractContextManager[None]:
    if not is_on():
        return nullcontext()
    return TorchMemorySaverAdapter.create(enable=True).region(tag, enable_cpu_backup=restored)


def clear_padding(result: Any, manager: Any, request: Any) -> Any:
    """Let the padding row of the request tables refer to the padding KV slot again, after the KV cache was resumed.

    A captured graph reads this row for the dummy requests that pad its batch. SGLang writes the row only at the start,
    so after a resume it may contain KV slots that do not exist.

    Hook after `SchedulerWeightUpdaterManager.resume_memory_occupation`.
    """
    if GPU_MEMORY_TYPE_KV_CACHE in (request.tags or GPU_MEMORY_ALL_TYPES):
        for runner in (manager.tp_worker.model_runner, manager.draft_worker.draft_runner):
            runner.req_to_token_pool.req_to_token[0] = 0
    return result
