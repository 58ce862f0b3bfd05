"""Replacements where SGLang 0.5.23 names CUDA although an out-of-tree platform runs.

Groups, in the order in which SGLang reaches them: the device module, kernels, LoRA, graphs, attention.
"""

from __future__ import annotations

import functools
import pkgutil
import sys
from collections.abc import Callable, Mapping
from inspect import isfunction
from types import ModuleType, SimpleNamespace
from typing import Any

import torch
from sglang_dflash_kernels.dispatch import override

from sglang_dflash import flags
from sglang_dflash.platforms.cpu import install, pinned
from sglang_dflash.platforms.rehearsal import attention as definitions
from sglang_dflash.platforms.rehearsal import capability, flashinfer_seams, graph, host

_KERNELS = "sglang.kernels.ops."
_BREAKABLE = "sglang.srt.model_executor.runner_backend_utils.breakable_cuda_graph.breakable_cuda_graph"


def device() -> None:
    """Set the attributes of `torch.cpu` and `torch.cuda` that graph runners and backends use."""
    torch.cpu.graph = graph.graph  # type: ignore[attr-defined]
    torch.cpu.graph_pool_handle = graph.graph_pool_handle  # type: ignore[attr-defined]
    torch.cpu.is_current_stream_capturing = graph.is_capturing  # type: ignore[attr-defined]
    torch.cuda.CUDAGraph = graph.Graph  # type: ignore[misc, assignment]  # both graph backends name it


def as_launches(stand_ins: Mapping[str, Any]) -> dict[str, Any]:
    """Return the CPU platform's stand-ins, by dotted name, wrapped so that each call of a kernel is one launch.

    The stand-ins of `Tensor.cpu` and `Tensor.pin_memory` mark host tensors. Interpreted Triton kernels and the ops of
    `sglang_dflash_kernels` become launches too.
    """
    launches = {
        name: graph.launch(stand_in) if isfunction(stand_in) and not name.startswith("torch.") else stand_in
        for name, stand_in in stand_ins.items()
    }
    from triton.runtime.interpreter import GridExecutor

    GridExecutor.__call__ = graph.launch(GridExecutor.__call__)  # every interpreted Triton kernel is one launch
    interpreted = flags.current().rehearse.kernels
    # Each op of `sglang_dflash_kernels` is one launch: its kernel in the interpreter, or its form for the CPU.
    override(lambda forms: forms.on_gpu if interpreted else graph.launch(forms.on_cpu))
    return launches | {"torch.Tensor.pin_memory": _pin_memory, "torch.Tensor.cpu": _cpu}


def lora() -> None:
    """Mark LoRA's pinned allocations as host tensors, and give SGLang's LoRA kernels (csgmv) a device name.

    Call this before the CPU platform's stand-ins are installed.
    """
    marking = pinned.torch_with(host.mark)
    modules = ("layers", "backend.torch_backend", "backend.triton_backend", "backend.chunked_backend")
    install.install({f"sglang.srt.lora.{module}.torch": marking for module in modules})
    install.put({"lora.dense.lora_tuning_config.get_device_name": lambda: "rehearsed"}, _KERNELS)


def _pin_memory(self: torch.Tensor, device: torch.device | None = None) -> torch.Tensor:
    return host.mark(self)


def _cpu(self: torch.Tensor, memory_format: torch.memory_format = torch.preserve_format) -> torch.Tensor:
    """Return a host copy of a device tensor. An alias would change with the device's next write."""
    return self if host.is_marked(self) else host.mark(self.clone())


