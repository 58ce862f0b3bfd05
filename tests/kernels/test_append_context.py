from typing import NamedTuple

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from sglang_dflash_kernels.append_context import (
    FP8,
    ContextCaches,
    KeyTransform,
    append_context,
    append_context_ref,
    append_context_triton,
)

FP16, BF16, FP32 = torch.float16, torch.bfloat16, torch.float32
N_SLOTS, N_POSITIONS, EPS = 64, 50, 1e-6
FORMS = pytest.mark.parametrize("op", [append_context_ref, append_context_triton], ids=["definition", "kernel"])


class Case(NamedTuple):
    """Arguments of `append_context`. Caches hold random values, which must stay unchanged where nothing is appended."""

    rows: tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]
    caches: ContextCaches
    key: KeyTransform
    n_kept_B: torch.Tensor | None

    def append_with(self, op) -> tuple[tuple[torch.Tensor, ...], tuple[torch.Tensor, ...]]:
        caches = ContextCaches.build([c.clone() for c in self.caches.k_L], [c.clone() for c in self.caches.v_L])
        op(*self.rows, caches=caches, key=self.key, n_kept_B=self.n_kept_B)
        return caches.k_L, caches.v_L

    def exact_keys(self) -> tuple[torch.Tensor, ...]:
        doubles = ([c.double() for c in layers] for layers in (self.caches.k_L, self.caches.v_L))
        caches = ContextCaches(*doubles, self.caches.k_address_L, self.caches.v_address_L)
        sequential(*self.rows, caches=caches, key=self.key, n_kept_B=self.n_kept_B)
        return caches.k_L


