"""Installation of torch definitions for GPU-only names of SGLang, and a check that they are active.

Each torch definition is a stand-in for one name of SGLang or torch, its target. SGLang's modules import kernels by
name, so all existing references must be replaced. SGLang's own hook registry also replaces references, but only logs
its failures. `verify` checks every SGLang module when the model is loaded, and stops the launch if a GPU kernel is
still reachable.
"""

import importlib
import pkgutil
import sys
from collections.abc import Callable, Iterator, Mapping
from functools import wraps
from types import ModuleType
from typing import TYPE_CHECKING, Any

import torch

from sglang_dflash.platforms.cpu import conv, gdn, kv, mamba_state, norm, pinned, quantized, ranks, sampling, transfer

if TYPE_CHECKING:
    from sglang.srt.model_executor.forward_batch_info import ForwardBatch
    from sglang.srt.model_executor.model_runner import ModelRunner

_KERNELS = "sglang.kernels.ops."
_SRT = "sglang.srt."

# Quantization formats with torch definitions. Each class lists the dtypes that its GPU kernels support.
_COMPRESSED = "compressed_tensors.compressed_tensors.CompressedTensorsConfig"
_FORMATS = "fp8.Fp8Config", "w8a8_int8.W8A8Int8Config", "awq.awq.AWQConfig", _COMPRESSED

# Stand-ins and originals, by the dotted name of the target.
_stand_ins: dict[str, Any] = {}
_originals: dict[str, Any] = {}


def at_import() -> dict[str, Any]:
    """Return the stand-ins for kernels and device methods, by target."""
    return {
        _KERNELS + "attention.triton_gdn_fused_proj.fused_qkvzba_split_reshape_cat_contiguous": (
            norm.fused_qkvzba_split_reshape_cat_contiguous
        ),
        _KERNELS + "attention.fla.layernorm_gated.rms_norm_gated": norm.rms_norm_gated,
        _KERNELS + "elementwise.elementwise.fused_sigmoid_mul": norm.fused_sigmoid_mul,
        _KERNELS + "elementwise.elementwise.fused_gate_sigmoid_mul_add": norm.fused_gate_sigmoid_mul_add,
        _KERNELS + "attention.table_qk_norm_rope.table_qk_norm_rope_": norm.table_qk_norm_rope_,
        _KERNELS + "mamba.causal_conv1d_triton.causal_conv1d_fn": conv.causal_conv1d_fn,
        _KERNELS + "mamba.causal_conv1d_triton.causal_conv1d_update": conv.causal_conv1d_update,
        _KERNELS + "attention.linear.fused_gdn_gating.fused_gdn_gating": gdn.fused_gdn_gating,
        _KERNELS + "attention.fla.chunk.chunk_gated_delta_rule": gdn.chunk_gated_delta_rule,
        _KERNELS + "attention.fla.fused_recurrent.fused_recurrent_gated_delta_rule_packed_decode": (
            gdn.fused_recurrent_gated_delta_rule_packed_decode
        ),
        _KERNELS + "attention.linear.fused_sigmoid_gating_recurrent.fused_sigmoid_gating_delta_rule_update": (
            gdn.fused_sigmoid_gating_delta_rule_update
        ),
        _KERNELS + "mamba.mamba_state_scatter_triton.track_mamba_states_if_needed": (
            mamba_state.track_mamba_states_if_needed
        ),
        _KERNELS + "mamba.mamba_state_scatter_triton.track_mamba_states_all_layers": (
            mamba_state.track_mamba_states_all_layers
        ),
        _KERNELS + "mamba.mamba_state_scatter_triton.fused_mamba_state_scatter_with_mask": (
            mamba_state.scatter_states_with_mask
        ),
        _KERNELS + "mamba.mamba_state_scatter_triton.fused_conv_window_scatter_with_mask": (
            mamba_state.scatter_states_with_mask
        ),
        _KERNELS + "mamba.mamba_state_scatter_triton._conv_multi_eligible": mamba_state.no_fused_conv_scatter,
        _KERNELS + "kvcache.cache_move.copy_all_layer_kv_cache_func": kv.copy_all_layer_kv_cache_func,
        _KERNELS + "quantization.fp8_kernel.per_token_group_quant_fp8": quantized.per_token_group_quant_fp8,
        _KERNELS + "gemm.fp8_kernel.w8a8_block_fp8_matmul_triton": quantized.w8a8_block_fp8_matmul_triton,
        _KERNELS + "quantization.int8_kernel.per_token_quant_int8": quantized.per_token_quant_int8,
        _SRT + "mem_cache.allocation.assign_req_to_token_pool_func": kv.assign_req_to_token_pool_func,
        # SGLang calls these two methods on some tensors without checking for a device.
        "torch.Tensor.pin_memory": _pin_memory,
        "torch.Tensor.record_stream": _record_stream,
        **_of_quantization(),
    }


