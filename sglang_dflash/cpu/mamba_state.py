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
    """Put the state after step `step_indices_raw[b]` of scratch row b into slot `dst_indices_raw[b]`, in all layers.

    dst [L, S, ...], src [L, R, N, ...] (possibly an overlapping view). A row whose step, slot or scratch row lies
    outside its range is left alone: SGLang marks "nothing to do" by -1. Stands in for the kernel of recurrent states
    and for that of convolution windows, which differ only in memory layout.
    """
    rows = range(len(step_indices_raw)) if src_indices_raw is None else src_indices_raw.tolist()
    # A state is many kilobytes: one plain copy each is faster than gathering them all and scattering them again.
    for row, step, slot in zip(rows, step_indices_raw.tolist(), dst_indices_raw.tolist(), strict=True):
        if 0 <= step < src.shape[2] and 0 <= slot < dst.shape[1] and 0 <= row < src.shape[1]:
            dst[:, slot] = src[:, row, step]


def no_fused_conv_scatter(pairs: list[tuple[torch.Tensor, torch.Tensor]]) -> bool:
    """SGLang asks whether one launch may move all convolution windows; without a kernel it moves them pair by pair."""
    return False
