"""Gated delta rule over a drafted block: outputs for every token, and records that `gdn_fold` adds to the states.

Verify must not change the recurrent state, because the number of kept tokens is not known yet. Storing the state after
every token costs H V K values per token (3 MiB per layer in Qwen3.5-27B). A record has only H V + G K + H values:
delta and key, whose outer product the token adds to the state, and the log decay from the block's start to the token.

Shapes: B requests, N tokens per block, T = B N tokens, G key heads, H value heads (H a multiple of G), K key width, V
value width, S state slots, R rows of the record (row b belongs to request b of the batch), X = H V + G K + H.
Cost: reads each state once, 4 B H V K bytes, the minimum; writes the records, 4 T X bytes.
Source: Yang et al. 2024, "Gated Delta Networks", arXiv:2412.06464; `gdn_block` has the equations of a whole block.

The CPU form and the kernel compute a block at once, by matrix products and one triangular system. The definition,
`gdn_verify_ref`, loops over tokens. The kernel does not round factors of products to bf16 or TF32. If queries and keys
are bf16, tensor cores multiply them by the state, which is split into bf16 numbers that add up to it exactly. Otherwise
products are fp32.

Requests with a negative state slot are padding. Their outputs are zero for any inputs, so that no NaN reaches the
target's next layers. Their rows of the record are not written.
"""

from typing import NamedTuple

import torch
import torch.nn.functional as F
import triton
import triton.language as tl
from sglang_dflash_kernels.checks import Shapes
from sglang_dflash_kernels.dispatch import Forms
from sglang_dflash_kernels.gdn_block import L2_EPS, DeltaBlock, by_token, log_decay
from sglang_dflash_kernels.gdn_geometry import SMALLEST, geometry
from sglang_dflash_kernels.record import record_width

N_BFLOAT16S = {torch.float32: 3, torch.float16: 2, torch.bfloat16: 1}  # number of bf16 values that add up to one value

INF = tl.constexpr(float("inf"))


class Inputs(NamedTuple):
    """Inputs of the recurrence in one layer. A token's values are contiguous. Gaps may lie between tokens."""

    q_TGK: torch.Tensor  # q, k and v are outputs of the layer's convolution, not normalised
    k_TGK: torch.Tensor
    v_THV: torch.Tensor
    a_TH: torch.Tensor  # the log decay is -exp(A_log) softplus(a + dt_bias)
    b_TH: torch.Tensor  # beta is sigmoid(b)
    A_log_H: torch.Tensor
    dt_bias_H: torch.Tensor


