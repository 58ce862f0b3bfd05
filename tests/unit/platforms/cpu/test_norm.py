"""Norms, gates and splits of projections must equal definitions that compute one row or head at a time."""

import math

import pytest
import torch
from transformers.models.qwen3_5.modeling_qwen3_5 import Qwen3_5RMSNormGated

from sglang_dflash.platforms.cpu import norm


def test_split_of_the_projections():
    q, k, v, z, b, a = (torch.randn(3, n) for n in (4, 4, 12, 12, 4, 4))
    got_qkv, got_z, got_b, got_a = norm.fused_qkvzba_split_reshape_cat_contiguous(
        torch.cat([q, k, v, z], dim=1), torch.cat([b, a], dim=1), 2, 4, 2, 3
    )
    assert torch.equal(got_qkv, torch.cat([q, k, v], dim=1))
    assert torch.equal(got_z, z.reshape(3, 4, 3))
    assert torch.equal(got_b, b)
    assert torch.equal(got_a, a)


def test_gated_norm_equals_transformers():
    x, z, reference = torch.randn(5, 8), torch.randn(5, 8), Qwen3_5RMSNormGated(8, eps=1e-3)
    torch.nn.init.normal_(reference.weight)
    got = norm.rms_norm_gated(x=x, weight=reference.weight, bias=None, z=z, eps=1e-3, is_rms_norm=True)
    torch.testing.assert_close(got, reference(x, z))


def test_norm_gated_by_a_sigmoid_in_bf16_rounds_once():
    x, z, weight = torch.randn(5, 8).bfloat16(), torch.randn(5, 8).bfloat16(), torch.randn(8).bfloat16()
    got = norm.rms_norm_gated(x=x, weight=weight, bias=None, z=z, is_rms_norm=True, activation="sigmoid")
    x64 = x.double()
    want = x64 / (x64.square().mean(1, keepdim=True) + 1e-6).sqrt() * weight.double() * z.double().sigmoid()
    torch.testing.assert_close(got, want.bfloat16(), atol=0, rtol=2**-8)


def test_norm_without_a_gate():
    x, weight = torch.randn(5, 8), torch.randn(8)
    got = norm.rms_norm_gated(x=x, weight=weight, bias=None, is_rms_norm=True)
    torch.testing.assert_close(got, x / (x.square().mean(1, keepdim=True) + 1e-6).sqrt() * weight)


@pytest.mark.parametrize(
    ("asked", "name"),
    [
        ({"is_rms_norm": False}, "is_rms_norm=False"),
        ({"bias": torch.zeros(8)}, "bias"),
        ({"group_size": 4}, "group_size"),
        ({"norm_before_gate": False}, "norm_before_gate=False"),
        ({"activation": "gelu"}, "activation='gelu'"),
    ],
)
def test_undefined_arguments_are_refused_by_name(asked: dict, name: str):
    arguments = {"x": torch.randn(5, 8), "weight": torch.ones(8), "bias": None, "is_rms_norm": True, **asked}
    with pytest.raises(NotImplementedError, match=name):
        norm.rms_norm_gated(**arguments)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("inplace", [True, False])
def test_output_gate(inplace: bool, dtype: torch.dtype):
    x, gate = torch.randn(3, 8).to(dtype), torch.randn(3, 2, 8)[..., :4].to(dtype)
    want = (x.double() * gate.reshape(3, 8).double().sigmoid()).to(dtype)
    before = x.clone()
    got = norm.fused_sigmoid_mul(x, gate, inplace=inplace)
    torch.testing.assert_close(got, want, atol=0, rtol=2**-8 if dtype == torch.bfloat16 else 1e-6)
    assert torch.equal(x, got if inplace else before)
    with pytest.raises(NotImplementedError, match="quant"):
        norm.fused_sigmoid_mul(x, gate, quant=True)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_shared_expert_is_gated_row_by_row(dtype: torch.dtype):
    hidden, shared, routed = torch.randn(3, 5, 8).to(dtype)
    weight = torch.randn(8).to(dtype)
    gate = [torch.dot(row.double(), weight.double()).sigmoid() for row in hidden]
    want = torch.stack([r.double() + g * s.double() for r, g, s in zip(routed, gate, shared, strict=True)]).to(dtype)
    norm.fused_gate_sigmoid_mul_add(hidden, weight, shared, routed)
    torch.testing.assert_close(routed, want, atol=1e-6, rtol=2**-8 if dtype == torch.bfloat16 else 1e-6)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_norm_and_rotation_of_queries_and_keys(dtype: torch.dtype):
    """The definition normalises each head, rounds, then rotates the pairs (i, i + E/2) by the position's angle."""
    T, n_q, n_k, E, eps = 4, 3, 2, 8, 1e-6
    qkv, q_weight, k_weight = (x.to(dtype) for x in (torch.randn(T, 7 * E), torch.randn(E), torch.randn(E)))
    angle = torch.arange(16)[:, None] * torch.logspace(0, -2, E // 2)
    positions = torch.tensor([3, 0, 11, 12])
    want = qkv.clone()
    for t in range(T):
        for head in range(n_q + n_k):
            cells = slice(head * E, (head + 1) * E)
            x = qkv[t, cells].float()
            weight = q_weight if head < n_q else k_weight
            x = (x * torch.rsqrt(x.square().mean() + eps) * weight.float()).to(dtype).float()
            turned = (x[: E // 2] + 1j * x[E // 2 :]) * torch.exp(1j * angle[positions[t]])
            want[t, cells] = torch.cat([turned.real, turned.imag]).to(dtype)
    norm.table_qk_norm_rope_(
        qkv, positions, q_weight, k_weight, torch.cat([angle.cos(), angle.sin()], dim=1), n_q, n_k, E, eps
    )
    torch.testing.assert_close(qkv, want, atol=2**-7 if dtype == torch.bfloat16 else 1e-5, rtol=0)
    assert torch.equal(qkv[:, 5 * E :], want[:, 5 * E :])


@pytest.mark.parametrize("tp_world", [1, 2])
def test_norms_of_q_and_k_follow_from_sums_of_squares(tp_world: int):
    """If two ranks hold equal parts of q and k, the sums of squares over ranks double, and the norms stay the same."""
    q, k, w_q, w_k = torch.randn(3, 8), torch.randn(3, 4), torch.randn(8), torch.randn(4)
    sums = norm.rms_sumsq_serial(q, k)
    assert sums.tolist() == pytest.approx([sum(x * x for x in row.tolist()) for x2 in (q, k) for row in x2] + [0, 0])
    got = norm.rms_apply_serial(q, k, w_q, w_k, sums * tp_world, tp_world, 1e-3)
    for x, weight, out in zip((q, k), (w_q, w_k), got, strict=True):
        for row, normed in zip(x, out, strict=True):
            torch.testing.assert_close(normed, row / ((row @ row) / len(row) + 1e-3).sqrt() * weight)


def test_softcapped_logits():
    logits, output = torch.randn(2, 5).bfloat16() * 50, torch.empty(2, 5)
    want = torch.tensor([[30 * math.tanh(x / 30) for x in row] for row in logits.tolist()])
    assert norm.softcap_logits(logits, 30.0, output) is output
    torch.testing.assert_close(output, want)
    assert torch.equal(norm.softcap_logits(logits.clone(), None, output), logits.float())
    assert norm.softcap_logits(logits, 30.0) is logits
    torch.testing.assert_close(logits, want.bfloat16())
