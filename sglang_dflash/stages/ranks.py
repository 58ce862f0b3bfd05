"""Attention data parallelism: groups of ranks that serve requests of their own and meet in the target's other layers.

A forward of the target is then of all ranks at once, whatever each has to do: one without requests runs an empty one,
and all are told how many rows each has, which SGLang takes to be requests times the width. So all verify the same
width, the block. The draft is each group's own.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from types import SimpleNamespace

import numpy as np
import torch
from sglang.srt.configs.model_config import ModelConfig
from sglang.srt.distributed.parallel_state import GroupCoordinator
from sglang.srt.layers.dp_attention import get_dp_tp_group
from sglang.srt.managers.schedule_batch import ScheduleBatch
from sglang.srt.managers.tp_worker import TpModelWorker
from sglang.srt.model_executor.forward_batch_info import CaptureHiddenMode, ForwardBatch
from sglang.srt.model_executor.model_runner import ModelRunner, ModelRunnerOutput
from sglang.srt.runtime_context import get_parallel, get_spec
from sglang.srt.speculative.dflash_info import DFlashVerifyInput
from sglang.srt.speculative.draft_parallel import model_draft_parallel_spec, resolve_draft_parallel_layout
from sglang.srt.speculative.spec_utils import draft_tp_context

from sglang_dflash.stages import state
from sglang_dflash.stages.forward import Forward

Agree = Callable[[np.ndarray], None]
Scope = Callable[[], AbstractContextManager]
KeepUp = Callable[[ScheduleBatch], None]


def meet() -> bool:
    return get_parallel().attn_dp_enabled


def from_first_rank(group: GroupCoordinator) -> Agree:
    """Overwrites an array with the first rank's, over the host network; called by all ranks of `group` alike."""

    def agree(values: np.ndarray) -> None:
        if group.world_size > 1:
            torch.distributed.broadcast(torch.from_numpy(values), src=group.ranks[0], group=group.cpu_group)

    return agree


def from_first_of_ours() -> Agree:
    """The same among the ranks that share requests."""
    return from_first_rank(get_dp_tp_group())


def draft_scope(target: ModelRunner) -> Scope:
    """Where the draft is made, planned, captured and run: among the ranks that share requests."""
    if not meet():
        return nullcontext
    spec = model_draft_parallel_spec(target.spec_aux_config.draft_model_config, spec_algorithm=target.spec_algorithm)
    layout = resolve_draft_parallel_layout(spec)

    @contextmanager
    def scope() -> Iterator[None]:
        # The draft's graphs would ask for other ranks' batches.
        with draft_tp_context(layout), get_parallel().override(attn_dp_enabled=False):
            yield

    return scope


@contextmanager
def making_draft(target: ModelRunner, block_size: int) -> Iterator[None]:
    """The draft's scope, where SGLang makes what runs it: with the block it fills, whatever is verified."""
    with draft_scope(target)(), get_spec().override(speculative_num_draft_tokens=block_size):
        yield


def why_whole_blocks(target: ModelConfig) -> str:
    """Why nothing less than the block is verified, if it is so."""
    if not meet():
        return state.why_whole_blocks(target)
    return "ranks of attention data parallelism have requests of their own and one width"


def within(scope: Scope, forward: Forward) -> Forward:
    """`forward`, run in `scope`."""
    if scope is nullcontext:
        return forward

    def scoped(batch: ForwardBatch) -> ModelRunnerOutput:
        with scope():
            return forward(batch)

    return scoped


def beside_idle_ones(forward: Forward) -> Forward:
    """The target's `forward`, where some ranks may have no requests. These run eagerly, with as many rows as they have,
    and a graph replays with as many as it was captured for: so then all run eagerly."""
    if not meet():
        return forward

    def together(batch: ForwardBatch) -> ModelRunnerOutput:
        if min(batch.original_global_num_tokens_cpu) == 0:
            batch.can_run_decode_cuda_graph = False
        return forward(batch)

    return together


def tell_all(batch: ForwardBatch) -> None:
    """Before a forward that no scheduler has prepared: all ranks run one of as many requests."""
    if not meet():
        return
    requests = [batch.batch_size] * get_parallel().num_dp_ranks
    batch.init_mlp_sync_metadata(
        SimpleNamespace(
            global_num_tokens=requests,
            global_num_tokens_for_logprob=requests,
            can_run_decode_cuda_graph=True,
            can_run_dp_draft_cuda_graph=True,
            dp_spec_prefill_coordination_applied=False,
        ),
        batch.input_ids.device,
    )


def keep_up(worker: TpModelWorker, block_size: int) -> KeepUp:
    """What a rank without requests runs while others read prompts or verify blocks."""
    if not meet():
        return lambda batch: None
    nothing = torch.empty(0, dtype=torch.int64, device=worker.device)

    def run(batch: ScheduleBatch) -> None:
        if batch.is_extend_in_batch:
            worker.forward_batch_generation(batch, capture_hidden_mode=CaptureHiddenMode.FULL)
            return
        block = DFlashVerifyInput(
            draft_token=nothing,
            positions=nothing,
            draft_token_num=block_size,
            capture_hidden_mode=CaptureHiddenMode.FULL,
        )
        forward_batch, _ = block.prepare_for_verify(batch, worker, defer_metadata_init=True)
        forward_batch.can_run_decode_cuda_graph = False
        worker.model_runner.forward(forward_batch)

    return run
