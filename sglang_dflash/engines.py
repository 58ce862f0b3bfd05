"""What of the target is made once per width: attention backend, recurrent state, captured graphs; what a step costs.

SGLang's backends and graph runners read the number of tokens per request from its configuration when they are made.
So each further width gets its own, made under that width; weights and memory pools are shared.
"""

from __future__ import annotations

import logging
import math
import time
from collections.abc import Callable, Sequence
from types import SimpleNamespace

import numpy as np
import torch
from sglang.srt.distributed.parallel_state import GroupCoordinator
from sglang.srt.managers.tp_worker import TpModelWorker
from sglang.srt.model_executor.forward_batch_info import CaptureHiddenMode, ForwardMode
from sglang.srt.model_executor.model_runner import ModelRunner
from sglang.srt.model_executor.runner import DecodeCudaGraphRunner
from sglang.srt.runtime_context import get_parallel, get_spec
from sglang.srt.utils import get_available_gpu_memory
from sglang_dflash_kernels.accept import Accepted

from sglang_dflash.context_kv import ContextKV
from sglang_dflash.draft_slots import SharedSlots
from sglang_dflash.drafter import Drafter, block_forward, block_info
from sglang_dflash.planner import Planner
from sglang_dflash.state import State
from sglang_dflash.step import Plan
from sglang_dflash.verifier import Engine, Verifier

logger = logging.getLogger(__name__)

CONTEXT = 256  # tokens before the block, where a step is timed
ROUNDS = 5
NOBODY = [""]  # a request's name
KEPT_FREE = 0.5  # of the memory that is free before further widths' graphs are captured


def build_engines(
    worker: TpModelWorker, state: State, state_for: Callable[[int], State], widths: Sequence[int], block_size: int
) -> dict[int, Engine]:
    """An engine for each width, that of the whole block being what SGLang has made, with `state` attached.

    Captured graphs take memory that SGLang has not counted. Half of what it left free stays free, for the activations
    of prompts; widths whose graphs would not fit beside that are not chosen from.
    """
    runner, tp_group = worker.model_runner, get_parallel().tp_group
    whole = Engine(runner.attn_backend, runner.decode_cuda_graph_runner, state)

    def build(width: int) -> Engine:
        return whole if width == block_size else _build_engine(runner, state_for(width), width, captured=whole.graphs)

    def free_gib() -> float:
        if whole.graphs is None:
            return math.inf
        return get_available_gpu_memory(  # the least of all ranks, so that they leave out the same widths
            runner.device, runner.gpu_id, distributed=tp_group.world_size > 1, cpu_group=tp_group.cpu_group
        )

    engines = build_while_they_fit(widths, build, free_gib)
    if missing := sorted(set(widths) - set(engines)):
        logger.warning(
            "widths %s are not verified: their graphs leave too little memory; lower --mem-fraction-static or "
            "--cuda-graph-max-bs-decode, or name fewer in SGLANG_DFLASH_WIDTHS",
            missing,
        )
    return engines


def build_while_they_fit(
    widths: Sequence[int], build: Callable[[int], Engine], free_gib: Callable[[], float]
) -> dict[int, Engine]:
    """The widest first, then always the one farthest from those there are: so few of them lose little.

    A further one is taken to need as much as the largest so far.
    """
    rest, engines, most_gib = set(widths), dict[int, Engine](), 0.0
    left_gib = free_gib()
    kept_gib = left_gib * KEPT_FREE
    while rest:
        width = max(
            rest, key=lambda width: (min((abs(math.log(width / other)) for other in engines), default=0), width)
        )
        if engines and left_gib - most_gib < kept_gib:
            break
        engines[width] = build(width)
        rest.remove(width)
        before_gib, left_gib = left_gib, free_gib()
        if left_gib < math.inf:
            most_gib = max(most_gib, before_gib - left_gib)
            logger.info("width %d: %.2f GiB more for graphs, %.2f GiB are left", width, before_gib - left_gib, left_gib)
    return engines


