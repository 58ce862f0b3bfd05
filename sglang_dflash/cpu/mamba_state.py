"""Moves of recurrent and convolution states between slots: prefix-cache checkpoints, and the commit after verify.

Dimension key: B requests, L layers, S slots of the state pool, R rows of the buffer that verify writes (the scratch), N
steps, i.e. slots of a block; `...` is the state itself.
"""

import numpy as np
import torch


def track_mamba_states_if_needed(
    conv_states: torch.Tensor,
    ssm_states: torch.Tensor,
    cache_indices: torch.Tensor,
    mamba_track_mask: torch.Tensor,
    mamba_track_indices: torch.Tensor,
    batch_size: int,
    check_freed_slots: bool = False,
) -> None:
    """Copy one layer's states [S, ...] of the requests in `mamba_track_mask` to their tracking slots, in place."""
    track_mamba_states_all_layers(
        conv_states[None],
        ssm_states[None],
        cache_indices,
        mamba_track_mask,
        mamba_track_indices,
        batch_size,
        check_freed_slots,
    )


def track_mamba_states_all_layers(
    conv_states_pool: torch.Tensor,
    ssm_states_pool: torch.Tensor,
    cache_indices: torch.Tensor,
    mamba_track_mask: torch.Tensor,
    mamba_track_indices: torch.Tensor,
    batch_size: int,
    check_freed_slots: bool = False,
) -> None:
    """Copy all layers' states [L, S, ...] of the requests in `mamba_track_mask` to their tracking slots, in place.

    Negative slots are skipped with `check_freed_slots`, and not allowed without it.
    """
    tracked = mamba_track_mask[:batch_size].nonzero().flatten()
    for source, target in zip(cache_indices[tracked].tolist(), mamba_track_indices[tracked].tolist(), strict=True):
        if check_freed_slots and min(source, target) < 0:
            continue
        for pool in (conv_states_pool, ssm_states_pool):
            pool[:, target] = pool[:, source]


def scatter_states_with_mask(
    dst: torch.Tensor,
    src: torch.Tensor,
    dst_indices_raw: torch.Tensor,
    step_indices_raw: torch.Tensor,
    src_indices_raw: torch.Tensor | None = None,
) -> None:
    """Copy each request's state after one step from the scratch to a slot of the pool, in all layers.

    Request b's step is `step_indices_raw[b]`, its slot `dst_indices_raw[b]`. Its scratch row is `src_indices_raw[b]`,
    or b if these indices are None. dst is [L, S, ...], src [L, R, N, ...] (possibly an overlapping view). A request is
    skipped if its step, slot or scratch row is out of range, such as -1, which SGLang passes. Replaces both the kernel
    for recurrent states and the kernel for convolution windows, which differ only in memory layout.
    """
    rows = range(len(step_indices_raw)) if src_indices_raw is None else src_indices_raw.tolist()
    # A state has many kilobytes, so single copies are faster than gather and scatter.
    for row, step, slot in zip(rows, step_indices_raw.tolist(), dst_indices_raw.tolist(), strict=True):
        if 0 <= step < src.shape[2] and 0 <= slot < dst.shape[1] and 0 <= row < src.shape[1]:
            dst[:, slot] = src[:, row, step]


def no_fused_conv_scatter(pairs: list[tuple[torch.Tensor, torch.Tensor]]) -> bool:
    """Return False, so that SGLang scatters convolution windows pair by pair, without a fused kernel."""
    return False


def fused_commit_track_indices(
    accept_index: torch.Tensor,
    accept_lens: torch.Tensor,
    seq_lens: torch.Tensor | None,
    draft_token_num: int,
    mamba_track_interval: int,
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """Find in every block the slot of the last kept row, and the slot that completes a track interval.

    With a prefix of p tokens and n kept rows, the largest multiple of the interval is m = (p + n) // interval *
    interval. Slot m - p - 1 completes the interval if m > p.

    Args:
        accept_index: int64 [B, at most N], the indices of the kept rows in [B * N].
        accept_lens: int32 or int64 [B], number of kept rows, 1..N.
        seq_lens: int64 [B], number of tokens before the block; None: nothing is tracked.
        draft_token_num: N.
    Returns:
        Both slots, int64 [B]. The second is -1 if no interval is completed, and None without `seq_lens`.
    """
    index_BN, n_B = accept_index.numpy(), accept_lens.numpy()
    row_B = np.arange(len(n_B))
    last_B = index_BN[row_B, n_B - 1] - row_B * draft_token_num
    if seq_lens is None:
        return torch.from_numpy(last_B), None
    prefix_B = seq_lens.numpy()
    slot_B = (prefix_B + n_B) // mamba_track_interval * mamba_track_interval - prefix_B - 1
    tracked_B = index_BN[row_B, slot_B.clip(0)] - row_B * draft_token_num
    return torch.from_numpy(last_B), torch.from_numpy(np.where(slot_B >= 0, tracked_B, -1))
