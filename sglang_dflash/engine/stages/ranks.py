"""Data-parallel attention (`--attn-dp-size`): each group of ranks serves its own requests in attention layers.

MLP and MoE layers process the token rows of all groups together. So a forward of the target involves all ranks, and a
rank without requests runs a forward without rows. SGLang computes the number of a rank's rows as the rank's number of
requests times the width. So all ranks verify the same width, the whole block. The draft runs within each group.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from types import SimpleNamespace

import numpy as np
import torch
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
from sglang.srt.utils import get_available_gpu_memory

from sglang_dflash.engine.stages.forward import Forward

Agree = Callable[[np.ndarray], None]
Scope = Callable[[], AbstractContextManager]
KeepUp = Callable[[ScheduleBatch], None]


def free_gib(runner: ModelRunner) -> float:
    """Return the free memory of the device in GiB: the minimum over all ranks, so that all ranks choose the same."""
    group = get_parallel().tp_group
    return get_available_gpu_memory(
        runner.device, runner.gpu_id, distributed=group.world_size > 1, cpu_group=group.cpu_group
    )


class OneGroup:
    """Arrangement in which all ranks serve the same requests."""

    meet = False  # whether ranks with different requests exchange token rows in a forward

    def draft_scope(self, target: ModelRunner) -> Scope:
        """Return a function that makes the context manager under which the draft is built, captured and run."""
        return nullcontext

    @contextmanager
    def making_draft(self, target: ModelRunner, block_size: int) -> Iterator[None]:
        """Set the draft's scope and block size while SGLang builds the draft's runner."""
        with self.draft_scope(target)(), get_spec().override(speculative_num_draft_tokens=block_size):
            yield

    def beside_idle_ones(self, forward: Forward) -> Forward:
        """Return a form of the target's `forward` that works while other ranks have no requests.

        In this class: return `forward` itself.
        """
        return forward

    def assume_equal_batches(self, batch: ForwardBatch) -> None:
        """Set SGLang's metadata for data parallelism as if all ranks had equal batches. In this class: do nothing."""

    def keep_up(self, worker: TpModelWorker, block_size: int) -> KeepUp:
        """Return a function that a rank without requests calls when other ranks run a forward.

        In this class the function does nothing.
        """
        return lambda batch: None


class Groups(OneGroup):
    """Arrangement in which groups of ranks serve different requests: data-parallel attention."""

    meet = True

    def draft_scope(self, target: ModelRunner) -> Scope:
        """Return a function that makes a context manager under which only the ranks of one group communicate."""
        spec = model_draft_parallel_spec(
            target.spec_aux_config.draft_model_config, spec_algorithm=target.spec_algorithm
        )
        layout = resolve_draft_parallel_layout(spec)

        @contextmanager
        def scope() -> Iterator[None]:
            # Without `attn_dp_enabled=False` the draft's graphs would wait for the batches of other groups.
            with draft_tp_context(layout), get_parallel().override(attn_dp_enabled=False):
                yield

        return scope

    def beside_idle_ones(self, forward: Forward) -> Forward:
        """Wrap `forward` to run eagerly on all ranks whenever a rank has no requests.

        A rank without requests runs eagerly, without rows. The exchange of rows would fail if another rank replayed a
        graph, which has a fixed number of rows on every rank.
        """

        def together(batch: ForwardBatch) -> ModelRunnerOutput:
            if min(batch.original_global_num_tokens_cpu) == 0:
                batch.can_run_decode_cuda_graph = False
            return forward(batch)

        return together

    def assume_equal_batches(self, batch: ForwardBatch) -> None:
        """Set SGLang's metadata as if every group's forward had as many requests as this one."""
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

    def keep_up(self, worker: TpModelWorker, block_size: int) -> KeepUp:
        """Return a function that a rank without requests calls to join other ranks' prefill or verify, without rows."""
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


def from_first_rank(group: GroupCoordinator) -> Agree:
    """Return a function that overwrites an array with the array of the group's first rank, by a CPU broadcast.

    All ranks of `group` must call the returned function with arrays of equal shape and dtype.
    """

    def agree(values: np.ndarray) -> None:
        if group.world_size > 1:
            torch.distributed.broadcast(torch.from_numpy(values), src=group.ranks[0], group=group.cpu_group)

    return agree


def from_first_of_ours() -> Agree:
    """Return `from_first_rank` for the group of ranks that serves the same requests as this rank."""
    return from_first_rank(get_dp_tp_group())


def within(scope: Scope, forward: Forward) -> Forward:
    """Wrap `forward` to run in `scope`."""
    if scope is nullcontext:
        return forward

    def scoped(batch: ForwardBatch, **options: int) -> ModelRunnerOutput:
        with scope():
            return forward(batch, **options)

    return scoped
