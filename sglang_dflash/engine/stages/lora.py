"""Routing of a forward's token rows to the target's LoRA adapters. The draft has no adapters.

SGLang computes the routing for every forward that it builds from a batch, including verifies. Captured graphs read the
routing from tensors that SGLang creates with each graph runner. But SGLang only keeps a reference to the tensors of the
last graph runner. So this plugin keeps the tensors of every width.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from sglang.srt.model_executor.forward_batch_info import ForwardBatch
from sglang.srt.model_executor.model_runner import ModelRunner

# Attributes in which SGLang's LoRA backends keep the routing tensors. csgmv has the first one, triton the first two,
# and triton_v2 the third.
STATIC = ("cuda_graph_batch_info", "cuda_graph_sgemm_batch_info", "decode_cuda_graph_batch_info")
SORTED = "cuda_graph_sgemm_batch_info"  # triton's routing of a decode step, in which rows are sorted by adapter

Routing = Mapping[str, Any]  # by attribute name; empty without LoRA


def routing_of(runner: ModelRunner) -> Routing:
    """Return the routing tensors of the graph runner that was created last."""
    if runner.lora_manager is None:
        return {}
    held = vars(runner.lora_manager.lora_backend)
    return {name: held[name] for name in STATIC if name in held}


def use(runner: ModelRunner, routing: Routing) -> None:
    """Set the tensors into which SGLang writes the routing. These must be the tensors that the next graph reads."""
    if routing:
        vars(runner.lora_manager.lora_backend).update(routing)


def keep_buffers(runner: ModelRunner) -> None:
    """Prevent SGLang from replacing the buffers in which it sorts token rows by expert and adapter.

    SGLang would shrink the buffers to the size of each new graph runner. But graphs that were captured earlier read the
    existing buffers.
    """
    if runner.lora_manager is not None:
        runner.lora_manager.lora_backend._moe_cg_buffer_max_bs = None


def route_decode_step(runner: ModelRunner, batch: ForwardBatch) -> None:
    """Route the token rows of a decode step that SGLang has routed as a verify. Other backends route both alike."""
    if runner.lora_manager is not None and SORTED in vars(runner.lora_manager.lora_backend):
        runner.lora_manager.prepare_lora_batch(batch)


def without_adapters(runner: ModelRunner, batch: ForwardBatch) -> None:
    """Route all token rows of a forward to the base model, for a forward that SGLang did not build from a batch."""
    if runner.lora_manager is not None:
        batch.lora_ids = [None] * batch.batch_size
        runner.lora_manager.prepare_lora_batch(batch)
