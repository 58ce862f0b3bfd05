"""Causal convolution on CPU must equal its definition over the last W inputs, computed one token at a time."""

import pytest
import torch

from sglang_dflash.platforms.cpu import conv

F_, W, P, SLOTS = 6, 4, 3, 5  # features, taps, inputs in a state, state slots


def one_by_one(
    x_NF: torch.Tensor, carried_FP: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None
) -> tuple[torch.Tensor, list[torch.Tensor]]:
    """Return silu(bias + w . last W inputs) [N, F], and the state after every token, each [F, P]."""
    seen = list(carried_FP.T)
    outputs, states = [], []
    for x_F in x_NF:
        seen.append(x_F)
        y_F = sum(weight[:, j] * seen[len(seen) - W + j] for j in range(W))
        y_F = y_F if bias is None else y_F + bias
        outputs.append(y_F * torch.sigmoid(y_F))
        states.append(torch.stack(seen[-P:], dim=1))
    return torch.stack(outputs), states


@pytest.fixture
def weights() -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    torch.manual_seed(0)
    return torch.randn(F_, W), torch.randn(F_), torch.randn(SLOTS, F_, P)


@pytest.mark.parametrize("with_bias", [True, False])
@pytest.mark.parametrize("lengths", [[1], [2, 9], [5, 1, 3]], ids=str)
def test_prefill(weights, lengths: list[int], with_bias: bool):
    weight, bias, pool = weights
    bias = bias if with_bias else None
    x_TF = torch.randn(sum(lengths), F_)
    slots = [4, 0, 2][: len(lengths)]
    carries = [True, False, True][: len(lengths)]
    states = pool.clone()
    where = {"cache_indices": torch.tensor(slots, dtype=torch.int32), "has_initial_state": torch.tensor(carries)}
    bounds = {"query_start_loc": torch.tensor([0, *lengths]).cumsum(0).int(), "seq_lens_cpu": lengths}
    out = conv.causal_conv1d_fn(x_TF.T, weight, bias, activation="silu", conv_states=states, **where, **bounds)
    assert out.shape == (F_, sum(lengths))
    want_pool = pool.clone()
    pieces = zip(x_TF.split(lengths), out.T.split(lengths), slots, carries, strict=True)
    for x_NF, y_NF, slot, carry in pieces:
        want, after = one_by_one(x_NF, pool[slot] * carry, weight, bias)
        torch.testing.assert_close(y_NF, want)
        want_pool[slot] = after[-1]
    torch.testing.assert_close(states, want_pool)


def test_prefill_may_end_in_padding(weights):
    weight, bias, pool = weights
    x_TF = torch.randn(6, F_)
    bounds = {"query_start_loc": torch.tensor([0, 4], dtype=torch.int32), "seq_lens_cpu": [4]}
    out = conv.causal_conv1d_fn(x_TF.T, weight, bias, conv_states=pool, **bounds, activation="silu")
    want, _ = one_by_one(x_TF[:4], torch.zeros(F_, P), weight, bias)
    torch.testing.assert_close(out.T, torch.cat([want, torch.zeros(2, F_)]))


def update(x: torch.Tensor, states: torch.Tensor, weights: tuple, slots: list[int], **more: object) -> torch.Tensor:
    where = torch.tensor(slots, dtype=torch.int32)
    return conv.causal_conv1d_update(x, states, *weights[:2], "silu", conv_state_indices=where, **more)


def test_decode(weights):
    weight, bias, pool = weights
    x_BF, slots = torch.randn(3, F_), [4, 0, 2]
    states, want_pool = pool.clone(), pool.clone()
    out = update(x_BF, states, weights, slots)
    for i, slot in enumerate(slots):
        want, after = one_by_one(x_BF[i : i + 1], pool[slot], weight, bias)
        torch.testing.assert_close(out[i : i + 1], want)
        want_pool[slot] = after[-1]
    torch.testing.assert_close(states, want_pool)