def _build_engine(runner: ModelRunner, state: State, width: int, captured: DecodeCudaGraphRunner | None) -> Engine:
    with get_spec().override(speculative_num_draft_tokens=width):
        backend = runner._get_attention_backend(init_new_workspace=True)
        state.attach(backend)
        graphs = None
        if captured is not None:
            graphs = type(captured)(runner, attn_backend=backend, speculative_num_draft_tokens=width)
    return Engine(backend, graphs, state)


def from_first_rank(group: GroupCoordinator) -> Callable[[np.ndarray], None]:
    """Overwrites an array with the first rank's, over the host network; called by all ranks of `group` alike."""

    def agree(values: np.ndarray) -> None:
        if group.world_size > 1:
            torch.distributed.broadcast(torch.from_numpy(values), src=group.ranks[0], group=group.cpu_group)

    return agree


class Timer:
    """Times a step of requests that are nobody's: their rows of the request table are empty, so they read and write
    the padding slots of the pools (or rings that nobody has yet)."""

    def __init__(
        self,
        planner: Planner,
        drafter: Drafter,
        verifier: Verifier,
        accept: Callable[[torch.Tensor, torch.Tensor, torch.Tensor], Accepted],
        context_kv: ContextKV,
    ) -> None:
        self.planner, self.drafter, self.verifier = planner, drafter, verifier
        self.accept, self.context_kv = accept, context_kv
        self.runner = verifier.worker.model_runner

    def seconds(self, n_requests: int, widths: Sequence[int]) -> list[float]:
        """Of a whole step without its sampling parameters, at each width.

        All are run in turn, round after round: whatever slows the machine down for a while slows whole rounds, and
        what a width takes of its round is still its own.
        """
        whole = self._plan(n_requests, self.planner.block_size)
        runs = [
            lambda: self.drafter.draft(whole, graphs=True),
            *(self._after_draft(n_requests, width) for width in widths),
        ]
        _first, *rounds = [[self._time(run) for run in runs] for _ in range(1 + ROUNDS)]
        round_R1 = np.mean(rounds, axis=1, keepdims=True)
        draft_s, *verify_s = (np.median(rounds / round_R1, axis=0) * round_R1.min()).tolist()
        return [seconds + (draft_s if width > 1 else 0.0) for width, seconds in zip(widths, verify_s, strict=True)]

    def _plan(self, n_requests: int, width: int) -> Plan:
        rows_B = torch.arange(n_requests, dtype=torch.int64, device=self.runner.device)
        prefix_len = min(CONTEXT, self.runner.model_config.context_len // 2)
        return self.planner.place(
            anchor_B=torch.zeros_like(rows_B),
            prefix_len_B=torch.full_like(rows_B, prefix_len),
            rows_B=rows_B,
            rows_B_cpu=rows_B.cpu(),
            bound_B_cpu=torch.full((n_requests,), prefix_len),
            width=width,
        )

    def _after_draft(self, n_requests: int, width: int) -> Callable[[], None]:
        plan = self._plan(n_requests, width)
        seen = SharedSlots().seen(plan, plan.verified)
        info = block_info(width, CaptureHiddenMode.FULL, self.runner.device)
        untracked = SimpleNamespace(
            mamba_track_indices=None, req_pool_indices=plan.rows_B, forward_mode=ForwardMode.DECODE
        )

        def step() -> None:
            self.verifier.use(width)
            batch = block_forward(plan, plan.verified, seen, info, graphs=True)
            if self.runner.model_config.model_is_mrope:
                batch.mrope_positions = batch.positions.expand(3, -1)
            seen.kv.bind(batch, self.runner.kv_index_translator)
            output = self.verifier.forward(batch).logits_output
            tokens_BN = plan.verified.tokens_BN
            target_BN = output.next_token_logits.argmax(dim=-1).view(tokens_BN.shape)
            accepted = self.accept(tokens_BN, target_BN, plan.prefix_len_B)
            self.verifier.commit(untracked, plan, accepted.n_committed_B)
            self.context_kv.append(NOBODY * n_requests, plan, output.hidden_states, accepted.n_committed_B)

        return step

    def _time(self, run: Callable[[], object]) -> float:
        wait = torch.get_device_module(self.runner.device).synchronize
        wait()
        began = time.perf_counter()
        run()
        wait()
        return time.perf_counter() - began
