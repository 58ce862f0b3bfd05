"""Reference for the GPU's paged attention kernels in PyTorch, one request at a time.

`attend` is the definition. This module has FlashAttention's two entry points as SGLang calls them. `flashinfer.py` and
`trtllm.py` have the entry points of FlashInfer and TensorRT-LLM. Entry points check the kernels' requirements on
metadata. Here and in `trtllm.py` they fill output rows that belong to no request with NaN.

Dimension key: B requests, T packed queries, A query heads, G KV heads, E head width of q and k, F head width of v, N
queries and L keys of a request, P columns of the page table. At the end of a name, B1 is B + 1.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch


class Mask(NamedTuple):
    """Rule for the keys that each query attends to. A request's queries have the positions of its last keys."""

    causal: bool
    left: int = -1  # number of keys visible before the query's position; -1: all
    right: int = -1  # number of keys visible after the query's position; -1: all

    def allowed(self, n_queries: int, n_keys: int) -> torch.Tensor:
        """Return the mask, bool [N, L]."""
        distance = torch.arange(n_keys - n_queries, n_keys)[:, None] - torch.arange(n_keys)
        allowed = distance >= 0 if self.causal else torch.ones_like(distance, dtype=torch.bool)
        if self.left >= 0:
            allowed &= distance <= self.left
        if self.right >= 0:
            allowed &= distance >= -self.right
        return allowed


class Score(NamedTuple):
    """Parameters of attention scores."""

    scale: float
    softcap: float = 0.0  # 0: no soft cap
    sinks_A: torch.Tensor | None = None  # logit per head that adds to the softmax's denominator only


def attend(
    q_NAE: torch.Tensor, k_LGE: torch.Tensor, v_LGF: torch.Tensor, allowed_NL: torch.Tensor, score: Score
) -> tuple[torch.Tensor, torch.Tensor]:
    """Compute the attention of one request, in fp32 or wider.

    Returns:
        The output [N, A, F] in q's dtype, zeros for queries without a key, and the scores' log-sum-exp, fp32 [N, A].
    """
    wide = torch.promote_types(q_NAE.dtype, torch.float32)
    n_share = q_NAE.shape[1] // k_LGE.shape[1]
    k_LAE, v_LAF = (x.to(wide).repeat_interleave(n_share, dim=1) for x in (k_LGE, v_LGF))
    score_ANL = torch.einsum("nae,lae->anl", q_NAE.to(wide), k_LAE) * score.scale
    if score.softcap:
        score_ANL = score.softcap * (score_ANL / score.softcap).tanh()
    score_ANL = score_ANL.masked_fill(~allowed_NL, -torch.inf)
    lse_AN = score_ANL.logsumexp(-1)
    total_AN = lse_AN if score.sinks_A is None else torch.logaddexp(lse_AN, score.sinks_A[:, None].to(wide))
    weight_ANL = (score_ANL - total_AN.nan_to_num(neginf=0.0)[..., None]).exp()
    return torch.einsum("anl,laf->naf", weight_ANL, v_LAF).to(q_NAE.dtype), lse_AN.T.float()


def require_int32(**metadata: torch.Tensor) -> None:
    for name, tensor in metadata.items():
        assert tensor.dtype == torch.int32, f"{name} is {tensor.dtype}, the kernel reads int32"
        assert tensor.stride(-1) == 1, f"{name} has strides {tensor.stride()}, the kernel needs a last stride of 1"


