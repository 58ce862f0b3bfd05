"""Copies of recurrent and convolution states between state slots, for the prefix cache and for the commit after verify.

Dimension key: B requests, L layers, S state slots, R rows of the buffer that verify writes (the scratch), N block slots
(SGLang's arguments name them steps); `...` is the state itself.
"""

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
