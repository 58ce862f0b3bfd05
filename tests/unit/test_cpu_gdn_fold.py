import torch

from sglang_dflash.cpu.gdn import fused_sigmoid_gating_delta_rule_update
from sglang_dflash.cpu.gdn_fold import commit_gdn_replayssm_fold_all_layers

L, S, H, G, N, K, V = 3, 9, 4, 2, 6, 8, 16


def recurrence(
    state_HVK: torch.Tensor, k_GNK: torch.Tensor, v_HNV: torch.Tensor, g_HN: torch.Tensor, beta_HN: torch.Tensor
) -> list[torch.Tensor]:
    """The definition, one token at a time: the states after every token of one block."""
    k_HNK = (k_GNK / (k_GNK.pow(2).sum(-1, keepdim=True) + 1e-6).sqrt()).repeat_interleave(H // G, 0)
    states = []
    for t in range(N):
        state_HVK = state_HVK * g_HN[:, t, None, None].exp()
        found_HV = (state_HVK * k_HNK[:, t, None]).sum(-1)
        delta_HV = beta_HN[:, t, None] * (v_HNV[:, t] - found_HV)
        state_HVK = state_HVK + delta_HV[..., None] * k_HNK[:, t, None]
        states.append(state_HVK)
    return states


def rings(seed: int) -> tuple[torch.Tensor, ...]:
    random = torch.Generator().manual_seed(seed)
    state = torch.randn(L, S, H, V, K, generator=random)
    v, k = torch.randn(L, S, H, N, V, generator=random), torch.randn(L, S, G, N, K, generator=random)
    g, beta = -torch.rand(L, S, H, N, generator=random) * 3, torch.rand(L, S, H, N, generator=random)
    return state, v, k, g, beta


def fold(state: torch.Tensor, others: tuple[torch.Tensor, ...], **where: list[int] | None) -> torch.Tensor:
    v, k, g, beta = others
    tensors = {name: None if x is None else torch.tensor(x) for name, x in where.items()}
    after = state.clone()
    commit_gdn_replayssm_fold_all_layers(after, v, k, g, beta, max_cache_len=N, num_k_heads=G, **tensors)
    return after


def test_the_accepted_prefix_is_folded_and_nothing_else_moves() -> None:
    state, v, k, g, beta = rings(0)
    slots, n = [5, 2, 7], [1, 4, 6]
    after = fold(state, (v, k, g, beta), ssm_state_indices=slots, accept_lens=n)
    for layer in range(L):
        for slot, count in zip(slots, n, strict=True):
            states = recurrence(state[layer, slot], k[layer, slot], v[layer, slot], g[layer, slot], beta[layer, slot])
            torch.testing.assert_close(after[layer, slot], states[count - 1], rtol=1e-5, atol=1e-5)
    untouched = [s for s in range(S) if s not in slots]
    assert torch.equal(after[:, untouched], state[:, untouched])


def test_a_crossing_leaves_its_state_in_the_tracking_slot() -> None:
    state, v, k, g, beta = rings(1)
    after = fold(
        state,
        (v, k, g, beta),
        ssm_state_indices=[5, 2, 7],
        accept_lens=[5, 4, 6],
        mamba_track_indices=[1, 3, -1],
        mamba_steps_to_track=[2, -1, 0],
    )
    for layer in range(L):
        states = recurrence(state[layer, 5], k[layer, 5], v[layer, 5], g[layer, 5], beta[layer, 5])
        torch.testing.assert_close(after[layer, 1], states[2], rtol=1e-5, atol=1e-5)
        torch.testing.assert_close(after[layer, 5], states[4], rtol=1e-5, atol=1e-5)
    assert torch.equal(after[:, 3], state[:, 3])  # no crossing


def test_padding_and_empty_rows_are_left_alone() -> None:
    state, *others = rings(2)
    after = fold(state, tuple(others), ssm_state_indices=[-1, 4], accept_lens=[3, 0])
    assert torch.equal(after, state)


def test_verify_keeps_what_the_fold_needs() -> None:
    """Verify with rings, then fold n tokens: the state is that of a verify which updates it over n tokens."""
    torch.manual_seed(3)
    q, k = torch.randn(1, N, G, K), torch.randn(1, N, G, K)
    v, a, b = torch.randn(1, N, H, V), torch.randn(N, H), torch.randn(N, H)
    A_log, dt_bias, pool = torch.rand(H), torch.randn(H), torch.randn(L, S, H, V, K)
    kept = {
        "replayssm_rawv": torch.zeros(S, H, N, V),
        "replayssm_rawk": torch.zeros(S, G, N, K),
        "replayssm_g": torch.zeros(S, H, N),
        "replayssm_beta": torch.zeros(S, H, N),
    }

    def verify(n: int, state: torch.Tensor, **options: object) -> None:
        tokens = (q[:, :n], k[:, :n], v[:, :n], b[:n])
        fused_sigmoid_gating_delta_rule_update(
            A_log, a[:n], dt_bias, 1.0, 20.0, *tokens, state, torch.tensor([4]),
            use_qk_l2norm_in_kernel=True, cu_seqlens=torch.tensor([0, n]), **options,
        )  # fmt: skip

    before = pool.clone()
    verify(N, pool[0], disable_state_update=True, cache_ring=True, **kept)
    assert torch.equal(pool, before)
    updated = pool[0].clone()
    verify(3, updated)
    v_ring, k_ring, g_ring, beta_ring = (ring[None].repeat(L, *[1] * ring.ndim) for ring in kept.values())
    after = fold(pool, (v_ring, k_ring, g_ring, beta_ring), ssm_state_indices=[4], accept_lens=[3])
    torch.testing.assert_close(after[0], updated, rtol=1e-5, atol=1e-5)