def pages_of(row_P: torch.Tensor, n_keys: int, page_size: int, n_pages: int) -> torch.Tensor:
    """Return the pages that hold a request's keys, int64."""
    needed = -(-n_keys // page_size)
    too_few = f"a page table of {row_P.shape[0]} columns for {n_keys} keys at {page_size} a page needs {needed}"
    assert needed <= row_P.shape[0], too_few
    pages = row_P[:needed].long()
    assert ((pages >= 0) & (pages < n_pages)).all(), f"pages {pages.tolist()} of a cache with {n_pages} pages"
    return pages


class Paged(NamedTuple):
    """Requests and their keys: the arguments that all paged kernels share."""

    page_table_BP: torch.Tensor
    n_keys_B: torch.Tensor
    first_query_B1: torch.Tensor  # [B + 1], index of each request's first query, and the number of all queries
    max_queries: int

    def run(
        self, q_TAE: torch.Tensor, k_cache: torch.Tensor, v_cache: torch.Tensor, mask: Mask, score: Score
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Return outputs [T, A, F] and log-sum-exps [T, A]. Rows that belong to no request are NaN.

        The caches are [pages, page size, G, E] and [pages, page size, G, F].
        """
        B = self.n_keys_B.shape[0]
        assert self.first_query_B1.shape == (B + 1,), f"{len(self.first_query_B1)} starts for {B} requests, not {B + 1}"
        assert self.page_table_BP.shape[0] >= B, f"{self.page_table_BP.shape[0]} rows of pages for {B} requests"
        n_pages, page_size = k_cache.shape[:2]
        out_TAF = q_TAE.new_full((*q_TAE.shape[:2], v_cache.shape[-1]), torch.nan)
        lse_TA = torch.full(q_TAE.shape[:2], torch.nan)
        starts = self.first_query_B1.tolist()
        for b, n_keys in enumerate(self.n_keys_B.tolist()):
            n_queries = starts[b + 1] - starts[b]
            assert n_queries <= self.max_queries, f"{n_queries} queries, at most {self.max_queries} were announced"
            if n_queries <= 0:
                continue
            pages = pages_of(self.page_table_BP[b], n_keys, page_size, n_pages)
            k, v = (cache.index_select(0, pages).flatten(0, 1)[:n_keys] for cache in (k_cache, v_cache))
            rows = slice(starts[b], starts[b + 1])
            out_TAF[rows], lse_TA[rows] = attend(q_TAE[rows], k, v, mask.allowed(n_queries, n_keys), score)
        return out_TAF, lse_TA


def refuse(op: str, others: dict[str, Any]) -> None:
    """Raise NotImplementedError if a caller passes options that a definition does not support."""
    asked = {name: value for name, value in others.items() if value is not None and value is not False}
    if asked:
        raise NotImplementedError(f"{op} with {', '.join(asked)} is not defined in the rehearsal; run this on a GPU")


def flash_attn_with_kvcache(
    q: torch.Tensor,
    k_cache: torch.Tensor,
    v_cache: torch.Tensor,
    *,
    page_table: torch.Tensor,
    cache_seqlens: torch.Tensor,
    cu_seqlens_q: torch.Tensor,
    max_seqlen_q: int,
    softmax_scale: float,
    causal: bool = False,
    window_size: tuple[int, int] = (-1, -1),
    softcap: float = 0.0,
    sinks: torch.Tensor | None = None,
    qv: torch.Tensor | None = None,
    return_softmax_lse: bool = False,
    out: torch.Tensor | None = None,
    cu_seqlens_k_new: torch.Tensor | None = None,
    scheduler_metadata: torch.Tensor | None = None,
    num_splits: int = 0,
    max_seqlen_k: int | None = None,
    ver: int = 3,
    **others: Any,
) -> torch.Tensor | tuple[torch.Tensor, torch.Tensor]:
    """Emulate FlashAttention 3 and 4 over a paged cache; returns [T, A, F], and log-sum-exps [A, T] if requested.

    `q` is [T, A, E], the caches [pages, page size, G, E] and [pages, page size, G, F]. The product of `qv` [T, A, F]
    (latent attention) with the values is added to the scores.
    """
    refuse("flash_attn_with_kvcache", others)
    require_int32(page_table=page_table, cache_seqlens=cache_seqlens, cu_seqlens_q=cu_seqlens_q)
    assert max_seqlen_k is None or max_seqlen_k >= int(cache_seqlens.max()), f"{cache_seqlens} above {max_seqlen_k}"
    assert q.stride(-1) == k_cache.stride(-1) == v_cache.stride(-1) == 1, "q, K and V need a last stride of 1"
    paged = Paged(page_table, cache_seqlens, cu_seqlens_q, max_seqlen_q)
    if qv is not None:
        q, k_cache = torch.cat([q, qv], dim=-1), torch.cat([k_cache, v_cache], dim=-1)
    result, lse = paged.run(q, k_cache, v_cache, Mask(causal, *window_size), Score(softmax_scale, softcap, sinks))
    if out is not None:
        result = out.copy_(result)
    return (result, lse.T.contiguous()) if return_softmax_lse else result


def flash_attn_varlen_func(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    cu_seqlens_q: torch.Tensor,
    cu_seqlens_k: torch.Tensor,
    max_seqlen_q: int,
    max_seqlen_k: int,
    *,
    softmax_scale: float,
    causal: bool = False,
    window_size: tuple[int, int] = (-1, -1),
    softcap: float = 0.0,
    return_softmax_lse: bool = False,
    num_splits: int = 0,
    ver: int = 3,
    **others: Any,
) -> torch.Tensor | tuple[torch.Tensor, torch.Tensor]:
    """Emulate FlashAttention over packed keys: q [T, A, E], k [keys, G, E], v [keys, G, F]; returns [T, A, F]."""
    refuse("flash_attn_varlen_func", others)
    require_int32(cu_seqlens_q=cu_seqlens_q, cu_seqlens_k=cu_seqlens_k)
    mask, score = Mask(causal, *window_size), Score(softmax_scale, softcap)
    out, lse = q.new_full((*q.shape[:2], v.shape[-1]), torch.nan), torch.full(q.shape[:2], torch.nan)
    ends_q, ends_k = cu_seqlens_q.tolist(), cu_seqlens_k.tolist()
    for queries, keys in zip(map(slice, ends_q, ends_q[1:]), map(slice, ends_k, ends_k[1:]), strict=True):
        n_queries, n_keys = queries.stop - queries.start, keys.stop - keys.start
        if n_queries > 0:
            allowed = mask.allowed(n_queries, n_keys)
            out[queries], lse[queries] = attend(q[queries], k[keys], v[keys], allowed, score)
    return (out, lse.T.contiguous()) if return_softmax_lse else out
