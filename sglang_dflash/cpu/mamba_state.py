"""Moving recurrent and convolution states between slots: radix checkpoints, and the commit after verify.

Dimension key: B requests, L layers, S slots of the state pool, R rows of the verify scratch, N steps of a block;
`...` is the state itself.
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
    """Copy the masked requests' states [S, ...] of one layer to their tracking slots, in place."""
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
    """Copy the masked requests' states [L, S, ...] of all layers to their tracking slots, in place.

    With `check_freed_slots` a negative slot, source or target, is left alone; without it there is none.
    """
    tracked_B = mamba_track_mask[:batch_size].bool()
    if check_freed_slots:
        tracked_B = tracked_B & (cache_indices[:batch_size] >= 0) & (mamba_track_indices[:batch_size] >= 0)
    rows = tracked_B.nonzero().flatten()
    if not rows.numel():
        return
    source, target = cache_indices[rows].long(), mamba_track_indices[rows].long()
    for pool in (conv_states_pool, ssm_states_pool):
        pool[:, target] = pool[:, source]


def scatter_states_with_mask(
    dst: torch.Tensor,
    src: torch.Tensor,
    dst_indices_raw: torch.Tensor,
    step_indices_raw: torch.Tensor,
    src_indices_raw: torch.Tensor | None = None,
) -> None:
    """Put the state after step `step_indices_raw[b]` of scratch row b into slot `dst_indices_raw[b]`, in all layers.

    dst [L, S, ...], src [L, R, N, ...] (possibly an overlapping view). A row whose step, slot or scratch row lies
    outside its range is left alone: SGLang marks "nothing to do" by -1. Stands in for the kernel of recurrent states
    and for that of convolution windows, which differ only in memory layout.
    """
    if not step_indices_raw.numel():
        return
    rows = torch.arange(step_indices_raw.shape[0]) if src_indices_raw is None else src_indices_raw
    step_B, slot_B, row_B = step_indices_raw.long(), dst_indices_raw.long(), rows.long()
    valid_B = _within(step_B, src.shape[2]) & _within(slot_B, dst.shape[1]) & _within(row_B, src.shape[1])
    kept = valid_B.nonzero().flatten()
    if kept.numel():
        dst[:, slot_B[kept]] = src[:, row_B[kept], step_B[kept]].to(dst.dtype)


def _within(index: torch.Tensor, size: int) -> torch.Tensor:
    return (index >= 0) & (index < size)


def no_fused_conv_scatter(pairs: list[tuple[torch.Tensor, torch.Tensor]]) -> bool:
    """SGLang asks whether one launch may move all convolution windows; without a kernel it moves them pair by pair."""
    return False
