"""Verify without a state per token: keep a block's inputs, and fold the accepted ones into the state at commit.

The rings hold one block per state slot: raw values and keys, log decays and betas. They are what
`fused_sigmoid_gating_delta_rule_update` is asked for with `cache_ring`, and what SGLang's fold reads.

Dimension key: L layers, B requests, X = L B blocks, N tokens of a block, G key heads, R value heads per key head,
H = G R, K key width, V value width, S state slots. All sums are fp32.
"""

from typing import NamedTuple

import torch

from sglang_dflash.cpu.gdn_block import l2_normalised
from sglang_dflash.cpu.refuse import refuse


class Inputs(NamedTuple):
    """What one layer's recurrence is fed over a block."""

    k_BNGK: torch.Tensor  # before normalisation
    v_BNHV: torch.Tensor
    g_BNH: torch.Tensor
    beta_BNH: torch.Tensor


class Rings(NamedTuple):
    """Where one layer keeps them, by state slot."""

    k_SGNK: torch.Tensor
    v_SHNV: torch.Tensor
    g_SHN: torch.Tensor
    beta_SHN: torch.Tensor


def keep(inputs: Inputs, slot_B: torch.Tensor, rings: Rings) -> None:
    """Write a block's inputs over those of the block before; a shorter block leaves the rest as it was."""
    for ring, values in zip(rings, inputs, strict=True):
        ring[:, :, : values.shape[1]].index_copy_(0, slot_B, values.transpose(1, 2).to(ring.dtype))


def commit_gdn_replayssm_fold_all_layers(
    checkpoint_state: torch.Tensor,
    rawv_cache: torch.Tensor,
    rawk_cache: torch.Tensor,
    g_cache: torch.Tensor,
    beta_cache: torch.Tensor,
    ssm_state_indices: torch.Tensor,
    accept_lens: torch.Tensor,
    max_cache_len: int,
    num_k_heads: int,
    mamba_track_indices: torch.Tensor | None = None,
    mamba_steps_to_track: torch.Tensor | None = None,
    use_qk_l2norm_in_kernel: bool = True,
    null_block_id: int = -1,
) -> None:
    """Fold the first `accept_lens` tokens of each request's block into its states [L, S, H, V, K], in place.

    Where `mamba_steps_to_track` is t >= 0, the state after token t also goes to slot `mamba_track_indices`.
    """
    refuse("fold", {"unnormalised keys": not use_qk_l2norm_in_kernel, "null_block_id": null_block_id != -1})
    live_B = (ssm_state_indices >= 0) & (accept_lens > 0)
    slot_B, n_B = ssm_state_indices[live_B].long(), accept_lens[live_B].long()
    if not len(slot_B):
        return
    caches = (checkpoint_state, rawk_cache, rawv_cache, g_cache, beta_cache)
    block = Folding.of(*(cache.index_select(1, slot_B) for cache in caches))
    after_LBHVK = block.state_after(n_B)
    if mamba_track_indices is not None and mamba_steps_to_track is not None:
        track_B, step_B = mamba_track_indices[live_B].long(), mamba_steps_to_track[live_B].long()
        crossed_B = (track_B >= 0) & (step_B >= 0)
        if crossed_B.any():
            at_track_LBHVK = block.state_after(step_B.clamp(min=0) + 1)
            checkpoint_state[:, track_B[crossed_B]] = at_track_LBHVK[:, crossed_B].to(checkpoint_state.dtype)
    checkpoint_state.index_copy_(1, slot_B, after_LBHVK.to(checkpoint_state.dtype))


class Folding(NamedTuple):
    """The blocks of all layers, solved: what each token adds to the state, and how the state fades.

    The value heads that share a key head are more rows of one matrix, so no key is repeated.
    """

    state_XGWK: torch.Tensor  # before the block; W = R V
    k_XGNK: torch.Tensor  # normalised
    delta_XGRNV: torch.Tensor
    total_XGRN: torch.Tensor  # log decay since before the block
    n_layers: int

    @classmethod
    def of(
        cls,
        state_LBHVK: torch.Tensor,
        k_LBGNK: torch.Tensor,
        v_LBHNV: torch.Tensor,
        g_LBHN: torch.Tensor,
        beta_LBHN: torch.Tensor,
    ) -> "Folding":
        """A token's delta depends on the tokens before it only, so rejected ones need no mask: they are not summed."""
        L, B, G, N, K = k_LBGNK.shape
        V = v_LBHNV.shape[-1]
        state_XGWK = state_LBHVK.float().view(L * B, G, -1, K)
        v_XGRNV = v_LBHNV.float().view(L * B, G, -1, N, V)
        total_XGRN = g_LBHN.view(L * B, G, -1, N).cumsum(dim=-1)
        beta_XGRN1 = beta_LBHN.view(L * B, G, -1, N, 1)
        k_XGNK = l2_normalised(k_LBGNK.float().view(L * B, G, N, K))
        decay_XGRNN = (total_XGRN[..., None] - total_XGRN[..., None, :]).tril_().exp_()
        alike_XG1NN = (k_XGNK @ k_XGNK.transpose(2, 3))[:, :, None]
        found_XGNRV = (k_XGNK @ state_XGWK.transpose(2, 3)).view(L * B, G, N, -1, V)
        found_XGRNV = found_XGNRV.transpose(2, 3) * total_XGRN.exp()[..., None]
        delta_XGRNV = torch.linalg.solve_triangular(  # looks below the diagonal only
            decay_XGRNN.mul_(alike_XG1NN).mul_(beta_XGRN1),
            beta_XGRN1 * (v_XGRNV - found_XGRNV),
            upper=False,
            unitriangular=True,
        )
        return cls(state_XGWK, k_XGNK, delta_XGRNV, total_XGRN, L)

    def state_after(self, n_B: torch.Tensor) -> torch.Tensor:
        """The states after the first n >= 1 tokens of each block, [L, B, H, V, K]."""
        X, G, R, N, V = self.delta_XGRNV.shape
        n_X111 = n_B.repeat(self.n_layers)[:, None, None, None]
        at_n_XGR1 = self.total_XGRN.gather(3, (n_X111 - 1).expand(X, G, R, 1))
        left_XGRN = (at_n_XGR1 - self.total_XGRN).masked_fill_(torch.arange(N) >= n_X111, -torch.inf).exp_()
        added_XGWN = (self.delta_XGRNV * left_XGRN[..., None]).transpose(3, 4).reshape(X, G, R * V, N)
        after_XGRVK = (added_XGWN @ self.k_XGNK).view(X, G, R, V, -1)
        after_XGRVK.addcmul_(self.state_XGWK.view_as(after_XGRVK), at_n_XGR1.exp()[..., None])
        return after_XGRVK.view(self.n_layers, -1, G * R, V, after_XGRVK.shape[-1])
