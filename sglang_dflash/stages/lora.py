"""The target's LoRA adapters: which rows of a forward use which adapter. The draft has none.

SGLang sets this for every forward that it builds from a batch, verifies included. Captured graphs read it from tensors
that SGLang makes anew with each graph runner, keeping a reference only to the latest. So every width keeps its own.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from sglang.srt.model_executor.forward_batch_info import ForwardBatch
from sglang.srt.model_executor.model_runner import ModelRunner

# Attributes of SGLang's LoRA backends: csgmv and triton have the first, triton the second, triton_v2 the third.
STATIC = ("cuda_graph_batch_info", "cuda_graph_sgemm_batch_info", "decode_cuda_graph_batch_info")

Routing = Mapping[str, Any]  # by attribute name; empty without LoRA


def routing_of(runner: ModelRunner) -> Routing:
    """Return the tensors that the most recently captured graphs read."""
    if runner.lora_manager is None:
        return {}
    held = vars(runner.lora_manager.lora_backend)
    return {name: held[name] for name in STATIC if name in held}


def use(runner: ModelRunner, routing: Routing) -> None:
    """Make SGLang write its routing into the tensors that the graphs captured with `routing` read."""
    if routing:
        vars(runner.lora_manager.lora_backend).update(routing)


def keep_buffers(runner: ModelRunner) -> None:
    """Keep the buffers in which experts' adapters are sorted.

    For a graph runner of fewer tokens SGLang would replace them by smaller ones, but graphs of wider blocks read them.
    """
    if runner.lora_manager is not None:
        runner.lora_manager.lora_backend._moe_cg_buffer_max_bs = None


def without_adapters(runner: ModelRunner, batch: ForwardBatch) -> None:
    """Mark all rows of a forward that SGLang did not build as the base model's."""
    if runner.lora_manager is not None:
        batch.lora_ids = [None] * batch.batch_size
        runner.lora_manager.prepare_lora_batch(batch)
