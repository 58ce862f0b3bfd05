"""The gated delta rule on CPU must equal its definition, one token at a time, and Transformers' Qwen3.5."""

import pytest
import torch
import torch.nn.functional as F
from transformers.models.qwen3_5.modeling_qwen3_5 import torch_recurrent_gated_delta_rule

from sglang_dflash.platforms.cpu import gdn

G, H, K, V = 2, 4, 16, 8
TOLERANCE = {"atol": 1e-5, "rtol": 1e-5}


class Inputs:
    """Random projections of packed tokens. The decay factors of the state range from almost 0 to almost 1."""

    def __init__(self, n_tokens: int, n_slots: int = 6) -> None:
        torch.manual_seed(n_tokens)
        self.q, self.k = torch.randn(1, n_tokens, G, K), torch.randn(1, n_tokens, G, K)
        self.v = torch.randn(1, n_tokens, H, V)
        self.a, self.b = 3 * torch.randn(n_tokens, H), torch.randn(n_tokens, H)
        self.A_log, self.dt_bias = torch.empty(H).uniform_(-2, 2), torch.empty(H).uniform_(-3, 1)
        self.pool = torch.randn(n_slots, H, V, K)
        self.g = -self.A_log.exp() * torch.log1p(torch.exp(self.a + self.dt_bias))
        self.beta = 1 / (1 + torch.exp(-self.b))


