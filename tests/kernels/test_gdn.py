"""Gated DeltaNet verify and fold: definitions must equal a recurrence written by hand; other forms must equal them."""

import math
from typing import NamedTuple

import pytest
import torch
import torch.nn.functional as F
from sglang_dflash_kernels import gdn_geometry
from sglang_dflash_kernels.gdn_fold import Kept, gdn_fold, gdn_fold_ref, gdn_fold_torch, gdn_fold_triton
from sglang_dflash_kernels.gdn_verify import (
    N_BFLOAT16S,
    Inputs,
    gdn_verify,
    gdn_verify_ref,
    gdn_verify_torch,
    gdn_verify_triton,
    split_record,
)
from sglang_dflash_kernels.record import record_width

L, S = 2, 7
SIZES = [(1, 1, 1, 8, 8), (3, 3, 6, 16, 8), (2, 1, 3, 12, 20)]  # requests, key heads, value heads, K, V


def inputs(B: int, N: int, G: int, H: int, K: int, V: int, device: str) -> dict[str, torch.Tensor]:
    random = torch.Generator().manual_seed(B * 1000 + N * 100 + H)

    def normal(*shape: int) -> torch.Tensor:
        return torch.randn(*shape, generator=random).to(device)

    # Views of one projection with a common row stride, as after SGLang's convolution.
    q, k, v = normal(B * N, 2 * G * K + H * V).split([G * K, G * K, H * V], dim=1)
    return {
        "q_TGK": q.unflatten(1, (G, K)), "k_TGK": k.unflatten(1, (G, K)), "v_THV": v.unflatten(1, (H, V)),
        "a_TH": normal(B * N, H) * 4, "b_TH": normal(B * N, H), "A_log_H": normal(H), "dt_bias_H": normal(H),
        "state_SHVK": normal(S, H, V, K), "slot_B": torch.randperm(S, generator=random)[:B].to(device),
        "record_RNX": torch.full((B + 1, N + 1, record_width(H, V, G, K)), torch.nan, device=device),
    }  # fmt: skip


def arguments(x: dict[str, torch.Tensor]) -> tuple[Inputs, *tuple[torch.Tensor, ...]]:
    return Inputs(*(x[name] for name in Inputs._fields)), x["state_SHVK"], x["slot_B"], x["record_RNX"]


class Expected(NamedTuple):
    """Outputs, states and deltas that the definition computes for one request, in float64."""

    outputs_NHV: torch.Tensor
    states: list[torch.Tensor]  # after each token, [H, V, K]
    deltas_NHV: torch.Tensor


def expected_of(x: dict[str, torch.Tensor], b: int) -> Expected:
    B, (G, K), (H, V) = len(x["slot_B"]), x["k_TGK"].shape[1:], x["v_THV"].shape[1:]
    N, record_RNX = len(x["q_TGK"]) // B, torch.zeros_like(x["record_RNX"], dtype=torch.float64)
    out_THV = gdn_verify_ref(*arguments(x | {"v_THV": x["v_THV"].double(), "record_RNX": record_RNX}))
    states = []
    for n in range(1, N + 1):
        state_1SHVK = x["state_SHVK"].double()[None].clone()
        gdn_fold_ref(state_1SHVK, record_RNX[None], Kept(x["slot_B"], torch.full_like(x["slot_B"], n)), n_key_heads=G)
        states.append(state_1SHVK[0, x["slot_B"][b]])
    delta_RNHV, *_ = split_record(record_RNX, n_value_heads=H, value_width=V, n_key_heads=G, key_width=K)
    return Expected(out_THV[b * N : b * N + N], states, delta_RNHV[b, :N])


def test_the_definitions_are_the_recurrence():
    """Recurrence of one head: decay the state, move the state's output for the key towards the value, then query it."""
    x = inputs(1, 2, 1, 1, 2, 2, "cpu")
    state = x["state_SHVK"][x["slot_B"][0], 0].tolist()
    outputs, deltas = [], []
    for t in range(2):
        q, k = ([v / math.hypot(*row) for v in row] for row in (x[name][t, 0].tolist() for name in ("q_TGK", "k_TGK")))
        decay = math.exp(-math.exp(x["A_log_H"][0]) * math.log1p(math.exp(x["a_TH"][t, 0] + x["dt_bias_H"][0])))
        beta = 1 / (1 + math.exp(-x["b_TH"][t, 0]))
        state = [[decay * s for s in row] for row in state]
        predicted = [row[0] * k[0] + row[1] * k[1] for row in state]
        delta = [beta * (v - s) for v, s in zip(x["v_THV"][t, 0].tolist(), predicted, strict=True)]
        state = [[s + d * key for s, key in zip(row, k, strict=True)] for row, d in zip(state, delta, strict=True)]
        outputs.append([(row[0] * q[0] + row[1] * q[1]) / math.sqrt(2) for row in state])
        deltas.append(delta)
    got = expected_of(x, 0)
    parts = got.outputs_NHV[:, 0], got.deltas_NHV[:, 0], got.states[-1][0]
    for found, by_hand in zip(parts, (outputs, deltas, state), strict=True):
        torch.testing.assert_close(found, torch.tensor(by_hand).double(), rtol=1e-6, atol=1e-6)


