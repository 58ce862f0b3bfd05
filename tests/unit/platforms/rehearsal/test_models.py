"""Emulated MoE experts must equal a definition that computes one token at a time."""

from types import SimpleNamespace

import pytest
import torch
import torch.nn.functional as F

from sglang_dflash.platforms.rehearsal import models


@pytest.mark.parametrize("use_triton_kernels", [False, True])
def test_experts_are_exact_in_either_layout(use_triton_kernels: bool) -> None:
    generator = torch.Generator().manual_seed(0)
    E, H, C = 4, 6, 5  # experts, hidden size, features per expert
    w13, w2 = (torch.randn(shape, generator=generator) for shape in ((E, 2 * C, H), (E, H, C)))
    x, weights = torch.randn(3, H, generator=generator), torch.rand(3, 2, generator=generator)
    ids = torch.tensor([[0, 2], [2, 1], [0, 1]], dtype=torch.int32)  # the last expert gets no token
    lay = (lambda weight: weight.transpose(1, 2).contiguous()) if use_triton_kernels else torch.clone
    layer = SimpleNamespace(
        num_experts=E,
        w13_weight=lay(w13),
        w2_weight=lay(w2),
        w13_weight_bias=torch.randn(E, 2 * C, generator=generator),
        w2_weight_bias=torch.randn(E, H, generator=generator),
        quant_method=SimpleNamespace(use_triton_kernels=use_triton_kernels, with_bias=True),
    )
    config = SimpleNamespace(apply_router_weight_on_input=False, activation="gelu", gemm1_alpha=None)
    got = models.experts()(layer, x, (weights, ids, None), config)
    want = torch.zeros(3, H)
    for t in range(3):
        for weight, e in zip(weights[t], ids[t].tolist(), strict=True):
            gate, up = (w13[e] @ x[t] + layer.w13_weight_bias[e]).chunk(2)
            want[t] += weight * (w2[e] @ (F.gelu(gate, approximate="tanh") * up) + layer.w2_weight_bias[e])
    torch.testing.assert_close(got, want)
