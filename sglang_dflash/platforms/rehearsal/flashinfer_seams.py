"""Replacements in FlashInfer without CUDA: definitions of its compiled modules, and answers to its GPU queries."""

from __future__ import annotations

import functools
import importlib
import pkgutil
from collections.abc import Callable
from contextlib import nullcontext
from types import ModuleType, SimpleNamespace
from typing import Any

import torch

from sglang_dflash.engine.host import contract as sglang
from sglang_dflash.engine.host.names import SECTIONS
from sglang_dflash.platforms.cpu import install as cpu
from sglang_dflash.platforms.rehearsal import capability, flashinfer, host, trtllm

_BACKENDS = "sglang.srt.layers.attention."


@functools.cache
def install() -> None:
    """Install the definitions once per process, at the first use, because importing FlashInfer takes seconds."""
    sglang.check(SECTIONS["flashinfer"])
    define(capability.rehearsed())
    # SGLang imports FlashInfer only on CUDA, so these modules were loaded without it. Load them again with FlashInfer.
    available = pkgutil.resolve_name("sglang.srt.utils.is_flashinfer_available")
    cpu.put({"sglang.srt.utils.is_flashinfer_available": lambda: True})
    for name in ("flashinfer_backend", "trtllm_mla_backend", "trtllm_mha_backend"):
        importlib.reload(importlib.import_module(_BACKENDS + name))
    cpu.put({"sglang.srt.utils.is_flashinfer_available": available, f"{_BACKENDS}flashinfer_backend.torch": _TORCH})


def define(gpu: capability.Gpu) -> None:
    """Replace FlashInfer's compiled modules by definitions, and its GPU queries by functions with `gpu`'s values."""
    asked: dict[str, Any] = {
        "get_compute_capability": lambda device: gpu.capability,
        "get_device_sm_count": lambda device: gpu.n_processors,
    }
    for name in ("utils", "decode", "prefill", "xqa"):
        cpu.put(asked, f"flashinfer.{name}.")
    modules: dict[str, Any] = {
        "prefill.torch": _TORCH,
        "prefill.get_batch_prefill_module": flashinfer.batch_prefill_module,
        "prefill.get_fmha_module": lambda *args: SimpleNamespace(run=flashinfer.fmha_varlen_run),
        "prefill.fmha_varlen_plan": flashinfer.fmha_varlen_plan,
        "prefill.get_trtllm_gen_fmha_module": _TRTLLM_GEN,
        "prefill.get_trtllm_fmha_v2_module": lambda *args: SimpleNamespace(run=trtllm.fmha_v2),
        "decode.torch": _TORCH,
        "decode.get_batch_prefill_module": flashinfer.batch_prefill_module,
        "decode.get_batch_decode_module": flashinfer.batch_decode_module,
        "decode.get_trtllm_gen_fmha_module": _TRTLLM_GEN,
        "xqa.get_xqa_module": lambda *args: SimpleNamespace(xqa=trtllm.xqa),
        "cascade.get_cascade_module": lambda: SimpleNamespace(merge_state=flashinfer.merge_state),
    }
    cpu.put(modules, "flashinfer.")


def over_flashinfer(factory: Callable[[Any], Any]) -> Callable[[Any], Any]:
    """Wrap a backend's factory so that the definitions are installed before the backend is created."""

    def make(runner: Any) -> Any:
        install()
        return factory(runner)

    return make


class _Torch(ModuleType):
    """Stand-in for torch in modules that name CUDA or allocate pinned memory. Both need a GPU's driver.

    `empty`, `zeros` and `cuda` are replaced below. All other names are torch's own.
    """

    def __getattr__(self, name: str) -> Any:
        return vars(torch)[name] if name in vars(torch) else torch.__getattr__(name)


def _allocating(fn: Callable[..., torch.Tensor]) -> Callable[..., torch.Tensor]:
    def allocate(*args: Any, pin_memory: bool = False, device: Any = None, **kwargs: Any) -> torch.Tensor:
        tensor = fn(*args, device="cpu" if device == "cuda" else device, **kwargs)
        return host.mark(tensor) if pin_memory else tensor

    return allocate


_TORCH = _Torch("torch")
_TORCH.empty, _TORCH.zeros = _allocating(torch.empty), _allocating(torch.zeros)  # type: ignore[attr-defined]
_TORCH.cuda = SimpleNamespace(device=lambda device: nullcontext())  # type: ignore[attr-defined]
_TRTLLM_GEN = functools.cache(trtllm.TrtllmGen)