def overlapping_windows(rows: int, steps: int) -> torch.Tensor:
    """Return windows [rows, steps, F, P] that overlap in memory, as SGLang stores them."""
    strip = torch.full((rows, F_, steps + P - 1), 7.0)
    return strip.as_strided((rows, steps, F_, P), (F_ * (steps + P - 1), 1, steps + P - 1, 1))


@pytest.mark.parametrize("windows", [overlapping_windows, lambda rows, steps: torch.full((rows, steps, F_, P), 7.0)])
@pytest.mark.parametrize("N", [1, 2, 8])
def test_verify_keeps_every_window(weights, windows, N: int):
    weight, bias, pool = weights
    x_BNF, slots, rows = torch.randn(2, N, F_), [4, 1], [2, 0]
    states, window = pool.clone(), windows(3, 8)
    keep = {"intermediate_conv_window": window, "intermediate_state_indices": torch.tensor(rows, dtype=torch.int32)}
    out = update(x_BNF.transpose(1, 2), states, weights, slots, **keep, retrieve_next_token=None)
    # SGLang views the result as packed tokens [2 * N, F], which must be possible without a copy.
    packed_TF = out.transpose(1, 2).view(2 * N, F_)
    for i, (slot, row) in enumerate(zip(slots, rows, strict=True)):
        want, after = one_by_one(x_BNF[i], pool[slot], weight, bias)
        torch.testing.assert_close(packed_TF[i * N : (i + 1) * N], want)
        torch.testing.assert_close(states[slot], after[-1])
        torch.testing.assert_close(window[row, :N], torch.stack(after))
    assert (window[1] == 7.0).all()


@pytest.mark.parametrize("N", [None, 1, 4], ids=["decode", "verify 1", "verify 4"])
def test_padded_rows_are_skipped(weights, N: int | None):
    """The last requests of a captured batch are padding, with a negative state slot."""
    x = torch.randn(3, F_) if N is None else torch.randn(3, N, F_).transpose(1, 2)
    states, alone = weights[2].clone(), weights[2].clone()
    out = update(x, states, weights, [4, -1, -1])
    want = update(x[:1], alone, weights, [4])
    assert out.shape == x.shape
    torch.testing.assert_close(out[:1], want)
    torch.testing.assert_close(states, alone)
    assert out[1:].isnan().all()


def test_extra_inputs_in_the_pool_are_left_alone(weights):
    """A state slot of the pool may hold more than P inputs. An update writes only the first P, which are the state."""
    weight, bias, _ = weights
    pool = torch.randn(SLOTS, F_, P + 2)
    x_BNF = torch.randn(1, 2, F_)
    for n in (1, 2):
        states = pool.clone()
        update(x_BNF[:, 0] if n == 1 else x_BNF.transpose(1, 2), states, weights, [3])
        _, after = one_by_one(x_BNF[0, :n], pool[3, :, :P], weight, bias)
        want = pool.clone()
        want[3, :, :P] = after[-1]
        torch.testing.assert_close(states, want)


def test_only_stored_states_are_rounded(weights):
    weight, bias, pool = weights
    x_BF, states = torch.randn(1, F_).bfloat16(), pool.bfloat16()
    out = update(x_BF, states, weights, [1])
    want, after = one_by_one(x_BF.float(), pool.bfloat16()[1].float(), weight, bias)
    assert torch.equal(out, want.bfloat16())
    assert torch.equal(states[1], after[-1].bfloat16())


def test_undefined_arguments_are_refused_by_name(weights):
    weight, _, pool = weights
    with pytest.raises(NotImplementedError, match="retrieve_next_token"):
        conv.causal_conv1d_update(torch.randn(1, F_), pool, weight, retrieve_next_token=torch.zeros(1, 2))
    with pytest.raises(ValueError, match="padded rows are not the last"):
        conv.causal_conv1d_update(torch.randn(2, F_), pool, weight, conv_state_indices=torch.tensor([-1, 1]))
    with pytest.raises(NotImplementedError, match="activation='relu'"):
        conv.causal_conv1d_update(torch.randn(1, F_), pool, weight, activation="relu")
