"""SGLang's platform interface for a CPU: no Triton, no graphs, DFLASH with torch attention.

On an out-of-tree platform SGLang uses torch forms of norms, activations and rotary embeddings. The in-tree CPU platform
would require the AMX kernels of sgl_kernel.
"""

from collections.abc import Callable
from importlib import import_module
from typing import Any

import torch
from sglang.srt.platforms.cpu import CpuDeviceMixin
from sglang.srt.platforms.device_mixin import PlatformEnum
from sglang.srt.platforms.interface import PlatformCapabilities, SRTPlatform

from sglang_dflash.engine.host import contract
from sglang_dflash.platforms.cpu import saver, transfer

ATTENTION_BACKEND = "torch_native"


class CpuPlatform(CpuDeviceMixin, SRTPlatform):
    """Platform for a machine without an accelerator."""

    _enum = PlatformEnum.OOT
    device_name = "cpu"
    device_type = "cpu"
    capabilities = PlatformCapabilities()
    packs_weights = True

    def __init__(self) -> None:
        """Install the transfer engine and the memory saver in every process, before a model runner is imported."""
        super().__init__()
        transfer.install()
        saver.install(self.memory_saver())

    def memory_saver(self) -> saver.KeepingSaver:
        """Return the stand-in for the memory saver."""
        return saver.KeepingSaver()

    def get_dispatch_key_name(self) -> str:
        return "native"

    def get_default_attention_backend(self) -> str:
        return ATTENTION_BACKEND

    def supports_speculative_algorithm(self, algorithm: str) -> bool:
        """Return whether the algorithm is DFLASH.

        Raises:
            HostMismatch: the plugin is not loaded or lacks a hook, see `contract.require_live`.
        """
        if algorithm != "DFLASH":
            return False
        contract.require_live()
        return True

    def supports_speculative_draft_attention_backend(self, algorithm: str, backend: str) -> bool:
        return algorithm == "DFLASH" and backend == ATTENTION_BACKEND

    def get_default_speculative_draft_attention_backend(self, algorithm: str) -> str:
        return ATTENTION_BACKEND

    def support_mamba_cache_extra_buffer(self) -> bool:
        return True

    def get_speculative_cache_locs_fn(self) -> Callable[..., torch.Tensor]:
        from sglang_dflash.platforms.cpu.kv import block_cache_locs

        return block_cache_locs

    def get_torch_profiler_activity_str(self) -> str:
        """Return a name that no `/start_profile` request contains, because SGLang's own activity "CPU" suffices."""
        return ""

    def get_torch_profiler_activity(self) -> torch.profiler.ProfilerActivity:
        return torch.profiler.ProfilerActivity.CPU

    def init_backend(self) -> None:
        """Install stand-ins during the import of SGLang's model runner, before most modules import kernels."""
        from sglang_dflash.platforms.cpu import install

        register_choices()
        install.default_to_cpu()
        install.install(install.at_import())

    def post_load_model(self, model: torch.nn.Module) -> None:
        """Install the remaining stand-ins, verify all of them, and pack weights.

        SGLang calls this after each model is loaded, when all modules that use kernels are imported.
        """
        from sglang.srt.layers.attention.attention_registry import register_attention_backend

        from sglang_dflash.platforms.cpu import host_cache, install, packed
        from sglang_dflash.platforms.cpu.attention import CpuAttentionBackend

        register_attention_backend(ATTENTION_BACKEND)(CpuAttentionBackend)
        install.install(install.after_load())
        install.verify()
        host_cache.install()
        if self.packs_weights:
            packed.install()
            packed.pack(model)


def register_choices() -> None:
    """Allow the torch attention backend for drafts, and DFLASH with attention data parallelism, on this platform.

    The launching process needs these changes to parse the command line. The draft worker's process needs them too.
    """
    from sglang.srt.arg_groups.choices import DRAFT_ATTENTION_BACKEND_CHOICES, add_draft_attention_backend_choices
    from sglang.srt.platforms import current_platform

    if isinstance(current_platform, CpuPlatform) and ATTENTION_BACKEND not in DRAFT_ATTENTION_BACKEND_CHOICES:
        add_draft_attention_backend_choices([ATTENTION_BACKEND])
        # For DFLASH with attention data parallelism SGLang requires CUDA and some flags. `config.py` checks the flags,
        # so SGLang's check is disabled.
        hook: Any = import_module("sglang.srt.arg_groups.speculative_hook")
        hook.attn_dp_enabled_of = lambda args: False


def require_device(server_args: Any, previous: Callable[[Any], None]) -> None:
    """Refuse a launch without `--device` on this platform. Wraps SGLang's choice of default values.

    SGLang would take a `torch.device` where it needs a string, and fail. Whoever names no device usually expects a GPU.
    """
    from sglang.srt.arg_groups.overrides import resolving_view
    from sglang.srt.platforms import current_platform

    if resolving_view(server_args).device is None and isinstance(current_platform, CpuPlatform):
        raise ValueError(
            "torch finds no GPU; to serve on this CPU add --device cpu, else check nvidia-smi, CUDA_VISIBLE_DEVICES "
            "and the build of torch"
        )
    previous(server_args)
