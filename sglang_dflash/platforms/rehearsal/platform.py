"""Platform of the emulation: the CPU platform with graph capture and a GPU's attention backends."""

from typing import Any

import torch
from sglang.srt.platforms.interface import PlatformCapabilities

from sglang_dflash import flags
from sglang_dflash.platforms.cpu.platform import ATTENTION_BACKEND, CpuPlatform
from sglang_dflash.platforms.cpu.saver import KeepingSaver

BACKENDS = ("fa3", "fa4", "flashinfer", "triton", "trtllm_mha")


class RehearsalPlatform(CpuPlatform):
    """CPU platform that emulates a GPU, with graph capture."""

    capabilities = PlatformCapabilities(graph_capture=True)
    packs_weights = False  # a GPU multiplies by plain weights

    def memory_saver(self) -> KeepingSaver:
        from sglang_dflash.platforms.rehearsal.saver import Saver

        return Saver()

    def apply_server_args_defaults(self, server_args: Any) -> None:
        from sglang_dflash.platforms.rehearsal import capability

        super().apply_server_args_defaults(server_args)
        capability.at_launch()

    def supports_speculative_draft_attention_backend(self, algorithm: str, backend: str) -> bool:
        return algorithm == "DFLASH" and backend in (*BACKENDS, ATTENTION_BACKEND)

    def get_graph_runner_cls(self) -> type:
        from sglang.srt.model_executor.runner import DecodeCudaGraphRunner

        return DecodeCudaGraphRunner

    def is_pin_memory_available(self, device: torch.device | None = None) -> bool:
        """Return whether streams are emulated. Only then is a copy from pinned memory asynchronous."""
        return flags.current().rehearse.streams

    def init_backend(self) -> None:
        from sglang_dflash.platforms.cpu import install
        from sglang_dflash.platforms.cpu.platform import register_choices
        from sglang_dflash.platforms.rehearsal import overlap, qwen, seams

        seams.device()
        qwen.device()
        qwen.before_models()
        install.default_to_cpu()
        register_choices()
        with_streams = overlap.device() if flags.current().rehearse.streams else {}
        install.install(seams.as_launches(install.at_import()) | with_streams)

    def post_load_model(self, model: torch.nn.Module) -> None:
        from sglang_dflash.engine.host import contract as host
        from sglang_dflash.engine.host.names import SECTIONS
        from sglang_dflash.platforms.rehearsal import buffers, cost, models, overlap, seams

        seams.lora()
        super().post_load_model(model)
        seams.graphs()
        models.layers(model)
        cost.watch_parameters(model)
        buffers.install()
        seams.attention()
        if flags.current().rehearse.streams:
            host.check(SECTIONS["streams"])
            overlap.scheduler()
        host.check(SECTIONS["rehearsal"])  # last, because `seams.attention` imports the modules to check
