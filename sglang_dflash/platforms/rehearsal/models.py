"""Replacements for layers of a few model families, which SGLang computes with GPU-only kernels or on the host.

`layers` installs them after a model is loaded, because SGLang's models are imported only then.
"""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import torch

from sglang_dflash.platforms.cpu import install, norm
from sglang_dflash.platforms.rehearsal import graph

_MINIMAX = "sglang.srt.models.minimax_m2"
_EXPERTS = "sglang.srt.layers.moe.fused_moe_native.moe_forward_native"


def layers(model: torch.nn.Module) -> None:
    from sglang.kernels.ops.kvcache.mla_buffer import set_mla_kv_buffer_naive

    install.install(
        {
            _EXPERTS: experts(),
            # K/V of latent attention: SGLang's own torch form, which selects rows by a mask.
            f"{set_mla_kv_buffer_naive.__module__}.set_mla_kv_buffer_naive": graph.launch(set_mla_kv_buffer_naive),
            # MiniMax-M2's norms of q and k: SGLang asserts that tensors are on a GPU before it launches Triton kernels.
            f"{_MINIMAX}.rms_sumsq_serial": graph.launch(norm.rms_sumsq_serial),
            f"{_MINIMAX}.rms_apply_serial": graph.launch(norm.rms_apply_serial),
            # Gemma: Triton's interpreter lacks libdevice's tanh.
            "sglang.kernels.ops.activation.softcap._softcap_logits": graph.launch(norm.softcap_logits),
        }
    )
    _weigh_norms(model)


def _weigh_norms(model: torch.nn.Module) -> None:
    """Let Gemma-4's norms without scale multiply by their weight, as SGLang does on CUDA.

    The weight is 1, except in routers: SGLang folds a router's scale into the weight. The torch form omits the product.
    """
    from sglang.srt.layers.layernorm import Gemma4RMSNorm

    for module in model.modules():
        if isinstance(module, Gemma4RMSNorm):
            module.with_scale = True


def experts() -> Any:
    """Return SGLang's PyTorch form of MoE experts as one launch, because this form reads the routing on the host.

    Weights for `triton_kernels` (gpt-oss) have their last two dimensions exchanged.
    """
    from sglang.srt.layers.moe.fused_moe_native import moe_forward_native

    @graph.launch
    def forward(layer: Any, x: torch.Tensor, topk_output: Any, moe_runner_config: Any) -> torch.Tensor:
        method = layer.quant_method
        if method.use_triton_kernels:
            layer = SimpleNamespace(
                num_experts=layer.num_experts,
                w13_weight=layer.w13_weight.transpose(1, 2),
                w2_weight=layer.w2_weight.transpose(1, 2),
                w13_weight_bias=layer.w13_weight_bias if method.with_bias else None,
                w2_weight_bias=layer.w2_weight_bias if method.with_bias else None,
            )
        return moe_forward_native(layer, x, topk_output, moe_runner_config)

    return forward
