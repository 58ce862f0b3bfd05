"""Forward of a model, through SGLang's runner or directly, selected when the server starts."""

from __future__ import annotations

from collections.abc import Callable

from sglang.srt.layers.moe.fused_moe_triton.layer import FusedMoE
from sglang.srt.model_executor.forward_batch_info import ForwardBatch
from sglang.srt.model_executor.forward_context import ForwardContext, forward_context
from sglang.srt.model_executor.model_runner import ModelRunner, ModelRunnerOutput
from torch import nn

# Function of a ForwardBatch. If it calls the model directly, it also takes the model's keyword arguments.
Forward = Callable[..., ModelRunnerOutput]


def through_runner(runner: ModelRunner) -> Forward:
    """Return SGLang's own forward, which replays a graph if one fits the batch."""
    return runner.forward


def directly(runner: ModelRunner) -> Forward:
    """Return a forward that calls the model itself. The model must have no experts and no captured graphs.

    The forward skips SGLang's preparation for experts, graphs and data parallelism. This preparation takes a few
    percent of a tiny model's step. Each call uses the runner's current attention backend, and passes its keyword
    arguments to the model.
    """

    def forward(batch: ForwardBatch, **options: int) -> ModelRunnerOutput:
        backend = runner.attn_backend
        backend.init_forward_metadata(batch)
        with forward_context(ForwardContext(attn_backend=backend), forward_batch=batch):
            output = runner.model(batch.input_ids, batch.positions, batch, **options)
        return ModelRunnerOutput(logits_output=output, can_run_graph=False)

    return forward


def has_experts(model: nn.Module) -> bool:
    """Return whether a layer of the model routes tokens to experts."""
    return any(isinstance(module, FusedMoE) for module in model.modules())