def after_load() -> dict[str, Any]:
    """Return the stand-ins to install after SGLang has loaded a model, by the dotted name that each one replaces.

    One of them wraps a method of `ModelRunner`, so the model runner must already be imported.
    """
    from sglang.srt.model_executor.model_runner import ModelRunner

    return {
        _SRT + "model_executor.model_runner.ModelRunner._extend_forward_kwargs": _keeping_embedding_dtype(
            ModelRunner._extend_forward_kwargs
        ),
        _SRT + "speculative.dflash_utils.tree_speculative_sampling_target_only": (
            sampling.tree_speculative_sampling_target_only
        ),
        _SRT + "speculative.dflash_utils._DFLASH_SAMPLING_VERIFY_AVAILABLE": True,
        _SRT + "models.dflash._radix_topk": sampling.best,
        # Exchange of token rows between ranks.
        _SRT + "layers.dp_attention.memcpy_func": ranks.memcpy,
        _SRT + "distributed.parallel_state._is_cpu": True,
        _SRT + "distributed.parallel_state.GroupCoordinator._reduce_scatter_tensor": ranks.reduce_scatter_tensor,
        # These modules pin memory without checking for a device.
        _SRT + "model_executor.forward_batch_info.torch": pinned.torch_with(_pin_memory),
        _SRT + "lora.layers.torch": pinned.torch_with(_pin_memory),
        _SRT + "lora.backend.torch_backend.torch": pinned.torch_with(_pin_memory),
        _SRT + "disaggregation.prefill.torch": pinned.torch_with(_pin_memory, cuda=transfer.CUDA),
    }


def _of_quantization() -> dict[str, Any]:
    """Return stand-ins for quantized products that SGLang imports only on a GPU, and for its checks of the device."""
    home = _SRT + "layers.quantization."
    schemes = home + "compressed_tensors.schemes."
    modules = home + "w8a8_int8", schemes + "compressed_tensors_w8a8_int8"
    for module in modules:
        vars(pkgutil.resolve_name(module)).setdefault("int8_scaled_mm", None)
    return {
        **{module + ".int8_scaled_mm": quantized.int8_scaled_mm for module in modules},
        _SRT + "hardware_backend.gpu.quantization.awq_kernels.awq_dequantize": quantized.awq_dequantize,
        home + _COMPRESSED + "._check_scheme_supported": quantized.any_device,
        **{home + config + ".get_supported_act_dtypes": quantized.AnyDtype() for config in _FORMATS},
    }


def install(stand_ins: Mapping[str, Any]) -> None:
    """Replace every target by its stand-in. Callables are also replaced in all SGLang modules that imported them."""
    copies: dict[int, Any] = {}
    for target, stand_in in stand_ins.items():
        if target in _stand_ins:
            continue
        path, name = target.rsplit(".", 1)
        owner = pkgutil.resolve_name(path)
        original = pkgutil.resolve_name(target)
        setattr(owner, name, stand_in)
        _stand_ins[target], _originals[target] = stand_in, original
        if callable(original):  # unrelated names share other values, such as None and False
            copies[id(original)] = stand_in
    for module, name, value in _sglang_names():
        if id(value) in copies:
            setattr(module, name, copies[id(value)])


def put(values: Mapping[str, Any], within: str = "") -> None:
    """Set each dotted name in its own module, not in modules that imported it; `within` is a prefix of each name."""
    for target, value in values.items():
        module, name = (within + target).rsplit(".", 1)
        setattr(importlib.import_module(module), name, value)


def default_to_cpu() -> None:
    """Let `torch.get_device_module()` return `torch.cpu` in CUDA builds too.

    Qwen3-Next uses this function to place its norms. SGLang's release of memory uses it to wait for the device.
    """
    get_device_module = torch.get_device_module

    @wraps(get_device_module)  # torch.compile reads its `__wrapped__`
    def default_here(device: torch.device | str | None = None) -> ModuleType:
        return torch.cpu if device is None else get_device_module(device)

    torch.get_device_module = default_here  # type: ignore[assignment]


def verify() -> None:
    """Check that every stand-in is at its target, and that no SGLang module still has an original.

    Raises:
        RuntimeError: a target has another value, or an original is still in use; the message names them.
    """
    wrong = [target for target, ours in _stand_ins.items() if pkgutil.resolve_name(target) is not ours]
    replaced = {id(original): target for target, original in _originals.items() if callable(original)}
    for module, name, value in _sglang_names():
        if id(value) in replaced:
            wrong.append(f"{module.__name__}.{name} ({replaced[id(value)]})")
    if wrong:
        raise RuntimeError(
            "the CPU platform of sglang-dflash is incomplete, because SGLang or another plugin has replaced "
            f"{', '.join(wrong)}; set SGLANG_PLUGINS=sglang_dflash,sglang_dflash_cpu, or without DFLASH "
            "SGLANG_USE_CPU_ENGINE=1"
        )


def _sglang_names() -> Iterator[tuple[ModuleType, str, Any]]:
    for module_name, module in list(sys.modules.items()):
        if module_name.startswith("sglang.") and isinstance(module, ModuleType):
            for name, value in list(vars(module).items()):
                yield module, name, value


def _keeping_embedding_dtype(original: Callable[..., dict]) -> Callable[..., dict]:
    """Wrap `original` to give input embeddings the model's dtype; SGLang casts them to bf16."""

    def extend_forward_kwargs(self: "ModelRunner", forward_batch: "ForwardBatch", pp_proxy_tensors: object) -> dict:
        kwargs = original(self, forward_batch, pp_proxy_tensors)
        if forward_batch.input_embeds is not None and forward_batch.replace_embeds is None:
            kwargs["input_embeds"] = forward_batch.input_embeds.to(self.dtype)
        return kwargs

    return extend_forward_kwargs


def _pin_memory(self: torch.Tensor, device: torch.device | None = None) -> torch.Tensor:
    """Return the tensor, because all memory is host memory."""
    return self


def _record_stream(self: torch.Tensor, stream: object) -> None:
    """Do nothing, because with one stream no memory is freed early."""
