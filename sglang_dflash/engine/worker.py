"""Worker for DFLASH, called by SGLang's scheduler. It runs the stages of a step and computes no tensors itself.

    width      choose the verify width           width/chooser.py
    plan       compute the block's KV slots      stages/planner.py
    draft      guess the block                   stages/drafter.py, draft/sglang_model.py
    copy       replace last drafts by copies     stages/copier.py
    verify     score the block with the target   stages/verifier.py
    choose     draw the target's own tokens      stages/choice.py
    accept     accept drafts, add the bonus      kernels/accept.py
    count      count tokens and gains of copies  stages/choice.py, stages/copier.py
    commit     advance recurrent states          stages/state.py
    publish    give the scheduler the lengths
    append     write context K/V of kept rows    stages/context_kv.py

For each variant of a stage (ring buffers or shared KV slots, hybrid target or not, ...) there is a class, chosen when
the server starts. `config.py` makes the choices that are possible before weights load.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Any

import torch
from sglang.srt.environ import envs
from sglang.srt.managers.schedule_batch import ScheduleBatch
from sglang.srt.managers.tp_worker import TpModelWorker
from sglang.srt.managers.utils import GenerationBatchResult
from sglang.srt.mem_cache.allocator import BaseTokenToKVPoolAllocator
from sglang.srt.mem_cache.memory_pool import ReqToTokenPool
from sglang.srt.model_executor.forward_batch_info import CaptureHiddenMode
from sglang.srt.model_executor.model_runner import ModelRunner, SamplingPrewarmResult
from sglang.srt.model_executor.pool_configurator import MemoryPoolConfig
from sglang.srt.server_args import ServerArgs
from sglang.srt.speculative.base_spec_worker import BaseSpecWorker, HiCacheDraftPlan
from sglang.srt.speculative.draft_worker_common import build_draft_tp_worker
from sglang_dflash_kernels.accept import Accepted

from sglang_dflash import __version__
from sglang_dflash.engine.config import DFlashConfig
from sglang_dflash.engine.draft.target_ends import target_ends
from sglang_dflash.engine.host import contract
from sglang_dflash.engine.host.draft_input import DraftInput
from sglang_dflash.engine.host.names import SECTIONS
from sglang_dflash.engine.host.results import idle_result, result_of
from sglang_dflash.engine.memory.draft_kv import fit_page_tables
from sglang_dflash.engine.memory.records import use_records
from sglang_dflash.engine.metrics.trace import traced
from sglang_dflash.engine.stages import ranks
from sglang_dflash.engine.stages.build import build_stages
from sglang_dflash.engine.stages.drafter import may_capture
from sglang_dflash.engine.stages.dry_run import DryRun
from sglang_dflash.engine.stages.greedy import verified_logits
from sglang_dflash.engine.stages.outputs import hidden_states_of, sampling_masks_by_block
from sglang_dflash.engine.stages.stages import Stages
from sglang_dflash.engine.stages.state import State, make_state, track_interval
from sglang_dflash.engine.step import Plan, Target
from sglang_dflash.engine.width.chooser import Chooser
from sglang_dflash.flags import GdnState

logger = logging.getLogger(__name__)

Publish = Callable[[torch.Tensor], None]


class DFlashWorker(BaseSpecWorker):
    """Worker that serves DFLASH on one rank. The start-up methods below are in the order in which SGLang calls them."""

    state: State  # for verifies of `config.widest` tokens; set by `init_attention_backends`
    stages: Stages  # set by `prewarm_sampling`, as is `width`
    width: Chooser

    def __init__(
        self, config: DFlashConfig, server_args: ServerArgs, gpu_id: int, nccl_port: int, target_worker: TpModelWorker
    ) -> None:
        """Load the draft. The target is already loaded. The memory pools of both are created later."""
        super().__init__()
        self._target_worker, self.target_runner = target_worker, target_worker.model_runner
        self.device = target_worker.device
        if self.target_runner.lora_manager is not None:
            contract.check(SECTIONS["lora"])
        self.config = config
        self.ranks = ranks.Groups() if config.attention_dp else ranks.OneGroup()
        ends = target_ends(self.target_runner.model, fp8_head=config.flags.fp8_head)
        self.logits = verified_logits(self.target_runner, ends, self.ranks)
        with self.making_draft():
            self._draft_worker = build_draft_tp_worker(
                server_args=server_args,
                gpu_id=gpu_id,
                nccl_port=nccl_port,
                target_model_config=self.target_runner.model_config,
                algo_label="DFLASH",
                attention_backend_override=config.draft_attention_backend,
            ).draft_worker
        self.draft_runner = self._draft_worker.model_runner
        if config.gdn_state is GdnState.FOLD:
            use_records()
        self.hidden_states = hidden_states_of(self.target_runner.model, features=config.flags.returns_features)
        # The last position can be two widest verifies past the longest context: one in flight and one being planned.
        max_position = self.target_runner.model_config.context_len + 2 * config.widest
        draft, fp8_head = self.draft_runner.model, config.flags.fp8_head
        draft.attach(ends, max_position, config.draft_attention_backend, fp8_head=fp8_head)

    # -- start-up, in the order SGLang calls it -------------------------------------------------------------------

    def making_draft(self) -> AbstractContextManager[None]:
        """Return a context manager under which SGLang builds the draft's parts."""
        return self.ranks.making_draft(self.target_runner, self.config.n_slots)

    def state_for(self, width: int) -> State:
        """Build the `State` that advances the target's recurrent states after verifies of `width` tokens."""
        return make_state(self._target_worker, self.config.gdn_state, width)

    def alloc_memory_pool(
        self,
        memory_pool_config: MemoryPoolConfig | None = None,
        req_to_token_pool: ReqToTokenPool | None = None,
        token_to_kv_pool_allocator: BaseTokenToKVPoolAllocator | None = None,
    ) -> None:
        """Allocate the draft's KV pool: a KV slot per target KV slot, or ring buffers with their own request table."""
        pool, table = self.config.draft_kv.pools(memory_pool_config, req_to_token_pool, self.device)
        with self.making_draft():
            self._draft_worker.alloc_memory_pool(
                memory_pool_config=pool,
                req_to_token_pool=table,
                token_to_kv_pool_allocator=token_to_kv_pool_allocator,
            )
        self.draft_runner.model.make_room(len(self.draft_runner.req_to_token_pool.req_to_token))

    def init_hicache_draft_plan(self) -> None:
        """Plan the hierarchical cache's copies of the draft's K/V to the host and back, together with the target's.

        Ring buffers are excluded, because their KV slots are not the target's and hold no reusable prefix.
        """
        super().init_hicache_draft_plan()
        if self.config.draft_window is not None:
            self._hicache_draft_plan = HiCacheDraftPlan()

    def init_attention_backends(self) -> None:
        """Build the draft's attention backends, and attach `state` to the target's backend."""
        fit_page_tables(self.draft_runner)
        with self.making_draft():
            super().init_attention_backends()
        self.state = self.state_for(self.config.widest)
        self.state.attach(self.target_runner.attn_backend)

    def init_cuda_graphs(self) -> None:
        """Capture the draft's graphs, see `may_capture`."""
        capture = may_capture(self.target_runner)
        with self.making_draft():
            self._draft_worker.init_cuda_graphs(capture_decode_cuda_graph=capture)

    @torch.no_grad()
    def prewarm_sampling(self) -> SamplingPrewarmResult:
        """Build the stages and run dry steps. SGLang calls this start-up method last.

        Dry and real steps share a stream, because PyTorch reuses freed memory only on the stream that allocated it.
        """
        wait = torch.get_device_module(self.target_runner.device).synchronize
        wait()  # earlier start-up work may still run on another stream
        self._init_stages()
        wait()
        return self.target_runner.sampling_prewarm_result

    def _init_stages(self) -> None:
        """Build the stages and run dry steps. Pools, attention backends and SGLang's own graphs must exist."""
        config, target, draft = self.config, self.target_runner, self.draft_runner
        on_host = target.device == "cpu" and not config.flags.rehearse.gpu  # the emulation counts as a GPU
        if on_host:  # no captured graph reads the inputs of a step, so they need not be copied into fixed buffers
            envs.SGLANG_EAGER_INPUT_NO_COPY.set(True)
        self.stages = build_stages(
            self._target_worker,
            draft,
            config.draft_kv.slots(target, draft),
            (self.state, self.state_for),
            logits=self.logits,
            ranks=self.ranks,
            hidden_states=self.hidden_states,
            widths=config.widths,
            copy=config.copy,
            n_slots=config.n_slots,
            mask_token_id=config.draft.mask_token_id,
            slots_are_ours=config.slots_are_ours,
            simulated=config.flags.simulated,
            on_host=on_host,
        )
        policy = DryRun(self.stages, on_host=on_host).run(config.flags.width_policy)
        self.stages, trace = traced(self.stages, config.flags.width_trace)
        self.width = Chooser(policy, trace, host_computes=target.device == "cpu")
        logger.info("sglang-dflash %s serves DFLASH: %s", __version__, config.summary())

    # -- SGLang's interface of a worker --------------------------------------------------------------------------------

    @property
    def spec_v2_attn_backends(self) -> tuple:
        """Return both attention backends. The scheduler checks if one of them needs sequence lengths on the host."""
        return self.target_runner.attn_backend, self.draft_runner.attn_backend

    @property
    def model_runner(self) -> ModelRunner:
        """Return the draft's runner, whose weights `Engine.save_remote_model` saves under `draft_url`."""
        return self.draft_runner

    def weight_update_runners(self) -> list[tuple[str, ModelRunner]]:
        """Return the names and runners whose weights SGLang updates in addition to the target's."""
        return [("draft", self.draft_runner)]

    def clear_cache_pool(self) -> None:
        """Drop rows whose context K/V are not written yet, because SGLang has freed the KV slots of these rows."""
        self.stages.context_kv.late.forget()

    def forward_batch_generation(
        self,
        batch: ScheduleBatch,
        on_publish: Publish | None = None,
        grammar_barrier: Callable[[], None] | None = None,
        pp_proxy_tensors: None = None,  # no pipeline parallelism
    ) -> GenerationBatchResult:
        """Run one step of a batch: prefill, decode or idle."""
        publish = on_publish or not_published
        if batch.forward_mode.is_idle():
            return self.idle(batch, publish)
        if batch.forward_mode.is_extend() or batch.is_extend_in_batch:
            return self.prefill(batch, publish)
        return self.decode(batch, publish, grammar_barrier)

    def describe(self) -> dict[str, Any]:
        """Return this worker's part of `GET /server_info`."""
        return {
            "version": __version__,
            "block_size": self.config.block_size,
            "widest": self.config.widest,
            "draft_kv_bytes": int(sum(self.draft_runner.token_to_kv_pool.get_kv_size_bytes())),  # int: no numpy in JSON
            "width": self.width.describe(),
            "copies": self.stages.copier.totals(),
            "simulated": self.config.flags.simulated and self.config.flags.simulated._asdict(),
        }

    def on_verify_complete_cpu(self, num_correct_drafts_per_req: list[int], batch_size: int = 0) -> None:
        """Record the outcome of a decode step. SGLang calls this in step order, once the counts are on the host."""
        self.width.observe(num_correct_drafts_per_req, time.perf_counter())

    # -- the three kinds of step ----------------------------------------------------------------------------------

    def prefill(self, batch: ScheduleBatch, publish: Publish) -> GenerationBatchResult:
        """Prefill prompts: the target's features become the draft's context. Return the first tokens."""
        self.width.interrupt()
        self.stages.choice.begin(batch)
        self.stages.verifier.restore()
        result = self._target_worker.forward_batch_generation(batch, capture_hidden_mode=CaptureHiddenMode.FULL)
        anchor_B = self.stages.choice.anchors(batch, result.next_token_ids)
        publish(batch.seq_lens)
        # This prefill must write the draft's K/V, because the scheduler then adds the prompts to the prefix cache.
        output = result.logits_output
        self.stages.context_kv.append_prompt(batch, output.hidden_states)
        self.stages.copier.read(batch)
        output.hidden_states = self.hidden_states.of_prompts(batch, output)
        result.new_seq_lens = batch.seq_lens
        result.next_draft_input = DraftInput(bonus_tokens=anchor_B, new_seq_lens=batch.seq_lens)
        return result

    def decode(
        self, batch: ScheduleBatch, publish: Publish, grammar_barrier: Callable[[], None] | None
    ) -> GenerationBatchResult:
        """Run one DFlash step. The host waits for the device only if a request needs this, e.g. for its grammar."""
        stages: Stages = self.stages
        rids = [req.rid for req in batch.reqs]
        width = self.width.decide(rids, [*batch.reqs], now_s=time.perf_counter())
        plan = stages.planner.plan(batch, width)
        stages.context_kv.before_draft(plan)
        drafts_BN = stages.drafter.draft(plan, graphs=batch.can_run_decode_cuda_graph)
        copied = stages.copier.copy(plan, drafts_BN)
        target = stages.verifier.verify(batch, plan, copied.tokens_BN)
        target_BN = stages.choice.choose(batch, plan, copied.tokens_BN, target, grammar_barrier)
        accepted = stages.accept(copied.tokens_BN, target_BN, plan.prefix_len_B, track_interval(batch))
        stages.choice.count_tokens(batch, accepted)
        stages.copier.weigh(copied, accepted)
        stages.verifier.commit(batch, plan, accepted)
        publish(accepted.next_prefix_len_B)
        stages.context_kv.append(rids, plan, target.features_TC, accepted.n_committed_B)
        return self.step_result(batch, plan, target, accepted)

    def idle(self, batch: ScheduleBatch, publish: Publish) -> GenerationBatchResult:
        """Run a step of a rank without requests, while other ranks have requests (attention data parallelism)."""
        self.stages.verifier.keep_up(batch)
        state = DraftInput.idle(self.device)
        publish(state.new_seq_lens)
        return idle_result(state, self.config.block_size)

    def step_result(
        self, batch: ScheduleBatch, plan: Plan, target: Target, accepted: Accepted
    ) -> GenerationBatchResult:
        """Return the result of a step in the scheduler's format."""
        result = result_of(batch, plan, target, accepted)
        sampling_masks_by_block(batch, target.output, accepted.n_committed_B, plan.width)
        return result


def not_published(next_prefix_len_B: torch.Tensor) -> None:
    """Do nothing, because without the overlap schedule the scheduler reads the lengths from the step's result."""
