"""Routing of a forward's rows to the target's LoRA adapters. The draft has no adapters.

SGLang sets the routing for every forward that it builds from a batch, including verifies. Captured graphs read it from
tensors that SGLang creates with each graph runner, but SGLang refers only to the last ones. So every width stores its
own tensors.
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
    """Return the routing tensors of the graphs that were captured last."""
    if runner.lora_manager is None:
        return {}
    held = vars(runner.lora_manager.lora_backend)
    return {name: held[name] for name in STATIC if name in held}


def use(runner: ModelRunner, routing: Routing) -> None:
    """Make SGLang write the routing into the tensors `routing`, for graphs that were captured with them."""
    if routing:
        vars(runner.lora_manager.lora_backend).update(routing)


def keep_buffers(runner: ModelRunner) -> None:
    """Prevent SGLang from replacing the buffers in which experts' adapters are sorted.

    For a graph runner with fewer tokens SGLang would allocate smaller buffers, but graphs of wider blocks read the old
    ones.
    """
    if runner.lora_manager is not None:
        runner.lora_manager.lora_backend._moe_cg_buffer_max_bs = None


def without_adapters(runner: ModelRunner, batch: ForwardBatch) -> None:
    """Route all rows of a forward to the base model, because SGLang did not build it from a batch."""
    if runner.lora_manager is not None:
        batch.lora_ids = [None] * batch.batch_size
        runner.lora_manager.prepare_lora_batch(batch)
