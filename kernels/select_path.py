"""Choose the drafts of a block greedily, slot by slot: in each slot the candidate that best follows the previous token.

For request b, `previous` starts as the anchor. Then for d = 0, 1, ..., D - 1:

    score[c]     = unary[b, d, c] + sum over r of (pred[previous, r] query[b, d, r]) succ[candidates[b, d, c], r]
    drafts[b, d] = candidates[b, d, c] for the lowest c with the largest score
    previous     = drafts[b, d]

Shapes: B requests, D drafts per block, K candidates per draft, V vocabulary, R rank of the two [V, R] tables: `pred`
has a row per predecessor token, `succ` a row per successor token.
Source: DFlash 2, candidate selector (z-lab and Inco AI 2026, SGLang 0.5.23's `models/dflash.py`).
Cost: one launch, latency-bound because of D dependent steps. It reads BD(K + 1)R values of the tables and BDR values of
the query: 1.1 MB for 8 requests, 15 drafts of 16 candidates and rank 256 in bf16.

This greedy walk reads one row of `pred` per slot, the row of the previous token. SGLang's walk may sample, so it scores
all K x K pairs of candidates of adjacent slots. SGLang reads DKR values of `pred` instead of DR, writes DKK scores in
fp32 and reads DK of these scores. At the sizes above, this kernel saves 115 kB of `pred` and 16 kB of scores per
request.
"""

import torch
import triton
import triton.language as tl
from sglang_dflash_kernels.checks import Shapes
from sglang_dflash_kernels.dispatch import Forms

INF = tl.constexpr(float("inf"))


def select_path_ref(
    candidates_BDK: torch.Tensor,
    unary_BDK: torch.Tensor,
    query_BDR: torch.Tensor,
    anchor_B: torch.Tensor,
    *,
    predecessor_VR: torch.Tensor,
    successor_VR: torch.Tensor,
) -> torch.Tensor:
    """Define `select_path`, in PyTorch."""
    B, D, _ = candidates_BDK.shape
    drafts_BD = candidates_BDK.new_zeros(B, D)
    for b in range(B):
        previous = anchor_B[b]
        for d in range(D):
            wanted_R = predecessor_VR[previous].float() * query_BDR[b, d].float()
            goes_K = (successor_VR[candidates_BDK[b, d]].float() * wanted_R).sum(dim=1)
            previous = candidates_BDK[b, d, (unary_BDK[b, d] + goes_K).argmax()]
            drafts_BD[b, d] = previous
    return drafts_BD


def select_path_torch(
    candidates_BDK: torch.Tensor,
    unary_BDK: torch.Tensor,
    query_BDR: torch.Tensor,
    anchor_B: torch.Tensor,
    *,
    predecessor_VR: torch.Tensor,
    successor_VR: torch.Tensor,
) -> torch.Tensor:
    """Compute `select_path` for all requests at once. The rows of `succ` for all slots are read in advance."""
    B, D, _ = candidates_BDK.shape
    drafts_BD = torch.empty((B, D), dtype=torch.int64, device=candidates_BDK.device)
    after_BDKR, query_BDR = successor_VR[candidates_BDK].float(), query_BDR.float()
    previous_B = anchor_B
    for d in range(D):
        wanted_B1R = (predecessor_VR[previous_B].float() * query_BDR[:, d])[:, None]
        # Unlike a matrix product, a sum gives equal rows equal scores, so the lowest index among equal candidates wins.
        score_BK = unary_BDK[:, d] + (after_BDKR[:, d] * wanted_B1R).sum(dim=2)
        previous_B = candidates_BDK[:, d].gather(1, score_BK.argmax(dim=1, keepdim=True))[:, 0]
        drafts_BD[:, d] = previous_B
    return drafts_BD