def make_case(B, N, L, G, E, R, *, dtype=FP32, cache_dtype=FP32, normed=True, prefill=False, device="cpu") -> Case:
    T = B * N
    kv_TL2GE = torch.randn(T, L, 2, G, E, device=device).to(dtype)  # K and V are views into one projection
    angles = torch.rand(N_POSITIONS, R // 2, device=device) * 7
    positions_T = torch.randint(N_POSITIONS, (T,), device=device)
    slots_T = torch.randperm(N_SLOTS, device=device)[:T]
    caches = [torch.randn(2 * L, N_SLOTS, G, E, device=device)[i].to(cache_dtype).clone() for i in range(2 * L)]
    k_norm_LE = torch.rand(L, E, device=device).to(dtype) + 0.5
    return Case(
        rows=(kv_TL2GE[:, :, 0], kv_TL2GE[:, :, 1], positions_T, slots_T),
        caches=ContextCaches.build(caches[:L], caches[L:]),
        key=KeyTransform(torch.cat((angles.cos(), angles.sin()), dim=1), k_norm_LE if normed else None, EPS),
        n_kept_B=None if prefill else torch.randint(0, N + 1, (B,), device=device, dtype=torch.int32),
    )


def sequential(k_TLGE, v_TLGE, positions_T, slots_T, *, caches, key, n_kept_B=None) -> None:
    """Append one row and one layer at a time, computed in float64 and rounded only to the cache's dtype."""
    T, n_layers, _, _ = k_TLGE.shape
    for t in range(T):
        if n_kept_B is not None:
            n_tokens = T // len(n_kept_B)
            if t % n_tokens >= n_kept_B[t // n_tokens]:
                continue
        for layer in range(n_layers):
            k_GE = exact_key(k_TLGE[t, layer].double(), layer, positions_T[t], key)
            caches.k_L[layer][slots_T[t]] = k_GE.to(caches.k_L[0].dtype)
            caches.v_L[layer][slots_T[t]] = v_TLGE[t, layer].to(caches.v_L[0].dtype)


def exact_key(k_GE: torch.Tensor, layer: int, position: torch.Tensor, key: KeyTransform) -> torch.Tensor:
    if key.k_norm_LE is not None:
        k_GE = k_GE / (k_GE.square().mean(-1, keepdim=True) + key.eps).sqrt() * key.k_norm_LE[layer]
    cos, sin = key.cos_sin_PR[position].double().chunk(2)
    width = 2 * len(cos)
    planes = torch.complex(*k_GE[:, :width].chunk(2, -1)) * torch.complex(cos, sin)  # a rotation is a complex product
    return torch.cat((planes.real, planes.imag, k_GE[:, width:]), -1)


def test_hand_worked_rows():
    """Two requests of two token rows. Both rows of the first request are kept, and one row of the second."""
    k_TLGE = torch.tensor([[3.0, 4.0]]).repeat(4, 1).view(4, 1, 1, 2)
    v_TLGE = torch.arange(8.0).view(4, 1, 1, 2)
    quarter_turn_at_1 = torch.tensor([[1.0, 0.0], [0.0, 1.0]])  # columns: cosine, sine of the one plane
    caches = ContextCaches.build([torch.full((6, 1, 2), -1.0)], [torch.full((6, 1, 2), -1.0)])
    append_context(
        k_TLGE,
        v_TLGE,
        torch.tensor([0, 1, 1, 0]),
        torch.tensor([5, 2, 3, 4]),
        caches=caches,
        # K is (3, 4). Mean square 12.5 plus eps is 16, so K is divided by 4: (0.75, 1). With the weights: (1.5, 3).
        key=KeyTransform(quarter_turn_at_1, torch.tensor([[2.0, 3.0]]), eps=3.5),
        n_kept_B=torch.tensor([2, 1], dtype=torch.int32),
    )
    assert caches.k_L[0].squeeze(1).tolist() == [[-1, -1], [-1, -1], [-3, 1.5], [-3, 1.5], [-1, -1], [1.5, 3]]
    assert caches.v_L[0].squeeze(1).tolist() == [[-1, -1], [-1, -1], [2, 3], [4, 5], [-1, -1], [0, 1]]


@FORMS
def test_key_is_rounded_where_the_model_rounds(op, device):
    """bf16 cannot hold 1 + 2^-8, so K must be rounded to 1 after the norm, and again after the rotation."""
    tiny = 2.0**-8
    weight_LE = torch.tensor([[1 + tiny, 1.0]], device=device)
    cos_sin_PR = torch.tensor([[1.0, 1.0], [1 + tiny, 0.0]], device=device)
    caches = ContextCaches.build(*([torch.zeros(2, 1, 2, device=device)] for _ in range(2)))
    k_TLGE = torch.ones(2, 1, 1, 2, device=device, dtype=BF16)
    index_T = torch.arange(2, device=device)
    op(k_TLGE, k_TLGE, index_T, index_T, caches=caches, key=KeyTransform(cos_sin_PR, weight_LE, eps=0.0))
    assert caches.k_L[0].tolist() == [[[0, 2]], [[1, 1]]]


@given(st.data())
@settings(max_examples=40, deadline=None)
def test_definition_is_the_sequential_one(data):
    half, rest = data.draw(st.integers(1, 4)), data.draw(st.integers(0, 2)) * 2
    sizes = [data.draw(st.integers(0, 3)), data.draw(st.integers(1, 5)), data.draw(st.integers(1, 2))]
    flags = {"normed": data.draw(st.booleans()), "prefill": data.draw(st.booleans())}
    case = make_case(*sizes, data.draw(st.integers(1, 3)), 2 * half + rest, 2 * half, **flags)
    torch.testing.assert_close(case.append_with(append_context_ref), case.append_with(sequential))


def worst(got: torch.Tensor, exact: torch.Tensor) -> float:
    return (got - exact).abs().max().item()


ONE_ULP = 2.0**-21  # spacing of fp32 numbers between 4 and 8; the largest values here are in this range
SIZES = [  # B, N, L, G, E, R
    (0, 4, 2, 2, 8, 8), (1, 1, 1, 1, 2, 2), (3, 5, 2, 3, 8, 8), (2, 4, 1, 2, 24, 24), (1, 3, 3, 1, 12, 4),
    (2, 2, 2, 5, 64, 16), (1, 2, 1, 8, 128, 128),
]  # fmt: skip


@pytest.mark.parametrize(
    ("normed", "prefill"), [(True, False), (False, True)], ids=["k-norm-decode", "no-norm-prefill"]
)
@pytest.mark.parametrize("dtype", [FP32, FP16, pytest.param(BF16, marks=pytest.mark.gpu)], ids=str)
@pytest.mark.parametrize("sizes", SIZES, ids=str)
def test_kernel_is_the_definition(sizes, dtype, normed, prefill, device):
    torch.manual_seed(sum(sizes))
    case = make_case(*sizes, dtype=dtype, normed=normed, prefill=prefill, device=device)
    (got_k_L, got_v_L), (want_k_L, want_v_L) = map(case.append_with, (append_context_triton, append_context_ref))
    for got_k, want_k, exact_k in zip(got_k_L, want_k_L, case.exact_keys(), strict=True):
        assert worst(got_k, exact_k) <= 2 * worst(want_k, exact_k) + ONE_ULP
        if dtype != FP32:  # rounded at the same points, but a sum in another order may round differently
            assert (got_k != want_k).sum() <= 1 + got_k.numel() // 100
    for got_v, want_v in zip(got_v_L, want_v_L, strict=True):
        assert torch.equal(got_v, want_v)


@FORMS
@pytest.mark.parametrize("cache_dtype", [FP32, FP16, BF16, FP8], ids=str)
@pytest.mark.parametrize("dtype", [FP32, FP16, BF16], ids=str)
def test_caches_of_every_dtype(dtype, cache_dtype, op, device):
    """Values that the cache's dtype can hold arrive unchanged. fp8 cannot hold 1000, and stores 448 instead."""
    row = torch.tensor([1000.0, -1000.0, 0.5, -448.0], device=device)
    kv_TLGE = row.to(dtype).view(1, 1, 1, 4)
    caches = ContextCaches.build(*([torch.zeros(3, 1, 4, device=device).to(cache_dtype)] for _ in range(2)))
    no_turn = KeyTransform(torch.tensor([[1.0, 0.0]], device=device), None, EPS)
    index_T = torch.tensor([0], device=device)
    op(kv_TLGE, kv_TLGE, index_T, index_T + 2, caches=caches, key=no_turn)
    want = torch.zeros(3, 1, 4, device=device)
    want[2, 0] = row.clamp(-448, 448) if cache_dtype == FP8 else row
    assert torch.equal(caches.k_L[0].float(), want)
    assert torch.equal(caches.v_L[0].float(), want)


@FORMS
def test_slots_may_be_strided(op, device):
    """KV slots are strided if K and V of a slot are adjacent. Here two other tensors follow K and V in each slot."""
    pool_S4GE = torch.full((3, 4, 2, 2), -1.0, device=device)
    caches = ContextCaches.build([pool_S4GE[:, 0]], [pool_S4GE[:, 1]])
    k_TLGE = torch.tensor([[1.0, 2.0], [3.0, 4.0]], device=device).view(1, 1, 2, 2)
    index_T = torch.tensor([0], device=device)
    no_turn = KeyTransform(torch.tensor([[1.0, 0.0]], device=device), None, EPS)
    op(k_TLGE, 10 * k_TLGE, index_T, index_T + 2, caches=caches, key=no_turn)
    assert pool_S4GE[2].tolist() == [[[1, 2], [3, 4]], [[10, 20], [30, 40]], *[[[-1, -1], [-1, -1]]] * 2]
    assert (pool_S4GE[:2] == -1).all()


@pytest.mark.parametrize(
    "op", [append_context_ref, pytest.param(append_context_triton, marks=pytest.mark.gpu)], ids=["definition", "kernel"]
)
def test_fp8_does_not_hide_a_nan(op, device):
    kv_TLGE = torch.full((1, 1, 1, 2), float("nan"), device=device)
    caches = ContextCaches.build(*([torch.zeros(1, 1, 2, device=device).to(FP8)] for _ in range(2)))
    index_T = torch.tensor([0], device=device)
    key = KeyTransform(torch.tensor([[1.0, 0.0]], device=device), None, EPS)
    op(kv_TLGE, kv_TLGE, index_T, index_T, caches=caches, key=key)
    assert caches.k_L[0].isnan().all()
    assert caches.v_L[0].isnan().all()
