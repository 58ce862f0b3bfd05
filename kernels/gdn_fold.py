"""Fold the kept rows of a verified block into the recurrent states of all layers, in one launch.

`gdn_verify` records delta_i, k_i and G_i of each token i. Here G_i is the log decay from the start of the block to
token i. With these records the recurrence for the state after n tokens becomes a sum:

    S_n = exp(G_n) S_0 + sum over i <= n of exp(G_n - G_i) delta_i k_i^T

Shapes: L layers, B requests, N tokens per block, G key heads, H value heads, K key width, V value width, S state slots,
R rows of the record, X values recorded per token (`record_width`).
Cost: reads and writes each fp32 state once, 8 L B H V K bytes, and reads the records of n tokens, 4 L B n X bytes.
Source: Yang et al. 2024, "Gated Delta Networks", arXiv:2412.06464, eq. 10 unrolled.
"""

from typing import NamedTuple

import torch
import triton
import triton.language as tl
from sglang_dflash_kernels.checks import Shapes
from sglang_dflash_kernels.dispatch import Forms
from sglang_dflash_kernels.gdn_verify import split_record
from sglang_dflash_kernels.record import record_width


class Kept(NamedTuple):
    """Number of tokens to keep and state slots of each request; int32 or int64.

    Apart from negative values, all state slots in `slot_B` and `track_slot_B` together must be different.
    """

    slot_B: torch.Tensor  # state slot of each request; negative: a padding request, whose state is not changed
    n_B: torch.Tensor  # number of the block's tokens to keep, 0..N; 0 leaves the state unchanged
    # A request's state after the block's token `track_step` (counted from 0, below n) is also stored in state slot
    # `track_slot`, if both values are non-negative. Both tensors None: no such state is stored.
    track_slot_B: torch.Tensor | None = None
    track_step_B: torch.Tensor | None = None


def gdn_fold_ref(state_LSHVK: torch.Tensor, record_LRNX: torch.Tensor, kept: Kept, *, n_key_heads: int) -> None:
    """Define `gdn_fold`: the recurrence, token by token, in float64."""
    for b, slot in enumerate(kept.slot_B.tolist()):
        if slot < 0:
            continue
        wanted = [(slot, int(kept.n_B[b]))]
        if kept.track_slot_B is not None and kept.track_step_B is not None:
            wanted.append((int(kept.track_slot_B[b]), int(kept.track_step_B[b]) + 1))
        before_LHVK = state_LSHVK[:, slot].double()
        for target, n in wanted:
            if target >= 0 and n > 0:
                after_LHVK = _after(before_LHVK, record_LRNX[:, b, :n].double(), n_key_heads)
                state_LSHVK[:, target] = after_LHVK.to(state_LSHVK.dtype)