@triton.jit(
    do_not_specialize=["D"], do_not_specialize_on_alignment=["candidates", "unary", "query", "anchor", "drafts"]
)
def _select_path_kernel(
    candidates, unary, query, anchor, predecessor, successor, drafts, D,
    K: tl.constexpr, R: tl.constexpr, BLOCK_K: tl.constexpr, BLOCK_R: tl.constexpr,
):  # fmt: skip
    b = tl.program_id(0).to(tl.int64)
    c = tl.arange(0, BLOCK_K)  # [K]
    r = tl.arange(0, BLOCK_R)  # [R]
    in_table = (c < K)[:, None] & (r < R)[None]
    previous = tl.load(anchor + b)
    token = tl.load(candidates + b * D * K + c, mask=c < K, other=0)  # [K]
    for d in range(D):
        slot = b * D + d
        # The next slot's candidates are loaded one slot early. So each slot waits for memory once, not twice.
        ahead = tl.load(candidates + (slot + 1) * K + c, mask=(c < K) & (d + 1 < D), other=0)  # [K]
        own = tl.load(unary + slot * K + c, mask=c < K, other=-INF)  # [K]
        asked = tl.load(query + slot * R + r, mask=r < R, other=0).to(tl.float32)  # [R]
        before = tl.load(predecessor + previous * R + r, mask=r < R, other=0).to(tl.float32)  # [R]
        after = tl.load(successor + token[:, None] * R + r[None], mask=in_table, other=0).to(tl.float32)  # [K, R]
        best = tl.argmax(own + tl.sum(after * (before * asked)[None], axis=1), axis=0)  # the lowest index on ties
        # Select the token by a sum, which has no memory latency, unlike a load. Even if scores are NaN, `previous` is a
        # candidate or 0, so it stays a valid row of the tables.
        previous = tl.sum(tl.where(c == best, token, 0), axis=0)
        tl.store(drafts + slot, previous)
        token = ahead


def select_path_triton(
    candidates_BDK: torch.Tensor,
    unary_BDK: torch.Tensor,
    query_BDR: torch.Tensor,
    anchor_B: torch.Tensor,
    *,
    predecessor_VR: torch.Tensor,
    successor_VR: torch.Tensor,
) -> torch.Tensor:
    """Compute `select_path` by its kernel: one program per request."""
    (B, D, K), R = candidates_BDK.shape, query_BDR.shape[2]
    drafts_BD = torch.empty((B, D), dtype=torch.int64, device=candidates_BDK.device)
    if B and D:
        tensors = candidates_BDK, unary_BDK, query_BDR, anchor_B, predecessor_VR, successor_VR, drafts_BD
        padded = triton.next_power_of_2(K), triton.next_power_of_2(R)
        _select_path_kernel[(B,)](*tensors, D, K, R, *padded, num_warps=4)
    return drafts_BD


SELECT_PATH = Forms(on_cpu=select_path_torch, on_gpu=select_path_triton)


def select_path(
    candidates_BDK: torch.Tensor,
    unary_BDK: torch.Tensor,
    query_BDR: torch.Tensor,
    anchor_B: torch.Tensor,
    *,
    predecessor_VR: torch.Tensor,
    successor_VR: torch.Tensor,
) -> torch.Tensor:
    """Return the drafts, int64 [B, D]. B may be 0.

    Args:
        candidates_BDK: int64, candidate tokens of each draft, K >= 1.
        unary_BDK: float32, the candidates' scores without regard to the previous token.
        query_BDR: hidden states of the slots, projected to R values, in the tables' dtype.
        anchor_B: int64, anchors. Candidates and anchors must be below V, which is not checked.
        predecessor_VR, successor_VR: tables `pred` and `succ`, float32, bfloat16 or float16.
    Raises:
        ValueError: shapes, dtypes or layouts that do not fit.
    """
    shapes = Shapes()
    shapes.check(torch.float32, torch.bfloat16, torch.float16, predecessor_VR=predecessor_VR)
    shapes.check(predecessor_VR.dtype, successor_VR=successor_VR, query_BDR=query_BDR)
    shapes.check(torch.int64, candidates_BDK=candidates_BDK, anchor_B=anchor_B)
    shapes.check(torch.float32, unary_BDK=unary_BDK)
    if not shapes["K"] or not shapes["R"]:
        raise ValueError(f"{shapes['K']} candidates and tables of rank {shapes['R']}; both must be at least 1")
    tensors = candidates_BDK, unary_BDK, query_BDR, anchor_B
    return SELECT_PATH.form_for(candidates_BDK)(*tensors, predecessor_VR=predecessor_VR, successor_VR=successor_VR)
