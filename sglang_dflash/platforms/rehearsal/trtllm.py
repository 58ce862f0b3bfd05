"""Definitions of the kernels of FlashInfer's TensorRT-LLM entry points. FlashInfer's Python runs unchanged.

On sm90 the kernel XQA decodes and verifies (with a bit mask for the block), and fmha v2 reads prompts. On sm100
trtllm-gen decodes, verifies and reads prompts. These kernels take a page table's width for its row stride.

Dimension key: as in `attention.py`.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch

from sglang_dflash.platforms.rehearsal import graph
from sglang_dflash.platforms.rehearsal.attention import Mask, Paged, Score, attend, pages_of, refuse, require_int32

PAGE_SIZES = (16, 32, 64, 128)  # supported by XQA and trtllm-gen; 128 only with grouped queries
USED = 4096  # number of bytes at a workspace's start that the emulation checks or overwrites


def require_zeros(what: str, buffer: torch.Tensor) -> None:
    assert not buffer.view(-1).view(torch.uint8)[:USED].any(), f"{what} must be zero at every launch, and was written"


def scribble(workspace: torch.Tensor) -> None:
    """Overwrite a workspace: after a launch its content is undefined, and no code may depend on it."""
    workspace.view(-1).view(torch.uint8)[:USED] = 0xFF


def require_table(table: torch.Tensor, n_requests: int, page_size: int) -> None:
    require_int32(page_table=table)
    assert table.is_contiguous(), f"a page table with strides {table.stride()}: the kernel takes its width for a stride"
    assert table.shape[0] == n_requests, f"{table.shape[0]} rows of pages for {n_requests} requests"
    assert page_size in PAGE_SIZES, f"{page_size} tokens a page, the kernels have {PAGE_SIZES}"


def require_window(window_left: int) -> None:
    assert window_left != 0, "window_left is 0: some kernels take this for a window of one token, others for none"


def require_fp32_sinks(sinks: torch.Tensor | None) -> None:
    assert sinks is None or sinks.dtype == torch.float32, f"sinks of {sinks.dtype}, the kernel reads fp32"


class DraftMask(NamedTuple):
    """Bit mask of the last N keys for each of N queries."""

    bits_BNW: torch.Tensor  # uint16, W words of 16 keys per query

    def allowed(self, b: int, n_keys: int) -> torch.Tensor:
        """Return the mask, bool [N, L]: all keys before the block, and the keys of the block whose bits are set."""
        N = self.bits_BNW.shape[1]
        bits_NW16 = self.bits_BNW[b].to(torch.int32)[..., None] >> torch.arange(16)
        allowed_NL = torch.ones(N, n_keys, dtype=torch.bool)
        allowed_NL[:, n_keys - N :] = (bits_NW16 & 1).bool().flatten(1)[:, :N]
        return allowed_NL


@graph.launch
def xqa(
    fp8: bool,
    n_processors: int,
    n_kv_heads: int,
    window: int,
    q_scale: float,
    out: torch.Tensor,
    rcp_out_scale: float,
    q: torch.Tensor,
    sinks: torch.Tensor | None,
    k_cache: torch.Tensor,
    v_cache: torch.Tensor,
    k_scales: torch.Tensor | None,
    v_scales: torch.Tensor | None,
    page_table: torch.Tensor,
    max_keys: int,
    n_keys_B1: torch.Tensor,
    n_requests: int,
    kv_scale: float,
    semaphores: torch.Tensor,
    workspace: torch.Tensor,
    pdl: bool,
    n_queries: int,
    first_query_B1: torch.Tensor | None,
    mask: torch.Tensor | None,
) -> None:
    """Emulate XQA.

    `q` and `out` are [B, 1, A, E], or [B, 1, N, A, E] with a mask. The caches are [pages, page size, G, E]. If `window`
    is 0, there is no window.
    """
    assert not fp8, "fp8 keys and values are not defined in the rehearsal; run this on a GPU"
    assert first_query_B1 is None, "different numbers of queries are not defined in the rehearsal; run this on a GPU"
    require_zeros("XQA's semaphores", semaphores)
    scribble(workspace)
    page_size, n_pages = k_cache.shape[1], len(k_cache)
    require_table(page_table, n_requests, page_size)
    require_int32(seq_lens=n_keys_B1)
    draft = None
    if n_queries > 1:
        assert mask is not None, f"{n_queries} queries a request need a mask"
        assert mask.dtype == torch.uint16, f"a mask of {mask.dtype}, the kernel reads uint16"
        shape = (n_requests, n_queries, -(-n_queries // 32) * 2)
        assert mask.shape == shape, f"a mask of {tuple(mask.shape)}, the kernel reads {shape}"
        assert mask.is_contiguous(), "the mask's rows must be contiguous"
        draft = DraftMask(mask)
    q_BNAE = q.view(n_requests, n_queries, *q.shape[-2:])
    out_BNAE = out.view(q_BNAE.shape)
    scale = q_scale * kv_scale / q.shape[-1] ** 0.5
    require_fp32_sinks(sinks)
    score = Score(scale, sinks_A=None if sinks is None else sinks.flatten())
    for b, n_keys in enumerate(n_keys_B1.flatten().tolist()):
        assert n_queries <= n_keys <= max_keys, f"request {b} has {n_keys} keys, not {n_queries} to {max_keys}"
        pages = pages_of(page_table[b], n_keys, page_size, n_pages)
        k, v = (cache.index_select(0, pages).flatten(0, 1)[:n_keys] for cache in (k_cache, v_cache))
        allowed = Mask(causal=n_queries == 1, left=window - 1).allowed(n_queries, n_keys)
        if draft is not None:
            allowed &= draft.allowed(b, n_keys)
        out_BNAE[b] = attend(q_BNAE[b], k, v, allowed, score)[0] * (kv_scale * rcp_out_scale)


class TrtllmGen:
    """Emulation of `get_trtllm_gen_fmha_module`'s module. Caches are [pages, G, page size, E]."""

    @graph.launch
    def trtllm_paged_attention_decode(
        self,
        out: torch.Tensor,
        out_scales: torch.Tensor | None,
        q: torch.Tensor,
        k_cache: torch.Tensor,
        v_cache: torch.Tensor,
        workspace: torch.Tensor,
        counters: torch.Tensor,
        page_table: torch.Tensor,
        n_keys_B: torch.Tensor,
        max_queries: int,
        max_keys: int,
        scale: float,
        v_scale: float,
        o_sf_scale: float,
        o_sf_vec_size: int,
        o_sf_start_index: int,
        n_requests: int,
        window_left: int,
        top_k: int,
        n_processors: int,
        pdl: bool,
        workspace_bytes: int,
        sinks: torch.Tensor | None,
        first_query_B1: torch.Tensor | None,
        *others: Any,
    ) -> None:
        """Write causal attention to `out` [T, A, E]. Without `first_query_B1` a request has `max_queries` queries.

        q [T, A, E], page_table int32 [B, P], n_keys_B int32, first_query_B1 int32 [B + 1].
        """
        require_zeros("trtllm-gen's counters", counters)
        if first_query_B1 is None:
            assert len(q) == n_requests * max_queries, f"{len(q)} queries for {n_requests} requests of {max_queries}"
            first_query_B1 = torch.arange(0, len(q) + 1, max_queries, dtype=torch.int32)
        assert n_keys_B.max() <= max_keys, f"{n_keys_B.tolist()} keys, at most {max_keys} were announced"
        require_table(page_table, n_requests, k_cache.shape[2])
        paged = Paged(page_table, n_keys_B, first_query_B1, max_queries)
        self.run(paged, (out, q, k_cache, v_cache), Mask(True, window_left), Score(scale, sinks_A=sinks), v_scale)
        scribble(workspace)

    @graph.launch
    def trtllm_paged_attention_context(
        self,
        out: torch.Tensor,
        out_scales: torch.Tensor | None,
        q: torch.Tensor,
        k_cache: torch.Tensor,
        v_cache: torch.Tensor,
        workspace: torch.Tensor,
        counters: torch.Tensor,
        page_table: torch.Tensor,
        n_keys_B: torch.Tensor,
        max_queries: int,
        max_keys: int,
        scale: float,
        v_scale: float,
        o_sf_scale: float,
        o_sf_vec_size: int,
        o_sf_start_index: int,
        n_requests: int,
        window_left: int,
        first_query_B1: torch.Tensor,
        first_key_B1: torch.Tensor,
        n_processors: int,
        pdl: bool,
        workspace_bytes: int,
        sinks: torch.Tensor | None,
        k_scales: torch.Tensor | None,
        v_scales: torch.Tensor | None,
        skip_threshold: float | None,
        shares_pages: bool,
        fp16_softmax: bool | None,
        compress: bool | None,
        causal: bool,
        *others: Any,
    ) -> None:
        require_starts(first_key_B1, n_keys_B)
        assert n_keys_B.max() <= max_keys, f"{n_keys_B.tolist()} keys, at most {max_keys} were announced"
        require_table(page_table, n_requests, k_cache.shape[2])
        paged = Paged(page_table, n_keys_B, first_query_B1, max_queries)
        self.run(paged, (out, q, k_cache, v_cache), Mask(causal, window_left), Score(scale, sinks_A=sinks), v_scale)
        scribble(workspace)

    def run(
        self, paged: Paged, tensors: tuple[torch.Tensor, ...], mask: Mask, score: Score, v_scale: float | torch.Tensor
    ) -> None:
        out, q, k_cache, v_cache = tensors
        assert not isinstance(v_scale, torch.Tensor), "fp8 scales are not defined in the rehearsal; run this on a GPU"
        assert k_cache.stride(-1) == v_cache.stride(-1) == q.stride(-1) == 1, "q, K and V need a last stride of 1"
        assert k_cache.stride() == v_cache.stride(), f"strides {v_cache.stride()} of V: the kernel uses K's for both"
        require_int32(seq_lens=paged.n_keys_B, cum_seq_lens_q=paged.first_query_B1)
        require_window(mask.left)
        require_fp32_sinks(score.sinks_A)
        k_cache, v_cache = k_cache.transpose(1, 2), v_cache.transpose(1, 2)
        out.copy_(paged.run(q, k_cache, v_cache, mask, score)[0] * v_scale)


