"""The target's LoRA adapters: which rows of a forward use which one. The draft has none.

SGLang says so for every forward that it builds of a batch, a verified block's too. Captured graphs read it from tensors
that SGLang makes anew with each graph runner, and of which it knows the last ones only; so every width keeps its own.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from sglang.srt.model_executor.forward_batch_info import ForwardBatch
from sglang.srt.model_executor.model_runner import ModelRunner

# Attributes of SGLang's LoRA backends: csgmv and triton have the first, triton the second, triton_v2 the third.
STATIC = ("cuda_graph_batch_info", "cuda_graph_sgemm_batch_info", "decode_cuda_graph_batch_info")

Routing = Mapping[str, Any]  # by the attribute's name; empty without LoRA


def routing_of(runner: ModelRunner) -> Routing:
    """What the graphs that were captured last read."""
    if runner.lora_manager is None:
        return {}
    held = vars(runner.lora_manager.lora_backend)
    return {name: held[name] for name in STATIC if name in held}


def use(runner: ModelRunner, routing: Routing) -> None:
    """From now on SGLang writes where the graphs that captured `routing` read."""
    if routing:
        vars(runner.lora_manager.lora_backend).update(routing)


def keep_buffers(runner: ModelRunner) -> None:
    """A graph runner of fewer tokens would have SGLang free the buffers that experts' adapters are sorted in, and make
    smaller ones; graphs of wider blocks have captured these."""
    if runner.lora_manager is not None:
        runner.lora_manager.lora_backend._moe_cg_buffer_max_bs = None


def without_adapters(runner: ModelRunner, batch: ForwardBatch) -> None:
    """For a forward that SGLang did not build of a batch: all of its rows are the base model's."""
    if runner.lora_manager is not None:
        batch.lora_ids = [None] * batch.batch_size
        runner.lora_manager.prepare_lora_batch(batch)
