"""Verify: run one forward of the target over the blocks, for logits and features of every slot."""

from __future__ import annotations

from collections.abc import Mapping
from typing import NamedTuple

import torch
from sglang.srt.layers.attention.base_attn_backend import AttentionBackend
from sglang.srt.managers.schedule_batch import ScheduleBatch
from sglang.srt.managers.tp_worker import TpModelWorker
from sglang.srt.model_executor.forward_batch_info import CaptureHiddenMode, ForwardBatch, ForwardMode
from sglang.srt.model_executor.model_runner import ModelRunnerOutput
from sglang.srt.model_executor.runner import DecodeCudaGraphRunner
from sglang.srt.speculative.dflash_info import DFlashVerifyInput
from sglang.srt.speculative.spec_utils import GrammarTree
from sglang_dflash_kernels.accept import Accepted

from sglang_dflash.engine.stages import lora
from sglang_dflash.engine.stages.forward import directly, has_experts, through_runner
from sglang_dflash.engine.stages.outputs import HiddenStates
from sglang_dflash.engine.stages.ranks import OneGroup
from sglang_dflash.engine.stages.state import State
from sglang_dflash.engine.step import Plan, Target


class WidthEngine(NamedTuple):
    """Parts of the target for one width, see `engines.py`."""

    backend: AttentionBackend
    graphs: DecodeCudaGraphRunner | None  # None: this width runs eagerly
    state: State  # attached to the backend
    routing: lora.Routing  # tensors that the graphs read

    def padded(self, n_requests: int) -> int:
        """Return the batch size that runs for `n_requests`: the next captured one, or the same without a graph."""
        if self.graphs is None or self.graphs.disable_padding:
            return n_requests
        return next((size for size in self.graphs.capture_bs if size >= n_requests), n_requests)


class Verifier:
    """Stage that runs the target over blocks, each width with its own attention backend and graphs."""

    def __init__(
        self,
        worker: TpModelWorker,
        engines: Mapping[int, WidthEngine],
        ranks: OneGroup,
        hidden_states: HiddenStates,
        *,
        on_host: bool,
    ) -> None:
        """Store the worker and choose the target's forward.

        Args:
            worker: the target's worker.
            engines: engine of each width.
            ranks: arrangement of the ranks.
            hidden_states: rows for requests with `return_hidden_states`.
            on_host: the target runs on the CPU, without GPU emulation.
        """
        self.worker = worker
        self.engines = engines
        self.ranks = ranks
        self.hidden_states = hidden_states
        runner = worker.model_runner
        self.own = runner.attn_backend, runner.decode_cuda_graph_runner
        eager = all(engine.graphs is None for engine in engines.values())
        # Calling the model directly saves host time. On a GPU this gains nothing, because the host runs ahead.
        direct = eager and on_host and not has_experts(runner.model) and not ranks.meet
        self.forward = directly(runner) if direct else ranks.beside_idle_ones(through_runner(runner))
        self.keep_up = ranks.keep_up(worker, max(engines, default=0))

    def use(self, width: int) -> None:
        """Make the target's runner use the engine of `width`."""
        engine, runner = self.engines[width], self.worker.model_runner
        runner.attn_backend = engine.backend
        runner.decode_cuda_graph_runner = engine.graphs
        lora.use(runner, engine.routing)

    def restore(self) -> None:
        """Make the runner use SGLang's own backend and graphs, for prefill. Prefill graphs read only this backend."""
        runner = self.worker.model_runner
        runner.attn_backend, runner.decode_cuda_graph_runner = self.own

    def verify(self, batch: ScheduleBatch, plan: Plan, tokens_BN: torch.Tensor) -> Target:
        """Return logits and features of every slot, and write the target's K/V of the block.

        Args:
            tokens_BN: int64, tokens to verify; N is the plan's width, slot 0 the anchor.
        """
        self.use(plan.width)
        # The copy of the drafts to the host starts before the target's forward, so that both overlap.
        tree = GrammarTree.from_linear_chain(tokens_BN) if batch.has_grammar else None
        verified = plan.verified
        # SGLang builds the forward from these fields of the batch. The scheduler restores them after the step.
        batch.out_cache_loc = verified.slots_BN.view(-1)
        batch.seq_lens_cpu = verified.bound_B_cpu
        batch.seq_lens_sum = verified.bound_sum
        block = DFlashVerifyInput(
            draft_token=tokens_BN.view(-1),
            positions=verified.positions_BN.view(-1),
            draft_token_num=plan.width,
            capture_hidden_mode=CaptureHiddenMode.FULL,
            kv_loc_plan=verified.kv,
        )
        # Without `defer_metadata_init`, attention would be planned twice, because the forward plans it too.
        forward_batch, _ = block.prepare_for_verify(batch, self.worker, defer_metadata_init=True)
        run = self.run(forward_batch, plan)
        output = run.logits_output
        features_TC, output.hidden_states = output.hidden_states, self.hidden_states.copied(batch, output)
        return Target(run, features_TC, tree)

    def run(self, batch: ForwardBatch, plan: Plan) -> ModelRunnerOutput:
        """Run the target's forward over the plan's blocks. Call this after `use(plan.width)`.

        If the blocks of one token are decoded, turn the verify into a decode step, which runs SGLang's kernels for
        decoding. `seq_lens` includes the token in a decode step, but not in a verify. `seq_lens_cpu` includes the token
        in both.
        """
        if self.engines[plan.width].state.decodes:
            batch.forward_mode, batch.spec_info, batch.seq_lens = ForwardMode.DECODE, None, plan.verified.end_B
            lora.route_decode_step(self.worker.model_runner, batch)
        return self.forward(batch)

    def commit(self, batch: ScheduleBatch, plan: Plan, accepted: Accepted) -> None:
        """Advance each request's recurrent states by its kept rows."""
        self.engines[plan.width].state.commit(batch, plan, accepted)
