"""Memory of recurrent layers (Gated DeltaNet) for a request's block, and the hook by which SGLang counts it.

For each token of a request's block, SGLang stores a state of H V K values per layer. With Qwen3.5-27B and a block of
16 this takes 2.25 GiB per request. `FoldState` needs a record per token instead, H V + G K + H values per layer
(`kernels/gdn_verify.py`). `sizes.py` explains the letters. In both cases the inputs of the causal convolution are
stored in addition.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import Any, cast

import torch
from sglang.srt.configs.mamba_utils import BaseLinearStateParams
from sglang.srt.constants import GPU_MEMORY_TYPE_KV_CACHE
from sglang.srt.mem_cache.memory_pool import HybridReqToTokenPool, MambaPool
from sglang.srt.runtime_context import get_spec
from sglang.srt.utils.common import get_cuda_graph_max_batch_size
from sglang_dflash_kernels.record import record_width

from sglang_dflash.engine.memory import sizes

logger = logging.getLogger(__name__)


def block_bytes(params: BaseLinearStateParams, n_tokens: int) -> int:
    """Return this rank's bytes for one request's block of `n_tokens`, without the request's persistent states."""
    return sizes.block_bytes(
        n_tokens,
        n_layers=len(params.layers),
        record_values=record_values(params),
        conv_shapes=params.shape.conv,
        conv_itemsize=params.dtype.conv.itemsize,
    )


def snapshot_bytes(params: BaseLinearStateParams, n_tokens: int) -> int:
    """Return this rank's bytes for one request's block in SGLang's layout, with a state per token."""
    return params.mamba_cache_per_req * n_tokens


def record_values(params: BaseLinearStateParams) -> int:
    """Return the number of fp32 values that a layer records per token."""
    H, V, K = params.shape.temporal
    return record_width(H, V, params.shape.num_k_heads_per_tp, K)


class RecordPool(MambaPool):
    """SGLang's pool of recurrent states, with a record instead of a state for each token of a block.

    The convolution's inputs before and in a block form a strip [tokens, channels]. The window after a token is a view
    of a few tokens. SGLang's own strips are [channels, tokens]. SGLang's convolution writes a window for many channels
    at once. In its own layout these values are not contiguous, so it writes 2 bytes at a time.
    """

    def __init__(
        self,
        *,
        spec_state_size: int,
        cache_params: BaseLinearStateParams,
        mamba_layer_ids: list[int],
        device: str,
        speculative_num_draft_tokens: int,
        **others: Any,
    ) -> None:
        super().__init__(
            spec_state_size=spec_state_size,
            cache_params=cache_params,
            mamba_layer_ids=mamba_layer_ids,
            device=device,
            speculative_num_draft_tokens=None,  # allocates only the persistent states
            **others,
        )
        shape = cache_params.shape
        n_layers, n_tokens = len(mamba_layer_ids), speculative_num_draft_tokens
        # SGLang may round up the size of captured batches to a multiple of the number of ranks. The size may then
        # exceed the largest number of requests.
        n_rows = max(spec_state_size + 1, get_cuda_graph_max_batch_size(spec_state_size))
        with self.memory_saver_adapter.region(GPU_MEMORY_TYPE_KV_CACHE):
            record_LRNX = torch.zeros(n_layers, n_rows, n_tokens, record_values(cache_params), device=device)
            strips = [
                torch.zeros(
                    *(n_layers, spec_state_size + 1, n_tokens + n_kept - 1, n_channels),
                    dtype=cache_params.dtype.conv,
                    device=device,
                )
                for n_channels, n_kept in shape.conv
            ]
        windows = [strip.unfold(2, n_kept, 1) for strip, (_, n_kept) in zip(strips, shape.conv, strict=True)]
        self._intermediate_conv_window_phys = strips
        persistent = cast(MambaPool.State, vars(self)["mamba_cache"])
        self.mamba_cache = self.SpeculativeState(
            **vars(persistent), intermediate_ssm=record_LRNX, intermediate_conv_window=windows
        )
        self.n_key_heads = shape.num_k_heads_per_tp
        self.block_bytes = record_LRNX.nbytes + sum(strip.nbytes for strip in strips)
        self.mem_usage += self.block_bytes / 2**30
        logger.info(
            "recurrent state: %.2f MiB per request and block of %d, %.2f MiB in all (a state per token would take "
            "%.2f MiB and %.2f MiB)",
            *(self.block_bytes / n_rows / 2**20, n_tokens, self.block_bytes / 2**20),
            *(snapshot_bytes(cache_params, n_tokens) * rows / 2**20 for rows in (1, n_rows)),
        )


def use_records() -> None:
    """Make SGLang create `RecordPool`s. Call this before SGLang creates its memory pools."""
    HybridReqToTokenPool.mamba_pool_cls = RecordPool


def count_records(stock: Callable[[Any, float], float], configurator: Any, rest_gib: float) -> float:
    """Return the GiB left for KV after states and records. Hook around `KVCacheConfigurator._handle_max_mamba_cache`.

    SGLang counts N states per request for a block of N tokens. While SGLang computes, N is replaced by the bytes of a
    block in `RecordPool` divided by the bytes of a state. So SGLang counts the bytes that `RecordPool` allocates.
    """
    if HybridReqToTokenPool.mamba_pool_cls is not RecordPool:
        return stock(configurator, rest_gib)
    params = configurator.mambaish_config.mamba2_cache_params
    n_tokens = get_spec().speculative_num_draft_tokens
    with get_spec().override(speculative_num_draft_tokens=block_bytes(params, n_tokens) / params.mamba_cache_per_req):
        return stock(configurator, rest_gib)