def graphs() -> None:
    from sglang.srt.model_executor.cuda_graph_config import Backend
    from sglang.srt.model_executor.forward_batch_info import ForwardBatch, ForwardMode
    from sglang.srt.runtime_context import get_exec

    # SGLang's function uses the default device module, which is torch.cuda in a CUDA build of PyTorch.
    install.put({"sglang.srt.distributed.parallel_state.get_current_device_stream_fast": torch.cpu.current_stream})
    ForwardBatch.__init__ = _marking_lengths(ForwardBatch.__init__)  # type: ignore[method-assign]
    # On "cpu" SGLang's runner reads `is_cpu_graph`, which is true only for decode. `is_cuda_graph` includes verify.
    ForwardMode.is_cpu_graph = ForwardMode.is_cuda_graph

    # Between segments of a prefill graph SGLang stores device tensors by address, but not "cpu" tensors.
    install.put({f"{_BREAKABLE}._weak_ref_if_tensor": graph.addresses})

    # On "cpu" SGLang captures graphs only if torch.compile is enabled. `cuda_graph_setup` reads no other flag.
    def compiling() -> SimpleNamespace:
        wanted = get_exec().graph.cuda_graph_config.decode.backend != Backend.DISABLED
        return SimpleNamespace(capture=SimpleNamespace(enable_torch_compile=wanted))

    install.put({"sglang.srt.model_executor.model_runner_components.cuda_graph_setup.get_flags": compiling})


def _marking_lengths(init: Callable[..., None]) -> Callable[..., None]:
    """Wrap `init` to mark `seq_lens_cpu` as a host tensor (`host.mark`), so that capture may read it.

    `seq_lens_cpu` stays unmarked if it shares memory with the device tensor.
    """

    @functools.wraps(init)
    def init_and_mark(self: Any, *args: Any, **kwargs: Any) -> None:
        init(self, *args, **kwargs)
        lengths, on_device = self.seq_lens_cpu, self.seq_lens
        if lengths is not None and on_device is not None and lengths.data_ptr() != on_device.data_ptr():
            host.mark(lengths)

    return init_and_mark


def attention() -> None:
    """Replace the kernels of attention backends by torch definitions (`attention`, `flashinfer`, `trtllm`)."""
    from sglang.srt.layers.attention.attention_registry import ATTENTION_BACKENDS

    launches = {
        _KERNELS + f"attention.{module}.{fn.__name__}": graph.launch(fn)
        for module in ("flash_attention", "flash_attention_v4", "flash_attention_v4_sm120")
        for fn in (definitions.flash_attn_with_kvcache, definitions.flash_attn_varlen_func)
    }
    install.install(launches)
    _stub_sgl_kernel()
    factories = dict(ATTENTION_BACKENDS)
    factories["fa3"] = _without_scheduler(factories["fa3"])
    for name in ("flashinfer", "trtllm_mha"):
        factories[name] = flashinfer_seams.over_flashinfer(factories[name])
    for name in ("fa3", "fa4", "flashinfer", "trtllm_mha"):
        ATTENTION_BACKENDS[name] = capability.asks(factories[name])
    setup = "sglang.srt.model_executor.model_runner_components.attention_backend_setup.attn_backend_wrapper"
    install.put({setup: capability.asks(pkgutil.resolve_name(setup))})


def _without_scheduler(factory: Callable[[Any], Any]) -> Callable[[Any], Any]:
    """Wrap fa3's factory so that the backend does not compute scheduler metadata, which are optional."""

    def make(runner: Any) -> Any:
        backend = factory(runner)
        backend._get_scheduler_metadata = None
        return backend

    return make


def _stub_sgl_kernel() -> None:
    """Stub the names that `flashattention_backend` imports from sgl_kernel but does not call; sgl_kernel needs CUDA."""
    package, module = ModuleType("sgl_kernel"), ModuleType("sgl_kernel.flash_attn")
    package.flash_attn = module  # type: ignore[attr-defined]
    package.merge_state_v2 = None  # type: ignore[attr-defined]
    for name in ("flash_attn_varlen_func", "flash_attn_with_kvcache", "get_scheduler_metadata"):
        setattr(module, name, None)
    sys.modules |= {"sgl_kernel": package, "sgl_kernel.flash_attn": module}