def _after(state_LHVK: torch.Tensor, record_LNX: torch.Tensor, n_key_heads: int) -> torch.Tensor:
    """Return the state, [L, H, V, K], after all N tokens of `record_LNX`, starting from `state_LHVK`."""
    H, V, K = state_LHVK.shape[1:]
    delta_LNHV, key_LNGK, total_LNH = split_record(
        record_LNX, n_value_heads=H, value_width=V, n_key_heads=n_key_heads, key_width=K
    )
    key_LNHK = key_LNGK.repeat_interleave(H // n_key_heads, dim=2)
    decay_LNH = total_LNH.diff(dim=1, prepend=torch.zeros_like(total_LNH[:, :1])).exp()
    for i in range(record_LNX.shape[1]):
        added_LHVK = delta_LNHV[:, i, :, :, None] * key_LNHK[:, i, :, None, :]
        state_LHVK = decay_LNH[:, i, :, None, None] * state_LHVK + added_LHVK
    return state_LHVK


def gdn_fold_torch(state_LSHVK: torch.Tensor, record_LRNX: torch.Tensor, kept: Kept, *, n_key_heads: int) -> None:
    """Compute `gdn_fold` for all requests at once, by the sum in the module docstring."""
    slot_B = kept.slot_B
    before_LBHVK = state_LSHVK.index_select(1, slot_B.clamp(min=0)).float()
    wanted = [(slot_B, kept.n_B)]
    if kept.track_slot_B is not None and kept.track_step_B is not None:
        wanted.insert(0, (kept.track_slot_B, kept.track_step_B + 1))
    for target_B, length_B in wanted:
        row_W = ((slot_B >= 0) & (target_B >= 0) & (length_B > 0)).nonzero().flatten()
        if len(row_W):
            every = len(row_W) == len(slot_B)
            before, record, length_W, target_W = (
                (before_LBHVK, record_LRNX[:, : len(slot_B)], length_B, target_B)
                if every
                else (before_LBHVK[:, row_W], record_LRNX[:, row_W], length_B[row_W], target_B[row_W])
            )
            after_LWHVK = state_after(before, record, length_W.long(), n_key_heads)
            state_LSHVK.index_copy_(1, target_W.long(), after_LWHVK.to(state_LSHVK.dtype))


def state_after(
    state_LBHVK: torch.Tensor, record_LBNX: torch.Tensor, n_B: torch.Tensor, n_key_heads: int
) -> torch.Tensor:
    """Return S_n of each request, [L, B, H, V, K], for its n = `n_B` >= 1. Tokens after the n-th have weight 0."""
    (L, B, H, V, K), G, N = state_LBHVK.shape, n_key_heads, record_LBNX.shape[2]
    delta_LBNHV, key_LBNGK, total_LBNH = split_record(
        record_LBNX, n_value_heads=H, value_width=V, n_key_heads=G, key_width=K
    )
    n_B11 = n_B[:, None, None]
    end_LB1H = total_LBNH.gather(2, (n_B11 - 1).expand(L, B, 1, H))
    late_BN1 = torch.arange(N, device=n_B.device)[:, None] >= n_B11
    weight_LBNH = (end_LB1H - total_LBNH).masked_fill_(late_BN1, -torch.inf).exp_()
    # The value heads that share a key head are stacked as rows of one matrix, so one product serves them all.
    added_YWN = (delta_LBNHV * weight_LBNH[..., None]).permute(0, 1, 3, 4, 2).reshape(L * B * G, -1, N)
    key_YNK = key_LBNGK.transpose(2, 3).reshape(L * B * G, N, K)
    after_LBHVK = torch.bmm(added_YWN, key_YNK).view_as(state_LBHVK)
    return after_LBHVK.addcmul_(state_LBHVK, end_LB1H.transpose(2, 3)[..., None].exp())


@triton.jit(do_not_specialize_on_alignment=["slots", "lengths", "track_slots", "track_steps"])
def _gdn_fold_kernel(
    state, record, slots, lengths,
    track_slots, track_steps,  # None: no tracked states
    stride_layer, stride_slot, stride_record_layer, stride_row,
    H: tl.constexpr, G: tl.constexpr, V: tl.constexpr, K: tl.constexpr, X: tl.constexpr,
    BLOCK_V: tl.constexpr, BLOCK_K: tl.constexpr,
):  # fmt: skip
    # Consecutive programs are tiles of one head's state. So with four tiles, three find the keys in the L2 cache.
    TILES: tl.constexpr = (V + BLOCK_V - 1) // BLOCK_V
    h, tile = tl.program_id(0) // TILES, tl.program_id(0) % TILES
    request, layer = tl.program_id(1), tl.program_id(2)
    slot = tl.load(slots + request).to(tl.int64)
    n = tl.load(lengths + request)
    if (slot >= 0) & (n > 0):
        row = tile * BLOCK_V + tl.arange(0, BLOCK_V)  # [V]
        column = tl.arange(0, BLOCK_K)  # [K]
        in_V, in_K = row < V, column < K
        here = in_V[:, None] & in_K[None]
        cell = h * V * K + row[:, None] * K + column[None]  # [V, K]
        layer_state = state + layer.to(tl.int64) * stride_layer
        S = tl.load(layer_state + slot * stride_slot + cell, mask=here, other=0).to(tl.float32)
        rows = record + layer.to(tl.int64) * stride_record_layer + request.to(tl.int64) * stride_row
        track_slot, track_step = -1, -1
        if track_slots is not None:
            track_slot = tl.load(track_slots + request).to(tl.int64)
            track_step = tl.load(track_steps + request)
        before = 0.0
        # After iteration i, S is the state after token i, so the state to track is stored inside the loop.
        for i in range(n):
            total = tl.load(rows + i * X + H * V + G * K + h)
            delta_V = tl.load(rows + i * X + h * V + row, mask=in_V, other=0)
            k_K = tl.load(rows + i * X + H * V + h // (H // G) * K + column, mask=in_K, other=0)
            S = S * tl.exp(total - before) + delta_V[:, None] * k_K[None]
            before = total
            if (i == track_step) & (track_slot >= 0):
                tl.store(layer_state + track_slot * stride_slot + cell, S.to(state.dtype.element_ty), mask=here)
        tl.store(layer_state + slot * stride_slot + cell, S.to(state.dtype.element_ty), mask=here)


def gdn_fold_triton(state_LSHVK: torch.Tensor, record_LRNX: torch.Tensor, kept: Kept, *, n_key_heads: int) -> None:
    """Compute `gdn_fold` by its kernel: one program per layer, request, value head and tile of the state's rows."""
    (L, _, H, V, K), B = state_LSHVK.shape, len(kept.slot_B)
    block_v = min(32, triton.next_power_of_2(V))
    _gdn_fold_kernel[(H * triton.cdiv(V, block_v), B, L)](
        *(state_LSHVK, record_LRNX, *kept),
        *state_LSHVK.stride()[:2],
        *record_LRNX.stride()[:2],
        *(H, n_key_heads, V, K, record_LRNX.shape[-1], block_v, triton.next_power_of_2(K)),
        num_warps=4,
    )


GDN_FOLD = Forms(on_cpu=gdn_fold_torch, on_gpu=gdn_fold_triton)


def gdn_fold(state_LSHVK: torch.Tensor, record_LRNX: torch.Tensor, kept: Kept, *, n_key_heads: int) -> None:
    """Advance the states of B >= 1 requests by the first n tokens of their blocks, in place.

    Args:
        state_LSHVK: fp32, bf16 or fp16. Sums are computed in fp32. Layers and state slots may be strided.
        record_LRNX: fp32, written by `gdn_verify`; row b belongs to request b of the batch, and N is the number of
            tokens of the verified block.
        kept: number of tokens to keep and state slots of each request.
        n_key_heads: G.
    Raises:
        ValueError: shapes, dtypes or layouts that do not fit.
    """
    shapes = Shapes()
    shapes.check_strided(torch.float32, torch.bfloat16, torch.float16, state_LSHVK=state_LSHVK)
    shapes.check_strided(torch.float32, record_LRNX=record_LRNX)
    given = {name: tensor for name, tensor in kept._asdict().items() if tensor is not None}
    if len(given) == 3:
        raise ValueError(f"{list(given)[2]} is given alone; track_slot_B and track_step_B go together")
    shapes.check(torch.int32, torch.int64, **given)
    H, V, K, X, B, R = (shapes[letter] for letter in "HVKXBR")
    if H % n_key_heads or B > R or record_width(H, V, n_key_heads, K) != X:
        raise ValueError(
            f"{B} requests, {n_key_heads} key and {H} value heads of {K} and {V} do not fit a record of shape "
            f"{tuple(record_LRNX.shape)}; pass a row per request, a multiple of {n_key_heads} value heads, and "
            "record_width values per token"
        )
    if state_LSHVK.stride()[2:] != (V * K, K, 1) or record_LRNX.stride()[2:] != (X, 1):
        raise ValueError(
            f"state has strides {state_LSHVK.stride()} and record {record_LRNX.stride()}; all but the first two must "
            "be those of contiguous tensors"
        )
    GDN_FOLD.form_for(state_LSHVK)(state_LSHVK, record_LRNX, kept, n_key_heads=n_key_heads)
