"""Copies of recurrent and convolution states between state slots, for the prefix cache and for the commit after verify.

Dimension key: B requests, L layers, S state slots, R rows of the buffer that verify writes (the scratch), N block slots
(SGLang's arguments name them steps); `...` is the state itself.
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
    """Copy one layer's states [S, ...] in place, as `track_mamba_states_all_layers` does for all layers."""
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
    """Copy all layers' states [L, S, ...], in place, for the requests in `mamba_track_mask`.

    The source is the request's state slot in `cache_indices`, the target its state slot in `mamba_track_indices`.
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
    """Copy each request's state after one block slot from the scratch to its state slot, in all layers.

    Request b's block slot is `step_indices_raw[b]`, its state slot `dst_indices_raw[b]`. Its scratch row is
    `src_indices_raw[b]`, or b if `src_indices_raw` is None. dst is [L, S, ...], src [L, R, N, ...] (possibly an
    overlapping view). A request is skipped if one of these indices is out of range, such as -1, which SGLang passes.
    Replaces both the kernel for recurrent states and the kernel for convolution windows: only the layout differs.
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
    """Find in every block the block slot of the last kept row, and the one that completes a track interval.

    The prefix cache gets the states at multiples of `mamba_track_interval` tokens. With a prefix of p tokens and n kept
    rows, the last multiple is m = (p + n) // interval * interval. Block slot m - p - 1 completes the interval if m > p.

    Args:
        accept_index: int64 [B, at most N], the indices of the kept rows in the packed blocks [B * N].
        accept_lens: int32 or int64 [B], number of kept rows, 1..N.
        seq_lens: int64 [B], number of tokens before the block; None: nothing is tracked.
        draft_token_num: N.
    Returns:
        Both block slots, int64 [B]. The second is -1 if no interval is completed, and None without `seq_lens`.
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