FORMS = [
    pytest.param(gdn_verify_torch, gdn_fold_torch, id="torch"),
    pytest.param(gdn_verify_triton, gdn_fold_triton, id="kernel"),
]


@pytest.mark.parametrize(("verify", "fold"), FORMS)
@pytest.mark.parametrize("N", [1, 5, 16, 24])
@pytest.mark.parametrize(("B", "G", "H", "K", "V"), SIZES)
def test_outputs_and_every_kept_prefix_follow_the_definition(verify, fold, N, B, G, H, K, V, device):
    x = inputs(B, N, G, H, K, V, device)
    expected = [expected_of(x, b) for b in range(B)]
    before = x["state_SHVK"].clone()
    out_THV = verify(*arguments(x))
    assert torch.equal(x["state_SHVK"], before)  # verify commits nothing
    torch.testing.assert_close(out_THV.double(), torch.cat([one.outputs_NHV for one in expected]), rtol=1e-4, atol=1e-5)
    nowhere_B = torch.full((B,), -1, device=device)
    for n in {1, (N + 1) // 2, N}:
        state_LSHVK = before.repeat(L, 1, 1, 1, 1)
        n_B = torch.full((B,), n, device=device)
        record_LRNX = x["record_RNX"].repeat(L, 1, 1, 1)
        fold(state_LSHVK, record_LRNX[:, :, :N], Kept(x["slot_B"], n_B, nowhere_B, n_B - 1), n_key_heads=G)
        for b, slot in enumerate(x["slot_B"].tolist()):
            for layer in range(L):
                torch.testing.assert_close(
                    state_LSHVK[layer, slot].double(), expected[b].states[n - 1], rtol=1e-4, atol=1e-5
                )
        others = [s for s in range(S) if s not in x["slot_B"].tolist()]
        assert torch.equal(state_LSHVK[:, others], before.repeat(L, 1, 1, 1, 1)[:, others])


@pytest.mark.parametrize(("verify", "fold"), FORMS)
def test_state_at_a_track_interval_is_copied_to_the_tracking_slot(verify, fold, device):
    B, N, G, H, K, V = 3, 6, 2, 4, 8, 16
    x = inputs(B, N, G, H, K, V, device)
    x["slot_B"] = torch.tensor([5, 2, 6], device=device)
    verify(*arguments(x))
    before = x["state_SHVK"].repeat(L, 1, 1, 1, 1)
    after = before.clone()
    where = [torch.tensor(row, device=device) for row in ([4, 6, 2], [1, 3, -1], [2, -1, 0])]
    fold(after, x["record_RNX"][:, :N].repeat(L, 1, 1, 1), Kept(x["slot_B"], *where), n_key_heads=G)
    for layer in range(L):
        for b, slot, n in ((0, 5, 4), (1, 2, 6), (2, 6, 2), (0, 1, 3)):
            torch.testing.assert_close(
                after[layer, slot].double(), expected_of(x, b).states[n - 1], rtol=1e-4, atol=1e-5
            )
    assert torch.equal(after[:, [0, 3, 4]], before[:, [0, 3, 4]])


def test_a_tracking_slot_without_its_step_is_refused(device):
    x = inputs(2, 4, 1, 2, 8, 8, device)
    n_B = torch.tensor([3, 1], device=device)
    with pytest.raises(ValueError, match="track_slot_B is given alone"):
        gdn_fold(
            x["state_SHVK"][None], x["record_RNX"][None, :, :4], Kept(x["slot_B"], n_B, x["slot_B"]), n_key_heads=1
        )


@pytest.mark.parametrize("fold", [gdn_fold_ref, gdn_fold_torch, gdn_fold_triton])
def test_padding_and_empty_blocks_are_left_alone(fold, device):
    x = inputs(2, 4, 1, 2, 8, 8, device)
    gdn_verify(*arguments(x))
    before = x["state_SHVK"].repeat(L, 1, 1, 1, 1)
    after, nowhere = before.clone(), torch.tensor([-1, -1], device=device)
    slots, n = torch.tensor([-1, 4], device=device), torch.tensor([3, 0], device=device)
    fold(after, x["record_RNX"].repeat(L, 1, 1, 1), Kept(slots, n, nowhere, n - 1), n_key_heads=1)
    assert torch.equal(after, before)


@pytest.mark.parametrize(
    "verify", [gdn_verify_ref, gdn_verify_torch, gdn_verify_triton], ids=["definition", "torch", "kernel"]
)
def test_outputs_of_padding_are_zero_and_its_record_is_left_alone(verify, device):
    """Inputs of padding hold NaN, and so does its record, which must stay unwritten."""
    x = inputs(3, 4, 1, 2, 8, 8, device)
    padded = {name: tensor.clone() for name, tensor in x.items()}
    padded["slot_B"][1] = -1
    padded["slot_B"] = padded["slot_B"].int()
    for name in ("q_TGK", "k_TGK", "v_THV", "a_TH", "b_TH"):
        padded[name][4:8] = torch.nan
    want_THV, got_THV = verify(*arguments(x)), verify(*arguments(padded))
    assert torch.equal(got_THV[4:8], torch.zeros_like(got_THV[4:8]))
    assert padded["record_RNX"][1].isnan().all()
    others = [0, 1, 2, 3, 8, 9, 10, 11]
    assert torch.equal(got_THV[others], want_THV[others])
    assert torch.equal(padded["record_RNX"][[0, 2], :4], x["record_RNX"][[0, 2], :4])


def one_head(q: list[float], k: list[float], v: list[float], a: float, device: str) -> dict[str, torch.Tensor]:
    """Return inputs of two equal tokens of one head, and a state of ones.

    Beta is about 1. The log decay is -softplus(a) / 100, so about -a / 100 for large `a`.
    """
    return {
        "q_TGK": torch.tensor([[q]] * 2, device=device), "k_TGK": torch.tensor([[k]] * 2, device=device),
        "v_THV": torch.tensor([[v]] * 2, device=device), "a_TH": torch.full((2, 1), a, device=device),
        "b_TH": torch.full((2, 1), 20.0, device=device), "A_log_H": torch.tensor([math.log(0.01)], device=device),
        "dt_bias_H": torch.zeros(1, device=device), "state_SHVK": torch.ones(1, 1, 2, 2, device=device),
        "slot_B": torch.tensor([0], device=device),
        "record_RNX": torch.zeros(1, 2, record_width(1, 2, 1, 2), device=device),
    }  # fmt: skip


@pytest.mark.parametrize(("verify", "fold"), FORMS)
def test_large_gate_decays_linearly(verify, fold, device):
    """softplus(30) is 30 in fp32, so the log decay is -0.3 per token."""
    x = one_head([1.0, 0.0], [0.0, 1.0], [0.0, 0.0], 30.0, device)
    out_THV = verify(*arguments(x))
    torch.testing.assert_close(x["record_RNX"][0, :, -1].cpu(), torch.tensor([-0.3, -0.6]))
    # The key is orthogonal to the query. So the output is the decayed 1 of the state, divided by the root of K = 2.
    torch.testing.assert_close(out_THV[:, 0, 0].cpu(), torch.tensor([-0.3, -0.6]).exp() / math.sqrt(2))


@pytest.mark.parametrize(("verify", "fold"), FORMS)
@pytest.mark.parametrize("nothing", ["q_TGK", "k_TGK"])
def test_zero_query_reads_nothing_and_zero_key_adds_nothing(verify, fold, nothing, device):
    """A vector of length 0 must not be divided by its length."""
    x = one_head([1.0, 0.0], [1.0, 0.0], [5.0, 5.0], 30.0, device)
    x[nothing] = torch.zeros_like(x[nothing])
    out_THV, n_B = verify(*arguments(x)), torch.tensor([2], device=device)
    state_LSHVK = x["state_SHVK"][None].clone()
    fold(state_LSHVK, x["record_RNX"][None], Kept(x["slot_B"], n_B), n_key_heads=1)
    if nothing == "q_TGK":
        assert not out_THV.any()
        assert (state_LSHVK[..., 0] > 4).all()
    else:
        torch.testing.assert_close(state_LSHVK.cpu(), torch.full((1, 1, 1, 2, 2), math.exp(-0.6)))


def test_batch_padded_past_the_record_is_refused(device):
    x = inputs(3, 4, 1, 2, 8, 8, device)
    with pytest.raises(ValueError, match="3 requests, padding included, exceed a record of 2 rows"):
        gdn_verify_triton(*arguments(x | {"record_RNX": x["record_RNX"][:2]}))


def off_by(got: torch.Tensor, want: torch.Tensor) -> float:
    return ((got - want).abs().max() / want.abs().max()).item()


def errors(verify, x: dict[str, torch.Tensor]) -> dict[str, float]:
    record_RNX, B = x["record_RNX"].clone(), len(x["slot_B"])
    out_THV = verify(*arguments(x | {"record_RNX": record_RNX}))
    N, (G, K), (H, V) = len(out_THV) // B, x["k_TGK"].shape[1:], out_THV.shape[1:]
    assert record_RNX[:, N:].isnan().all()
    assert record_RNX[B:].isnan().all()
    names = {"n_value_heads": H, "value_width": V, "n_key_heads": G, "key_width": K}
    delta_BNHV, key_BNGK, total_BNH = split_record(record_RNX[:B, :N], **names)
    outputs, _states, deltas = zip(*(expected_of(x, b) for b in range(B)), strict=True)
    key_TGK = F.normalize(x["k_TGK"].double(), dim=-1)
    decay_TH = -x["A_log_H"].double().exp() * F.softplus(x["a_TH"].double() + x["dt_bias_H"].double())
    return {
        "out": off_by(out_THV, torch.cat(outputs)),
        "delta": off_by(delta_BNHV, torch.stack(deltas)),
        "key": off_by(key_BNGK.flatten(0, 1), key_TGK),
        "total": off_by(total_BNH, decay_TH.view(B, N, H).cumsum(dim=1)),
    }


@pytest.mark.parametrize("many_heads", [1, 1000], ids=["whole-heads", "quarters"])
@pytest.mark.parametrize("alike", [0.0, 0.95], ids=["any-keys", "keys-alike"])
@pytest.mark.parametrize("N", [1, 2, 7, 15, 16, 17, 32])
def test_kernel_is_as_accurate_as_the_torch_form(N, alike, many_heads, device, monkeypatch):
    """Nearly equal keys make the triangular system hardest to solve."""
    monkeypatch.setattr(gdn_geometry, "MANY_HEADS", many_heads)
    x = inputs(2, N, 2, 4, 36, 40, device)
    x["k_TGK"] = alike * x["k_TGK"][:1] + (1 - alike) * x["k_TGK"]
    x["b_TH"] += 3 * alike
    other, got = errors(gdn_verify_torch, x), errors(gdn_verify_triton, x)
    assert all(got[part] < other[part] + 3e-7 for part in got), (got, other)


@pytest.mark.parametrize("state_dtype", [torch.float32, torch.float16, torch.bfloat16], ids=str)
def test_products_of_bfloat16_are_exact(state_dtype, device, bfloat16_dots):
    """bf16 queries and keys go through tensor cores, where only sums may be rounded."""
    x = inputs(2, 16, 2, 4, 36, 40, device)
    x |= {name: x[name].bfloat16() for name in ("q_TGK", "k_TGK")}
    x["state_SHVK"] = x["state_SHVK"].to(state_dtype)
    other, got = errors(gdn_verify_torch, x), errors(gdn_verify_triton, x)
    assert all(got[part] < other[part] + 3e-7 for part in got), (got, other)


@pytest.mark.parametrize(("dtype", "parts"), [(torch.float32, 3), (torch.float16, 2), (torch.bfloat16, 1)], ids=str)
def test_a_state_is_the_exact_sum_of_bfloat16_numbers(dtype, parts):
    """Cut off the upper half of the bits, as the kernel does for all parts but the last, which needs no rounding."""
    assert N_BFLOAT16S[dtype] == parts
    rest = (torch.randn(100_000) * torch.logspace(-24, 4, 100_000)).to(dtype).float()
    for _ in range(parts - 1):
        rest = rest - (rest.view(torch.int32) & -0x10000).view(torch.float32)
    assert torch.equal(rest, rest.bfloat16().float())


def test_wrong_arguments_are_refused_by_name(device):
    x = inputs(2, 4, 1, 2, 8, 8, device)
    with pytest.raises(ValueError, match="record"):
        gdn_verify(*arguments(x | {"record_RNX": x["record_RNX"][:, :3]}))
    with pytest.raises(ValueError, match="strides"):
        gdn_verify(*arguments(x | {"state_SHVK": x["state_SHVK"].transpose(2, 3)}))
    with pytest.raises(ValueError, match="A_log_H has strides"):
        gdn_verify(*arguments(x | {"A_log_H": x["A_log_H"].repeat_interleave(2)[::2]}))
    slots, state_LSHVK = x["slot_B"], x["state_SHVK"][None]
    for record_LRNX in (x["record_RNX"][None, :, :, 1:], x["record_RNX"][None, :1]):
        with pytest.raises(ValueError, match="2 requests, 1 key and 2 value heads of 8 and 8 do not fit"):
            gdn_fold(state_LSHVK, record_LRNX, Kept(slots, slots, slots, slots), n_key_heads=1)