def split_record(
    record: torch.Tensor, *, n_value_heads: int, value_width: int, n_key_heads: int, key_width: int
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Split `record` [..., X] into views: delta [..., H, V], key [..., G, K], log decay since block start [..., H]."""
    delta, key, total = record.split([n_value_heads * value_width, n_key_heads * key_width, n_value_heads], dim=-1)
    return delta.unflatten(-1, (n_value_heads, value_width)), key.unflatten(-1, (n_key_heads, key_width)), total


def gdn_verify_ref(x: Inputs, state_SHVK: torch.Tensor, slot_B: torch.Tensor, record_RNX: torch.Tensor) -> torch.Tensor:
    """Define `gdn_verify`: the recurrence, token by token, in float64."""
    N, (G, K), (H, V) = len(x.q_TGK) // len(slot_B), x.q_TGK.shape[1:], x.v_THV.shape[1:]
    delta_RNHV, key_RNGK, total_RNH = split_record(
        record_RNX, n_value_heads=H, value_width=V, n_key_heads=G, key_width=K
    )
    q_TGK, k_TGK = (F.normalize(rows.double(), dim=-1, eps=0) for rows in (x.q_TGK, x.k_TGK))
    q_THK, k_THK = (rows.repeat_interleave(H // G, dim=1) for rows in (q_TGK, k_TGK))
    decay_TH = -x.A_log_H.double().exp() * F.softplus(x.a_TH.double() + x.dt_bias_H.double())
    out_THV = torch.zeros(x.v_THV.shape, dtype=torch.float64, device=x.v_THV.device)
    for b, slot in enumerate(slot_B.tolist()):
        if slot < 0:
            continue
        S_HVK, total_H = state_SHVK[slot].double(), torch.zeros_like(decay_TH[0])
        for i in range(N):
            t = b * N + i
            S_HVK = decay_TH[t, :, None, None].exp() * S_HVK
            found_HV = torch.einsum("hvk,hk->hv", S_HVK, k_THK[t])
            delta_HV = x.b_TH[t, :, None].double().sigmoid() * (x.v_THV[t] - found_HV)
            S_HVK = S_HVK + delta_HV[:, :, None] * k_THK[t, :, None, :]
            out_THV[t] = torch.einsum("hvk,hk->hv", S_HVK, q_THK[t]) * K**-0.5
            total_H = total_H + decay_TH[t]
            delta_RNHV[b, i], key_RNGK[b, i], total_RNH[b, i] = delta_HV, k_TGK[t], total_H
    return out_THV.to(x.v_THV.dtype)


def gdn_verify_torch(
    x: Inputs, state_SHVK: torch.Tensor, slot_B: torch.Tensor, record_RNX: torch.Tensor
) -> torch.Tensor:
    """Compute `gdn_verify` for whole blocks at once, with `DeltaBlock`."""
    B = len(slot_B)
    N, (G, K), (H, V) = len(x.q_TGK) // B, x.q_TGK.shape[1:], x.v_THV.shape[1:]
    block = DeltaBlock.of(
        x.q_TGK.view(B, N, G, K),
        x.k_TGK.view(B, N, G, K),
        x.v_THV.view(B, N, H, V),
        g_BCH=log_decay(x.A_log_H, x.a_TH, x.dt_bias_H).view(B, N, H),
        beta_BCH=x.b_TH.float().sigmoid().view(B, N, H),
    )
    found_by_q, found_by_k = block.read(state_SHVK.index_select(0, slot_B.clamp(min=0)).float().flatten(0, 1))
    delta_YNV = block.solve(block.v_YCV - found_by_k)
    kept = split_record(record_RNX[:B, :N], n_value_heads=H, value_width=V, n_key_heads=G, key_width=K)
    # Value heads that share a key head have the same key, so every H // G-th key is stored.
    values = (by_token(delta_YNV, B), by_token(block.k_YCK, B)[:, :, :: H // G], by_token(block.total_YC, B))
    out_BNHV = by_token(block.outputs(found_by_q, delta_YNV), B)
    padding_B = slot_B < 0
    if padding_B.any():
        out_BNHV = out_BNHV.masked_fill(padding_B[:, None, None, None], 0)
        real_W = (~padding_B).nonzero().flatten()
        for part, value in zip(kept, values, strict=True):
            part.index_copy_(0, real_W, value[real_W])
    else:
        for part, value in zip(kept, values, strict=True):
            part.copy_(value)
    return out_BNHV.to(x.v_THV.dtype).reshape(x.v_THV.shape)


@triton.jit
def _add_reads(q_NC, k_NC, S_VC, qS_NV, kS_NV, PARTS: tl.constexpr):
    """Return `qS_NV` + q S^T and `kS_NV` + k S^T, without rounding the factors.

    With PARTS > 0, S is split into a sum of PARTS bf16 numbers, the largest first. The bf16 rows are multiplied by each
    of these numbers. Each number except the last is the upper half of the remainder's bits. To take these bits needs
    fewer instructions than to round. Sums are exact if S is above 1e-33. With PARTS = 0, products are fp32.
    """
    if PARTS == 0:
        qS_NV = tl.dot(q_NC.to(tl.float32), tl.trans(S_VC), qS_NV, input_precision="ieee")
        kS_NV = tl.dot(k_NC.to(tl.float32), tl.trans(S_VC), kS_NV, input_precision="ieee")
    for part in tl.static_range(PARTS):
        part_VC = S_VC
        if part < PARTS - 1:
            part_VC = (S_VC.to(tl.uint32, bitcast=True) & 0xFFFF0000).to(tl.float32, bitcast=True)
        part_CV = tl.trans(part_VC.to(tl.bfloat16))
        qS_NV = tl.dot(q_NC, part_CV, qS_NV)
        kS_NV = tl.dot(k_NC, part_CV, kS_NV)
        S_VC -= part_VC
    return qS_NV, kS_NV


@triton.jit
def _inverse(A_NN, later, earlier, BLOCK_N: tl.constexpr):
    """Return (I + A)^-1 for strictly lower triangular A, by merging inverses of diagonal blocks of 1, 2, 4, ... rows.

    The inverse of a matrix with diagonal blocks P and Q and lower left block C has the lower left block -Q^-1 C P^-1.
    """
    inverse_NN = tl.where(later == earlier, 1.0, tl.where(later // 2 == earlier // 2, -A_NN, 0.0))
    LEVELS: tl.constexpr = (BLOCK_N - 1).bit_length()
    for level in tl.static_range(1, LEVELS):
        later_block, earlier_block = later >> level, earlier >> level
        corner_NN = tl.where((later_block % 2 == 1) & (later_block == earlier_block + 1), A_NN, 0.0)
        reached_NN = tl.dot(corner_NN, inverse_NN, input_precision="ieee")
        inverse_NN -= tl.dot(inverse_NN, reached_NN, input_precision="ieee")
    return inverse_NN


@triton.jit(do_not_specialize=["N"], do_not_specialize_on_alignment=["slots"])
def _gdn_verify_kernel(
    q, k, v, a, b, A_log, dt_bias, state, slots, record, out,
    stride_q, stride_k, stride_v, stride_a, stride_b, stride_slot, stride_row, scale, eps,
    N, H: tl.constexpr, G: tl.constexpr, V: tl.constexpr, K: tl.constexpr, X: tl.constexpr,
    BLOCK_N: tl.constexpr, BLOCK_V: tl.constexpr, BLOCK_K: tl.constexpr, BLOCK_C: tl.constexpr, PARTS: tl.constexpr,
):  # fmt: skip
    tile, h, request = tl.program_id(0), tl.program_id(1), tl.program_id(2)
    g = h // (H // G)
    n = tl.arange(0, BLOCK_N)  # [N]
    in_N = n < N
    t_N = request.to(tl.int64) * N + n
    row = tile * BLOCK_V + tl.arange(0, BLOCK_V)  # [V]
    here_NV = in_N[:, None] & (row < V)[None]
    out_NV = out + (t_N[:, None] * H + h) * V + row[None]
    # Loads whose addresses do not depend on a loaded value come first, so that they overlap.
    slot = tl.load(slots + request).to(tl.int64)
    x_N = tl.load(a + t_N * stride_a + h, mask=in_N, other=0).to(tl.float32) + tl.load(dt_bias + h).to(tl.float32)
    rate = -tl.exp(tl.load(A_log + h).to(tl.float32))
    beta_N = tl.sigmoid(tl.load(b + t_N * stride_b + h, mask=in_N, other=0).to(tl.float32))
    if slot < 0:
        tl.store(out_NV, tl.zeros([BLOCK_N, BLOCK_V], out.dtype.element_ty), mask=here_NV)
        return

    # q and k are multiplied as given, because products of bf16 numbers are exact. Their norms are divided out below.
    qq_N = tl.zeros([BLOCK_N], tl.float32)
    kk_N = tl.zeros([BLOCK_N], tl.float32)
    qk_NN = tl.zeros([BLOCK_N, BLOCK_N], tl.float32)
    kk_NN = tl.zeros([BLOCK_N, BLOCK_N], tl.float32)
    qS_NV = tl.zeros([BLOCK_N, BLOCK_V], tl.float32)
    kS_NV = tl.zeros([BLOCK_N, BLOCK_V], tl.float32)
    for c in range(0, K, BLOCK_C):
        column = c + tl.arange(0, BLOCK_C)  # [C]
        here_NC = in_N[:, None] & (column < K)[None]
        here_VC = (row < V)[:, None] & (column < K)[None]
        cell_VC = slot * stride_slot + h * V * K + row[:, None] * K + column[None]
        q_NC = tl.load(q + t_N[:, None] * stride_q + g * K + column[None], mask=here_NC, other=0)
        k_NC = tl.load(k + t_N[:, None] * stride_k + g * K + column[None], mask=here_NC, other=0)
        S_VC = tl.load(state + cell_VC, mask=here_VC, other=0).to(tl.float32)
        qq_N += tl.sum(q_NC.to(tl.float32) * q_NC.to(tl.float32), axis=1)
        kk_N += tl.sum(k_NC.to(tl.float32) * k_NC.to(tl.float32), axis=1)
        qk_NN = tl.dot(q_NC, tl.trans(k_NC), qk_NN, input_precision="ieee")
        kk_NN = tl.dot(k_NC, tl.trans(k_NC), kk_NN, input_precision="ieee")
        qS_NV, kS_NV = _add_reads(q_NC, k_NC, S_VC, qS_NV, kS_NV, PARTS)
    # v is not needed before the triangular system is solved. Loaded earlier, it would occupy registers in the loop.
    v_NV = tl.load(v + t_N[:, None] * stride_v + h * V + row[None], mask=here_NV, other=0)
    per_q_N = scale / tl.sqrt(qq_N + eps)
    per_k_N = 1.0 / tl.sqrt(kk_N + eps)

    softplus_N = tl.where(x_N <= 20.0, tl.log(1.0 + tl.exp(tl.minimum(x_N, 20.0))), x_N)
    total_N = tl.cumsum(tl.where(in_N, rate * softplus_N, 0.0), axis=0)
    left_N = tl.exp(total_N)
    later, earlier = n[:, None], n[None]
    # The mask is applied before exp, because above the diagonal the exponent is positive and exp may overflow.
    decay_NN = tl.exp(tl.where(later >= earlier, total_N[:, None] - total_N[None], -INF)) * per_k_N[None]
    A_NN = tl.where(later > earlier, (beta_N * per_k_N)[:, None] * decay_NN * kk_NN, 0.0)
    right_NV = beta_N[:, None] * (v_NV.to(tl.float32) - (left_N * per_k_N)[:, None] * kS_NV)
    delta_NV = tl.dot(_inverse(A_NN, later, earlier, BLOCK_N), right_NV, input_precision="ieee")
    scores_NN = per_q_N[:, None] * decay_NN * qk_NN
    output_NV = tl.dot(scores_NN, delta_NV, (left_N * per_q_N)[:, None] * qS_NV, input_precision="ieee")
    tl.store(out_NV, output_NV.to(out.dtype.element_ty), mask=here_NV)

    kept_N = record + request.to(tl.int64) * stride_row + n * X
    tl.store(kept_N[:, None] + h * V + row[None], delta_NV, mask=here_NV)
    if tile == 0:
        tl.store(kept_N + H * V + G * K + h, total_N, mask=in_N)
        if h % (H // G) == 0:  # value heads that share a key head have the same key
            column = tl.arange(0, BLOCK_K)  # [K]
            here_NK = in_N[:, None] & (column < K)[None]
            k_NK = tl.load(k + t_N[:, None] * stride_k + g * K + column[None], mask=here_NK, other=0)
            tl.store(
                kept_N[:, None] + H * V + g * K + column[None], k_NK.to(tl.float32) * per_k_N[:, None], mask=here_NK
            )


def gdn_verify_triton(
    x: Inputs, state_SHVK: torch.Tensor, slot_B: torch.Tensor, record_RNX: torch.Tensor
) -> torch.Tensor:
    """Compute `gdn_verify` by its kernel: one program per request, value head and tile of the state's rows.

    Raises:
        ValueError: there are more requests, padding included, than rows R of the record. R must be at least the number
            of requests of the largest captured batch.
    """
    B, (G, K), (H, V) = len(slot_B), x.q_TGK.shape[1:], x.v_THV.shape[1:]
    if len(record_RNX) < B:
        raise ValueError(f"{B} requests, padding included, exceed a record of {len(record_RNX)} rows; add rows")
    out_THV = torch.empty_like(x.v_THV, memory_format=torch.contiguous_format)
    N = len(x.q_TGK) // B
    block_n, block_v, block_k = (max(SMALLEST, triton.next_power_of_2(size)) for size in (N, V, K))
    shape = geometry(B * H, block_n, block_v)
    parts = N_BFLOAT16S[state_SHVK.dtype] if x.q_TGK.dtype == x.k_TGK.dtype == torch.bfloat16 else 0
    _gdn_verify_kernel[(triton.cdiv(V, shape.rows), H, B)](
        *x,
        *(state_SHVK, slot_B, record_RNX, out_THV),
        *(rows.stride(0) for rows in (*x[:5], state_SHVK, record_RNX)),
        *(K**-0.5, L2_EPS, N),
        *(H, G, V, K, record_RNX.shape[-1], block_n, shape.rows, block_k, min(shape.columns, block_k), parts),
        num_warps=shape.warps,
        num_stages=3,
        maxnreg=shape.max_registers,
    )
    return out_THV


GDN_VERIFY = Forms(on_cpu=gdn_verify_torch, on_gpu=gdn_verify_triton)


def gdn_verify(x: Inputs, state_SHVK: torch.Tensor, slot_B: torch.Tensor, record_RNX: torch.Tensor) -> torch.Tensor:
    """Verify B >= 1 blocks of T / B tokens. Return the outputs [T, H, V] in v's dtype.

    Args:
        x: inputs of the layer, each fp32, bf16 or fp16.
        state_SHVK: fp32, bf16 or fp16, not changed. State slots may be strided.
        slot_B: int32 or int64, state slot of each request; negative: padding.
        record_RNX: fp32, written; R >= B, and its N is at least T / B. Rows may be strided.
    Raises:
        ValueError: shapes, dtypes or layouts that do not fit.
    """
    shapes, floats = Shapes(), (torch.float32, torch.bfloat16, torch.float16)
    shapes.check_strided(*floats, **x._asdict(), state_SHVK=state_SHVK)
    shapes.check(torch.int32, torch.int64, slot_B=slot_B)
    shapes.check_strided(torch.float32, record_RNX=record_RNX)
    T, B, G, H, V, K, R, N, X = (shapes[letter] for letter in "TBGHVKRNX")
    if not B or H % G or T % B or T // B > N or B > R or record_width(H, V, G, K) != X:
        raise ValueError(
            f"{T} tokens in {B} blocks, {G} key and {H} value heads of {K} and {V} do not fit a record of "
            f"shape {tuple(record_RNX.shape)}; pass blocks of equal length, a row per block, a multiple of {G} value "
            "heads, and record_width values for each token of a block"
        )
    for name, tensor in (x._asdict() | {"state_SHVK": state_SHVK, "record_RNX": record_RNX}).items():
        if not (tensor if tensor.ndim == 1 else tensor[0]).is_contiguous():
            raise ValueError(f"{name} has strides {tensor.stride()}; only the first dimension may lie apart")
    return GDN_VERIFY.form_for(x.q_TGK)(x, state_SHVK, slot_B, record_RNX)
