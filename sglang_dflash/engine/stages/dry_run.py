"""Dry run: steps of dummy requests at server start, which compile kernels and measure step times.

The request table has no KV slots for dummy requests. So dry steps read and write the pools' padding slots, or ring
buffers that no request uses yet. Each dummy request has its own recurrent state (`own_states`). If all requests shared
one state, the GPU would read it from its L2 cache, and measured times would be too short.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from types import SimpleNamespace

import numpy as np
import torch
from sglang.srt.mem_cache.memory_pool import HybridReqToTokenPool, ReqToTokenPool
from sglang.srt.model_executor.forward_batch_info import CaptureHiddenMode, ForwardMode
from sglang.srt.model_executor.model_runner import ModelRunner, SamplingPrewarmResult
from sglang.srt.runtime_context import get_exec, get_schedule

from sglang_dflash.engine.memory.slots import SharedSlots
from sglang_dflash.engine.stages.choice import Choice
from sglang_dflash.engine.stages.drafter import block_forward, block_info
from sglang_dflash.engine.stages.lora import without_adapters
from sglang_dflash.engine.stages.ranks import from_first_of_ours
from sglang_dflash.engine.stages.stages import Stages
from sglang_dflash.engine.stages.state import track_interval
from sglang_dflash.engine.step import Plan
from sglang_dflash.engine.width.chooser import make_policy
from sglang_dflash.engine.width.policy import Policy
from sglang_dflash.flags import WidthPolicy

CONTEXT = 256  # context tokens of a dummy request
ROUNDS = 5  # number of timed rounds; the median ignores a slow first round
# Number of steps timed together on a GPU. As in serving, the host launches a step while the GPU runs the step before.
IN_A_ROW = 3
DUMMY = [""]  # id of a dummy request


class DryRun:
    """Runner of dummy steps."""

    def __init__(self, stages: Stages, *, on_host: bool) -> None:
        """`on_host`: the target runs on the CPU, without GPU emulation."""
        self.stages, self.on_host = stages, on_host
        self.runner = stages.verifier.worker.model_runner
        self.tracks = get_exec().mamba.enable_mamba_extra_buffer  # whether batches have track slots, see `state.py`

    def run(self, kind: WidthPolicy) -> Policy:
        """Warm up every width, and return the policy of `make_policy`. Step times are measured only for `Adaptive`."""
        n_requests, widths = self.runner.max_running_requests, sorted(self.stages.verifier.engines)
        with own_states(self.runner.req_to_token_pool, n_requests):
            self.warm_up(widths, n_requests)
            agree = from_first_of_ours()
            policy = make_policy(kind, widths, n_requests=n_requests, seconds=self.seconds, agree=agree)
        if policy.cost:
            policy.cost.look_up(lambda size, width: self.stages.verifier.engines[width].padded(size))
        self.end()
        return policy

    def warm_up(self, widths: Sequence[int], n_requests: int) -> None:
        """Run the draft, a greedy step at each width, and the `penalise` kernel, to compile their kernels.

        All three run once for each batch size that needs its own compiled kernels. On the CPU nothing is compiled per
        batch size, so one size is run.
        """
        if not widths:  # a prefill-only server
            return
        stages = self.stages
        for size in [1] if self.on_host else batch_sizes(n_requests):
            whole, anchors = self.plan(size, stages.planner.n_slots), self.plan(size, 1)
            stages.drafter.draft(whole, graphs=True)
            for width in widths:
                logits_TV, features_TC = self.after_draft(size, width)()
                whole_TV = stages.choice.logits.whole(logits_TV)
                stages.choice.penalties.dry_run(self.plan(size, width).verified.tokens_BN, whole_TV)
            stages.context_kv.write_all(anchors, features_TC[:size])  # the steps above only write kept rows

    def seconds(self, n_requests: int, widths: Sequence[int]) -> list[float]:
        """Return the seconds of a greedy step of `n_requests` at each width.

        Each round runs all widths, so a temporary slowdown of the machine affects all times of a round. To remove
        the slowdown, each time is divided by the mean of its round. The median of these ratios over the rounds is
        multiplied by the median of the means. On a CPU, which other processes share, the shortest times are taken.
        Above width 1 the result includes the draft model's forward.
        """
        drafted = [width for width in widths if width > 1]
        runs: list[Callable[[], object]] = [
            *(partial(self.stages.drafter.draft, self.plan(n_requests, width), graphs=True) for width in drafted),
            *(self.after_draft(n_requests, width) for width in widths),
        ]
        rounds = [[self._time(run) for run in runs] for _ in range(ROUNDS)]
        round_R1 = np.mean(rounds, axis=1, keepdims=True)
        steady_s = np.median(rounds / round_R1, axis=0) * np.median(round_R1)
        run_s = (np.min(rounds, axis=0) if self.on_host else steady_s).tolist()
        draft_s = dict(zip(drafted, run_s, strict=False))
        return [draft_s.get(width, 0.0) + seconds for width, seconds in zip(widths, run_s[len(drafted) :], strict=True)]

    def end(self) -> None:
        """Remove waiting rows and copy counts of the dummy steps, and restore SGLang's own engine."""
        self.stages.context_kv.late.forget()
        self.stages.copier.forget()
        self.stages.verifier.restore()
        # If a dry step's event stayed set, the scheduler would wait for this event, and not for the first prefill. Then
        # it would change tables that this prefill still reads.
        self.runner.shared_read_done_event = None

    def plan(self, n_requests: int, width: int) -> Plan:
        """Return a plan of `width` tokens per dummy request. The requests have the first rows of the request table."""
        rows_B = torch.arange(n_requests, dtype=torch.int64, device=self.runner.device)
        prefix_len = min(CONTEXT, self.runner.model_config.context_len // 2)
        return self.stages.planner.place(
            anchor_B=torch.zeros_like(rows_B),
            prefix_len_B=torch.full_like(rows_B, prefix_len),
            rows_B=rows_B,
            rows_B_cpu=rows_B.cpu(),
            bound_B_cpu=torch.full((n_requests,), prefix_len),
            width=width,
        )

    def after_draft(self, n_requests: int, width: int) -> Callable[[], tuple[torch.Tensor, torch.Tensor]]:
        """Return a function that runs a greedy step from verify on. It returns logits [T, V] and features [T, C]."""
        stages = self.stages
        plan = self.plan(n_requests, width)
        seen = SharedSlots().seen(plan, plan.verified)
        info = block_info(width, CaptureHiddenMode.FULL, self.runner.device)
        batch = SimpleNamespace(
            mamba_track_indices=torch.zeros_like(plan.rows_B) if self.tracks else None,  # the padding state slot
            tree_cache=SimpleNamespace(page_size=self.runner.page_size),
            req_pool_indices=plan.rows_B,
            forward_mode=ForwardMode.DECODE,
        )

        def step() -> tuple[torch.Tensor, torch.Tensor]:
            stages.verifier.use(width)
            forward_batch = block_forward(plan, plan.verified, seen, info, graphs=True)
            if self.runner.model_config.model_is_mrope:
                forward_batch.mrope_positions = forward_batch.positions.expand(3, -1)
            without_adapters(self.runner, forward_batch)
            stages.verifier.ranks.assume_equal_batches(forward_batch)
            seen.kv.bind(forward_batch, self.runner.kv_index_translator)
            output = stages.verifier.run(forward_batch, plan).logits_output
            logits_TV, features_TC = output.next_token_logits, output.hidden_states
            copied = stages.copier.copy(plan, plan.verified.tokens_BN)
            target_BN = stages.choice.logits.likeliest(logits_TV).view(copied.tokens_BN.shape)
            accepted = stages.accept(copied.tokens_BN, target_BN, plan.prefix_len_B, track_interval(batch))
            stages.copier.weigh(copied, accepted)
            stages.verifier.commit(batch, plan, accepted)
            stages.context_kv.append(DUMMY * n_requests, plan, features_TC, accepted.n_committed_B)
            return logits_TV, features_TC

        return step

    def _time(self, run: Callable[[], object]) -> float:
        wait = torch.get_device_module(self.runner.device).synchronize
        n_runs = 1 if self.on_host else IN_A_ROW
        wait()
        began = time.perf_counter()
        for _ in range(n_runs):
            run()
        wait()
        return (time.perf_counter() - began) / n_runs


def batch_sizes(n_requests: int) -> list[int]:
    """Return batch sizes up to `n_requests` with which every compiled variant of the kernels is run.

    Triton compiles a kernel separately for one request, for multiples of 16, and for other numbers of requests. Some
    kernels are also compiled for each power of two to which the number of requests is rounded up.
    """
    powers = [2**i for i in range(n_requests.bit_length() + 1)]
    sizes = {size for power in powers for size in (power - 1, power)}
    sizes |= {n_requests - 1, n_requests, n_requests - n_requests % 16}
    return sorted(size for size in sizes if 1 <= size <= n_requests)


@contextmanager
def own_states(pool: ReqToTokenPool, n_requests: int) -> Iterator[None]:
    """Assign a separate recurrent state to each of the first `n_requests` rows of the request table.

    If the pool has fewer states, rows share states. At exit the assignment is undone. Use this only before serving,
    while no request has a state.
    """
    if not isinstance(pool, HybridReqToTokenPool):
        yield
        return
    slot_R = pool.req_index_to_mamba_index_mapping
    before_R = slot_R.clone()
    slot_R[:n_requests] = torch.arange(n_requests, dtype=slot_R.dtype, device=slot_R.device) % pool.mamba_pool.size + 1
    try:
        yield
    finally:
        slot_R.copy_(before_R)


def peak_bytes(run: Callable[[], object], device: str) -> int:
    """Return the peak bytes of device memory that `run` allocates. On a CPU returns 0 without running."""
    if device == "cpu":
        return 0
    memory = torch.get_device_module(device)
    memory.synchronize()
    memory.reset_peak_memory_stats()
    before = memory.memory_allocated()
    run()
    memory.synchronize()
    return memory.max_memory_allocated() - before


def reserve_bytes(
    target: ModelRunner, draft: ModelRunner, choice: Choice, widths: Sequence[int], n_waiting: int = 0
) -> int:
    """Return the bytes that steps and prompts need in addition to the memory in use.

    The bytes cover sampling, measured by `Choice.dry_run`, and a prompt's features, which exist twice while the outputs
    of the target's layers are concatenated. They also cover the features of `n_waiting` earlier prompts, which are
    still being copied to the host. A server without widths (prefill-only) samples one slot per request. The bytes of
    sampling are also stored in `target.sampling_prewarm_result`.

    Raises:
        RuntimeError: sampling does not fit into the free memory.
    """
    n_requests, n_vocab, n_slots = target.max_running_requests, target.model_config.vocab_size, max(widths, default=1)
    logits_bytes = 4 * n_requests * n_slots * n_vocab
    try:
        sampling = peak_bytes(lambda: choice.dry_run(n_requests, n_slots), target.device)
    except torch.OutOfMemoryError as error:
        raise RuntimeError(
            f"sampling {n_slots} tokens of each of {n_requests} requests does not fit into the memory that is left "
            f"(their logits alone are {logits_bytes / 2**30:.1f} GiB); lower --max-running-requests or "
            "--mem-fraction-static"
        ) from error
    target.sampling_prewarm_result = SamplingPrewarmResult(
        sampling_input_bytes=logits_bytes, sampling_headroom_bytes=sampling
    )
    schedule = get_schedule()
    n_tokens = max(schedule.chunked_prefill_size or 0, 0) or schedule.max_prefill_tokens  # None, 0 or less: no chunks
    return sampling + (2 + n_waiting) * n_tokens * draft.model.fc.weight[0].nbytes
