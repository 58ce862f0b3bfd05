"""Gated delta rule over a drafted block: outputs for every slot, and a record from which any prefix can be kept.

Verify must not touch the recurrent state, because nobody knows yet how much of the block is accepted. Storing the
state after every token costs H V K values per token (3 MiB a layer at Qwen3.5-27B). The record of a token is what it
adds to the state, delta and key, and the log decay up to it: H V + G K + H values, and `gdn_fold` needs no more.

Shapes: B requests, N tokens per block, T = B N tokens, G key heads, H value heads (H a multiple of G), K key width,
V value width, S state slots, R rows of the record (row b belongs to request b of the batch), X = H V + G K + H.
Cost: reads each state once, 4 B H V K bytes, which is the floor; writes the records, 4 T X bytes.
Source: Yang et al. 2024, "Gated Delta Networks", arXiv:2412.06464; the algebra of a whole block is in `gdn_block`.
"""

from typing import NamedTuple

import torch
import triton
import triton.language as tl
from sglang_dflash_kernels.checks import Shapes
from sglang_dflash_kernels.dispatch import choose
from sglang_dflash_kernels.gdn_block import L2_EPS, Block, by_token, log_decay
from sglang_dflash_kernels.record import record_width


class Inputs(NamedTuple):
    """What one layer's recurrence is fed. The rows of q, k, v, a and b may lie apart, a row's values may not."""

    q_TGK: torch.Tensor  # after the convolution, not normalised, as are k and v
    k_TGK: torch.Tensor
    v_THV: torch.Tensor
    a_TH: torch.Tensor  # the log decay is -exp(A_log) softplus(a + dt_bias)
    b_TH: torch.Tensor  # beta is sigmoid(b)
    A_log_H: torch.Tensor
    dt_bias_H: torch.Tensor