def one_by_one(inputs: Inputs, tokens: range, state_HVK: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Apply the gated delta rule token by token; return outputs [T, H, V] and states after each token [T, H, V, K]."""
    outputs, states = [], []
    for t in tokens:
        q_HK = F.normalize(inputs.q[0, t], dim=-1).repeat_interleave(H // G, 0) * K**-0.5
        k_HK = F.normalize(inputs.k[0, t], dim=-1).repeat_interleave(H // G, 0)
        state_HVK = state_HVK * inputs.g[t].exp()[:, None, None]
        delta_HV = (inputs.v[0, t] - torch.einsum("hvk,hk->hv", state_HVK, k_HK)) * inputs.beta[t][:, None]
        state_HVK = state_HVK + torch.einsum("hv,hk->hvk", delta_HV, k_HK)
        outputs.append(torch.einsum("hvk,hk->hv", state_HVK, q_HK))
        states.append(state_HVK)
    return torch.stack(outputs), torch.stack(states)


def test_the_definition_equals_transformers():
    inputs = Inputs(9)
    outputs, states = one_by_one(inputs, range(9), inputs.pool[2])
    want, final = torch_recurrent_gated_delta_rule(
        inputs.q.repeat_interleave(H // G, 2),
        inputs.k.repeat_interleave(H // G, 2),
        inputs.v,
        g=inputs.g[None],
        beta=inputs.beta[None],
        initial_state=inputs.pool[2:3].transpose(-1, -2),
        output_final_state=True,
        use_qk_l2norm_in_kernel=True,
    )
    torch.testing.assert_close(outputs, want[0], **TOLERANCE)
    torch.testing.assert_close(states[-1], final[0].transpose(-1, -2), **TOLERANCE)


def test_gates():
    inputs = Inputs(7)
    g, beta = gdn.fused_gdn_gating(inputs.A_log, inputs.a, inputs.b, inputs.dt_bias)
    torch.testing.assert_close(g, inputs.g[None], **TOLERANCE)
    torch.testing.assert_close(beta, inputs.beta[None], **TOLERANCE)


def test_gates_of_large_inputs_are_linear_and_beta_has_the_precision_of_b():
    a, b = torch.tensor([[500.0]]), torch.tensor([[0.3]], dtype=torch.bfloat16)
    g, beta = gdn.fused_gdn_gating(torch.zeros(1), a, b, torch.zeros(1))
    assert g.item() == -500.0
    assert beta.dtype == torch.float32
    assert beta.item() == b.float().sigmoid().bfloat16().float().item()


def prefill(inputs: Inputs, slots: list[int], pool: torch.Tensor, bounds: torch.Tensor, **more: object) -> tuple:
    arguments = {"q": inputs.q, "k": inputs.k, "v": inputs.v, "g": inputs.g[None], "beta": inputs.beta[None]}
    states = {"initial_state": pool, "initial_state_indices": torch.tensor(slots, dtype=torch.int32)}
    return gdn.chunk_gated_delta_rule(**arguments, **states, cu_seqlens=bounds, use_qk_l2norm_in_kernel=True, **more)


@pytest.mark.parametrize("lengths", [[1], [64], [65], [5, 130, 64], [1, 1, 200], [63, 0, 2]], ids=str)
def test_prefill_equals_one_token_at_a_time(lengths):
    inputs = Inputs(sum(lengths))
    slots, bounds, pool = [4, 0, 2][: len(lengths)], torch.tensor([0, *lengths]).cumsum(0).int(), inputs.pool.clone()
    out, nothing, before = prefill(inputs, slots, pool, bounds)
    assert nothing is None
    want_pool, want_before = inputs.pool.clone(), []
    for slot, start, end in zip(slots, bounds, bounds[1:], strict=False):
        if start == end:
            continue
        outputs, states = one_by_one(inputs, range(start, end), inputs.pool[slot])
        torch.testing.assert_close(out[0, start:end], outputs, **TOLERANCE)
        want_pool[slot] = states[-1]
        want_before += [inputs.pool[slot], *states[63 : end - start - 1 : 64]]
    torch.testing.assert_close(pool, want_pool, **TOLERANCE)
    torch.testing.assert_close(before, torch.stack(want_before)[None], **TOLERANCE)


def test_prefill_without_a_slot_starts_from_zero_and_keeps_nothing():
    inputs, bounds = Inputs(70), torch.tensor([0, 70])
    pool = inputs.pool.clone()
    out, _, before = prefill(inputs, [-1], pool, bounds)
    outputs, states = one_by_one(inputs, range(70), torch.zeros(H, V, K))
    torch.testing.assert_close(out[0], outputs, **TOLERANCE)
    torch.testing.assert_close(before[0], torch.stack([torch.zeros(H, V, K), states[63]]), **TOLERANCE)
    prefill(inputs, [3], pool, bounds, inplace_update=False)
    assert torch.equal(pool, inputs.pool)


def decode(inputs: Inputs, slots: list[int], pool: torch.Tensor) -> torch.Tensor:
    n = len(slots)
    out = torch.full((n, 1, H, V), torch.nan)
    gdn.fused_recurrent_gated_delta_rule_packed_decode(
        mixed_qkv=torch.cat([x[0].flatten(1) for x in (inputs.q, inputs.k, inputs.v)], dim=1)[:n],
        a=inputs.a[:n],
        b=inputs.b[:n],
        A_log=inputs.A_log,
        dt_bias=inputs.dt_bias,
        scale=K**-0.5,
        initial_state=pool,
        out=out,
        ssm_state_indices=torch.tensor(slots, dtype=torch.int32),
        use_qk_l2norm_in_kernel=True,
    )
    return out


@pytest.mark.parametrize("B", [1, 3])
def test_decode_is_one_token(B):
    inputs, slots = Inputs(B), [5, 1, 3][:B]
    pool, want_pool = inputs.pool.clone(), inputs.pool.clone()
    out = decode(inputs, slots, pool)
    for i, slot in enumerate(slots):
        outputs, states = one_by_one(inputs, range(i, i + 1), inputs.pool[slot])
        torch.testing.assert_close(out[i], outputs, **TOLERANCE)
        want_pool[slot] = states[0]
    torch.testing.assert_close(pool, want_pool, **TOLERANCE)


def test_padded_rows_of_decode_are_zeros():
    inputs = Inputs(3)
    pool, alone = inputs.pool.clone(), inputs.pool.clone()
    out = decode(inputs, [4, -1, -1], pool)
    assert (out[1:] == 0).all()
    torch.testing.assert_close(out[:1], decode(inputs, [4], alone))
    torch.testing.assert_close(pool, alone)


def verify(inputs: Inputs, slots: list[int], pool: torch.Tensor, **arguments: object) -> torch.Tensor:
    n_tokens = inputs.q.shape[1]
    given = {name: vars(inputs)[name] for name in ("q", "k", "v", "a", "b", "A_log", "dt_bias")}
    return gdn.fused_sigmoid_gating_delta_rule_update(
        **given,
        softplus_beta=1.0,
        softplus_threshold=20.0,
        initial_state_source=pool,
        initial_state_indices=torch.tensor(slots, dtype=torch.int32),
        use_qk_l2norm_in_kernel=True,
        **{"cu_seqlens": torch.arange(0, n_tokens + 1, n_tokens // len(slots), dtype=torch.int32), **arguments},
    )


def verify_into(scratch: torch.Tensor, rows: list[int], *arguments, **more: object) -> torch.Tensor:
    """Run `verify`: write the state after every token to `rows` of `scratch`, and leave the pool unchanged."""
    indices = torch.tensor(rows, dtype=torch.int32)
    keep = {"intermediate_states_buffer": scratch, "intermediate_state_indices": indices}
    return verify(*arguments, disable_state_update=True, **keep, **more)


@pytest.mark.parametrize("scratch_rows", [[0, 1, 2], [3, 0, 1]], ids=["rows in order", "rows out of order"])
@pytest.mark.parametrize(("B", "C"), [(1, 1), (1, 16), (3, 5), (3, 16)])
def test_verify_equals_one_token_at_a_time_and_keeps_every_state(B: int, C: int, scratch_rows: list[int]):
    inputs = Inputs(B * C)
    slots, rows = [5, 1, 3][:B], scratch_rows[:B]
    pool, scratch = inputs.pool.clone(), torch.full((4, C + 2, H, V, K), 7.0)
    out = verify_into(scratch, [*rows, 0], inputs, slots, pool, cache_steps=C + 2, retrieve_parent_token=None)
    assert torch.equal(pool, inputs.pool)
    want_scratch = torch.full_like(scratch, 7.0)
    for i in range(B):
        outputs, states = one_by_one(inputs, range(i * C, (i + 1) * C), inputs.pool[slots[i]])
        torch.testing.assert_close(out[0, i * C : (i + 1) * C], outputs, **TOLERANCE)
        want_scratch[rows[i], :C] = states
    torch.testing.assert_close(scratch, want_scratch, **TOLERANCE)


def test_an_update_writes_the_slot():
    inputs = Inputs(6)
    pool = inputs.pool.clone()
    verify(inputs, [2, 4], pool)
    for i, slot in enumerate([2, 4]):
        _, states = one_by_one(inputs, range(3 * i, 3 * i + 3), inputs.pool[slot])
        torch.testing.assert_close(pool[slot], states[-1], **TOLERANCE)


def test_a_block_is_computed_alike_in_any_batch():
    inputs, wide = Inputs(32), torch.zeros(2, 16, H, V, K)
    both = verify_into(wide, [0, 1], inputs, [2, 4], inputs.pool)
    alone, narrow = Inputs(32), torch.zeros(2, 16, H, V, K)
    for name in ("q", "k", "v"):
        setattr(alone, name, inputs.__dict__[name][:, 16:20])
    alone.a, alone.b = inputs.a[16:20], inputs.b[16:20]
    one = verify_into(narrow, [0, 1], alone, [4], inputs.pool)
    torch.testing.assert_close(one[0], both[0, 16:20], atol=1e-6, rtol=1e-6)
    torch.testing.assert_close(narrow[0, :4], wide[1, :4], atol=1e-6, rtol=1e-6)


@pytest.mark.parametrize("argument", ["is_kda", "lower_bound", "retrieve_parent_token"])
def test_undefined_arguments_are_refused_by_name(argument: str):
    inputs = Inputs(4)
    with pytest.raises(NotImplementedError, match=argument):
        verify(inputs, [0], inputs.pool, **{argument: True})


@pytest.mark.parametrize("slots", [[2, -1, -1], [-1, -1, -1]], ids=["one real row", "no real row"])
def test_padded_rows_of_verify_are_skipped(slots: list[int]):
    """The last requests of a captured batch are padding: state slot -1, no tokens. Then cu_seqlens repeats a value."""
    inputs, C = Inputs(12), 4
    n_real = sum(slot >= 0 for slot in slots)
    pool, scratch = inputs.pool.clone(), torch.full((3, C, H, V, K), 7.0)
    bounds = (torch.arange(4).clamp(max=n_real) * C).int()
    out = verify_into(scratch, [0, 1, 2], inputs, slots, pool, cu_seqlens=bounds)
    assert out.shape == inputs.v.shape
    assert out[0, n_real * C :].isnan().all()
    assert torch.equal(pool, inputs.pool)
    assert (scratch[n_real:] == 7.0).all()
    if n_real:
        outputs, states = one_by_one(inputs, range(C), inputs.pool[slots[0]])
        torch.testing.assert_close(out[0, :C], outputs, **TOLERANCE)
        torch.testing.assert_close(scratch[0], states, **TOLERANCE)


def test_ragged_blocks_and_padding_between_rows_are_refused():
    inputs = Inputs(4)
    with pytest.raises(NotImplementedError, match="cu_seqlens"):
        verify(inputs, [0, 1], inputs.pool, cu_seqlens=torch.tensor([0, 1, 4]))
    with pytest.raises(ValueError, match="padded rows are not the last"):
        verify(inputs, [-1, 0], inputs.pool)
    with pytest.raises(NotImplementedError, match="head_first"):
        gdn.chunk_gated_delta_rule(inputs.q, inputs.k, inputs.v, inputs.g[None], inputs.beta[None], head_first=True)