def require_starts(first_key_B1: torch.Tensor, n_keys_B: torch.Tensor) -> None:
    require_int32(cum_seq_lens_kv=first_key_B1)
    starts, lengths = first_key_B1.tolist(), n_keys_B.tolist()
    assert starts == [sum(lengths[:b]) for b in range(len(starts))], f"keys start at {starts}, lengths are {lengths}"


@graph.launch
def fmha_v2(
    q: torch.Tensor,
    k_cache: torch.Tensor,
    v_cache: torch.Tensor,
    out: torch.Tensor,
    workspace: torch.Tensor,
    workspace_bytes: int,
    page_table: torch.Tensor,
    page_size: int,
    n_keys_B: torch.Tensor,
    first_query_B1: torch.Tensor,
    first_key_B1: torch.Tensor,
    layout: str,
    max_queries: int,
    max_keys: int,
    n_requests: int,
    mask_mode: str,
    softmax_scale: float,
    scale: float,
    v_scale: float,
    window_left: int,
    chunked: int,
    alibi: bool,
    softcap: float,
    skip_threshold: float,
    lse: torch.Tensor | None,
    sinks: torch.Tensor | None,
) -> None:
    """Emulate fmha v2, which computes the attention of prompts over a paged cache.

    With a page table [B, P], the values of a page must follow its keys in memory. A page table [B, 2, P] locates keys
    in its first half and values in its second. Both halves are block indices counted from the first page of keys.
    """
    assert layout in ("q_paged_kv_nhd", "q_paged_kv_hnd"), (
        f"layout {layout} is not defined in the rehearsal; run this on a GPU"
    )
    assert mask_mode in ("causal", "padding"), f"mask mode {mask_mode} is not defined in the rehearsal; run on a GPU"
    refuse("fmha_v2", {"alibi": alibi, "chunked": chunked or None, "lse": lse, "skipping": skip_threshold or None})
    require_window(window_left)
    require_starts(first_key_B1, n_keys_B)
    require_int32(seq_lens=n_keys_B, cum_seq_lens_q=first_query_B1, block_tables=page_table)
    assert page_table.is_contiguous(), "a page table that is not contiguous: the kernel takes its width for a stride"
    assert n_keys_B.max() <= max_keys, f"{n_keys_B.tolist()} keys, at most {max_keys} were announced"
    block_bytes = k_cache[0].numel() * k_cache.element_size()
    offset = (v_cache.data_ptr() - k_cache.data_ptr()) // block_bytes
    if page_table.dim() == 3:
        keys, values = page_table.unbind(1)
        assert (values == keys + offset).all(), f"values {offset} blocks after their keys, not at the table's place"
        page_table = keys
    else:
        assert (offset, k_cache.stride(0)) == (1, 2 * k_cache[0].numel()), "a page's values must follow its keys"
    if layout.endswith("hnd"):
        k_cache, v_cache = k_cache.transpose(1, 2), v_cache.transpose(1, 2)
    paged = Paged(page_table, n_keys_B, first_query_B1, max_queries)
    require_fp32_sinks(sinks)
    mask, score = Mask(mask_mode == "causal", window_left), Score(scale, softcap, sinks)
    out.copy_(paged.run(q, k_cache, v_cache, mask, score)[0] * v_scale)
    scribble(workspace)