def split_record(
    record: torch.Tensor, *, n_value_heads: int, value_width: int, n_key_heads: int, key_width: int
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Views of [..., X]: delta [..., H, V], key [..., G, K], and the log decay since before the block [..., H]."""
    delta, key, total = record.split([n_value_heads * value_width, n_key_heads * key_width, n_value_heads], dim=-1)
    return delta.unflatten(-1, (n_value_heads, value_width)), key.unflatten(-1, (n_key_heads, key_width)), total


def gdn_verify_ref(x: Inputs, state_SHVK: torch.Tensor, slot_B: torch.Tensor, record_RNX: torch.Tensor) -> torch.Tensor:
    """The definition: a whole block at once (`gdn_block`)."""
    B = len(slot_B)
    N, (G, K), (H, V) = len(x.q_TGK) // B, x.q_TGK.shape[1:], x.v_THV.shape[1:]
    block = Block.of(
        x.q_TGK.view(B, N, G, K),
        x.k_TGK.view(B, N, G, K),
        x.v_THV.view(B, N, H, V),
        g_BCH=log_decay(x.A_log_H, x.a_TH, x.dt_bias_H).view(B, N, H),
        beta_BCH=x.b_TH.float().sigmoid().view(B, N, H),
    )
    found_by_q, found_by_k = block.read(state_SHVK.index_select(0, slot_B.clamp(min=0)).float().flatten(0, 1))
    delta_YNV = block.solve(block.v_YCV - found_by_k)
    kept = split_record(record_RNX[:B, :N], n_value_heads=H, value_width=V, n_key_heads=G, key_width=K)
    # The value heads that share a key head have the same key: the first one's is kept.
    values = (by_token(delta_YNV, B), by_token(block.k_YCK, B)[:, :, :: H // G], by_token(block.total_YC, B))
    for part, value in zip(kept, values, strict=True):
        part.copy_(value)
    return by_token(block.outputs(found_by_q, delta_YNV), B).to(x.v_THV.dtype).reshape(x.v_THV.shape)


@triton.jit
def _gdn_verify_kernel(
    q, k, v, a, b, A_log, dt_bias, state, slots, record, out,
    stride_q, stride_k, stride_v, stride_a, stride_b, stride_slot, stride_row, scale, eps,
    N, H: tl.constexpr, G: tl.constexpr, V: tl.constexpr, K: tl.constexpr, X: tl.constexpr,
    BLOCK_V: tl.constexpr, BLOCK_K: tl.constexpr,
):  # fmt: skip
    request, h, tile = tl.program_id(0) // H, tl.program_id(0) % H, tl.program_id(1)
    slot = tl.load(slots + request).to(tl.int64)
    if slot >= 0:  # padding of a captured batch has none
        g = h // (H // G)
        row = tile * BLOCK_V + tl.arange(0, BLOCK_V)  # [V]
        column = tl.arange(0, BLOCK_K)  # [K]
        in_V, in_K = row < V, column < K
        cell = h * V * K + row[:, None] * K + column[None]  # [V, K]
        S = tl.load(state + slot * stride_slot + cell, mask=in_V[:, None] & in_K[None], other=0).to(tl.float32)
        rate = -tl.exp(tl.load(A_log + h).to(tl.float32))
        bias = tl.load(dt_bias + h).to(tl.float32)
        total = 0.0
        record_row = record + request.to(tl.int64) * stride_row
        for n in range(N):
            t = (request * N + n).to(tl.int64)
            x = tl.load(a + t * stride_a + h).to(tl.float32) + bias
            decay = rate * tl.where(x <= 20.0, tl.log(1.0 + tl.exp(tl.minimum(x, 20.0))), x)  # softplus
            beta = tl.sigmoid(tl.load(b + t * stride_b + h).to(tl.float32))
            q_K = tl.load(q + t * stride_q + g * K + column, mask=in_K, other=0).to(tl.float32)
            k_K = tl.load(k + t * stride_k + g * K + column, mask=in_K, other=0).to(tl.float32)
            v_V = tl.load(v + t * stride_v + h * V + row, mask=in_V, other=0).to(tl.float32)
            q_K = q_K * (scale / tl.sqrt(tl.sum(q_K * q_K, axis=0) + eps))
            k_K = k_K / tl.sqrt(tl.sum(k_K * k_K, axis=0) + eps)
            S = S * tl.exp(decay)
            delta_V = beta * (v_V - tl.sum(S * k_K[None], axis=1))
            S = S + delta_V[:, None] * k_K[None]
            said_V = tl.sum(S * q_K[None], axis=1)
            tl.store(out + (t * H + h) * V + row, said_V.to(out.dtype.element_ty), mask=in_V)
            total += decay
            kept = record_row + n * X
            tl.store(kept + h * V + row, delta_V, mask=in_V)
            tl.store(kept + H * V + G * K + h, total, mask=tile == 0)
            tl.store(kept + H * V + g * K + column, k_K, mask=in_K & (tile == 0) & (h % (H // G) == 0))


def gdn_verify_triton(
    x: Inputs, state_SHVK: torch.Tensor, slot_B: torch.Tensor, record_RNX: torch.Tensor
) -> torch.Tensor:
    """The kernel: one program per request, value head and tile of the state's rows; the state stays in registers."""
    B, (G, K), (H, V) = len(slot_B), x.q_TGK.shape[1:], x.v_THV.shape[1:]
    out_THV = torch.empty_like(x.v_THV, memory_format=torch.contiguous_format)
    block_v = min(32, triton.next_power_of_2(V))
    _gdn_verify_kernel[(B * H, triton.cdiv(V, block_v))](
        *x,
        *(state_SHVK, slot_B, record_RNX, out_THV),
        *(rows.stride(0) for rows in (*x[:5], state_SHVK, record_RNX)),
        *(K**-0.5, L2_EPS, len(x.q_TGK) // B),
        *(H, G, V, K, record_RNX.shape[-1], block_v, triton.next_power_of_2(K)),
        num_warps=4,
    )
    return out_THV


def gdn_verify(x: Inputs, state_SHVK: torch.Tensor, slot_B: torch.Tensor, record_RNX: torch.Tensor) -> torch.Tensor:
    """Verify B >= 1 blocks of T / B tokens; returns the outputs [T, H, V] in v's dtype.

    Args:
        state_SHVK: read only. Slots may lie apart.
        slot_B: int32 or int64, each request's state; a negative one marks padding, whose outputs are undefined.
        record_RNX: fp32, R >= B and its N at least T / B; written.
    Raises:
        ValueError: shapes, dtypes or layouts that do not fit.
    """
    shapes, floats = Shapes(), (torch.float32, torch.bfloat16, torch.float16)
    shapes.check_strided(*floats, **x._asdict(), state_SHVK=state_SHVK)
    shapes.check(torch.int32, torch.int64, slot_B=slot_B)
    shapes.check_strided(torch.float32, record_RNX=record_RNX)
    T, B, G, H, V, K, R, N, X = (shapes[letter] for letter in "TBGHVKRNX")
    if H % G or T % B or T // B > N or B > R or record_width(H, V, G, K) != X:
        raise ValueError(
            f"{B} blocks of {T} tokens, {G} key and {H} value heads of {K} and {V} do not fit a record of "
            f"shape {tuple(record_RNX.shape)}; heads, tokens and record_width must"
        )
    for name, tensor in (x._asdict() | {"state_SHVK": state_SHVK, "record_RNX": record_RNX}).items():
        if not tensor[0].is_contiguous():
            raise ValueError(f"{name} has strides {tensor.stride()}; only the first dimension may lie apart")
    run = choose(x.q_TGK, definition=gdn_verify_ref, kernel=gdn_verify_triton)
    return run(x, state_SHVK, slot_B, record_RNX)
