"""Recorder of the worker in the scheduler's process: `SGLANG_DFLASH_PROBE=1`.

At launch the probe runs dummy steps at every width, with n and with n - 1 requests for every captured batch size n. A
batch of n - 1 requests mostly needs padding. Then the probe records every served step. `GET /server_info` returns the
record under `dflash.probe`:

    captured      batch sizes of the dummy steps
    steps         per batch size and width: counts of tokens changed during verify, of non-finite logits and features
    padding_slot  numbers of non-finite values in the KV slot that padding rows write to
    stages        median milliseconds of each stage, on the host and between two events on the device
    bytes         sizes of the pools
"""

import time
from collections import defaultdict, deque
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from statistics import median_high
from typing import Any

import torch
from sglang.srt.managers.schedule_batch import ScheduleBatch
from sglang.srt.managers.utils import GenerationBatchResult
from sglang.srt.model_executor.model_runner import ModelRunner
from sglang.srt.model_executor.runner import DecodeCudaGraphRunner

from sglang_dflash.engine.host import contract as host
from sglang_dflash.engine.host.names import SECTIONS
from sglang_dflash.engine.memory.records import RecordPool
from sglang_dflash.engine.metrics.stage_times import STAGES, DeviceClock, P, R, measured
from sglang_dflash.engine.stages.copier import CopyStep
from sglang_dflash.engine.stages.dry_run import DryRun, own_states
from sglang_dflash.engine.stages.stages import Stages, with_methods
from sglang_dflash.engine.step import Plan, Target
from sglang_dflash.engine.worker import DFlashWorker, Publish

KEPT = 512  # number of latest times kept per stage and size
PADDING_SLOT = 0  # KV slot that padding rows write to

Size = tuple[int, int]  # requests, width


@dataclass
class Seen:
    """Record of the steps at one size."""

    steps: int = 0  # number of steps
    served: int = 0  # number of steps with real requests, among `steps`
    padded: int = 0  # number of padding token rows in all steps
    # int64 [3] on the device: number of verified tokens that changed while the target ran, of non-finite values in
    # padding rows, and of non-finite values in requests' rows.
    counts: Any = 0

    def describe(self) -> dict[str, int]:
        changed, not_finite, not_finite_real = self.counts.tolist()
        counts = {"changed": changed, "not_finite": not_finite, "not_finite_real": not_finite_real}
        return {"steps": self.steps, "served": self.served, "padded": self.padded} | counts


class ProbedWorker(DFlashWorker):
    """DFLASH worker that records its steps."""

    def _init_stages(self) -> None:
        host.check(SECTIONS["probe"])
        super()._init_stages()
        self.probe = Probe(self)
        self.probe.sweep()
        self.stages = self.probe.watch()

    def decode(
        self, batch: ScheduleBatch, publish: Publish, grammar_barrier: Callable[[], None] | None
    ) -> GenerationBatchResult:
        return self.probe.times.timed("step", super().decode)(batch, publish, grammar_barrier)

    def describe(self) -> dict[str, Any]:
        return super().describe() | {"probe": self.probe.describe()}


class Probe:
    """Recorder of a worker's steps. Invariant: recording copies no value from the device; only `describe` does."""

    def __init__(self, worker: DFlashWorker) -> None:
        self.worker = worker
        self.target, self.draft = worker.target_runner, worker.draft_runner
        self.device = torch.device(worker.device)
        self.has_gpu = self.device.type != "cpu"
        self.seen = defaultdict[Size, Seen](Seen)
        self.raw: Any = None  # output of the step's replay, including padding rows; None without a replay
        self.times = StageClock(worker.device if self.has_gpu else None)
        self.size: Size = (0, 0)
        self.tokens = self.copy = torch.empty(0)
        for engine in worker.stages.verifier.engines.values():
            if engine.graphs is not None:
                self._keep_output(engine.graphs)

    # -- dummy steps -----------------------------------------------------------------------------------------------

    def sizes(self) -> list[int]:
        """Return each captured batch size n of the draft, and n - 1, which needs padding if it is not captured."""
        graphs = self.draft.decode_cuda_graph_runner
        if not isinstance(graphs, DecodeCudaGraphRunner):
            return []
        captured = {n for n in graphs.capture_bs if n <= self.target.max_running_requests}
        return sorted(captured | {n - 1 for n in captured if n > 1})

    def sweep(self) -> None:
        stages = self.worker.stages
        dry_run, sizes = DryRun(stages, on_host=False), self.sizes()
        with own_states(self.target.req_to_token_pool, max(sizes, default=0)):
            for width in stages.verifier.engines:
                for n_requests in sizes:
                    tokens_BN = stages.drafter.draft(dry_run.plan(n_requests, width), graphs=True)
                    self.begin((n_requests, width), tokens_BN)
                    dry_run.after_draft(n_requests, width)()
                    self.end()
        stages.context_kv.late.forget()
        stages.verifier.restore()

    # -- served steps ----------------------------------------------------------------------------------------------

    def watch(self) -> Stages:
        """Return the worker's stages, wrapped to record and time them."""
        stages, timed = measured(self.worker.stages, self.times), self.times.timed
        planner, copier, verifier = stages.planner, stages.copier, stages.verifier

        def plan(batch: ScheduleBatch, width: int) -> Plan:
            made = planner.plan(batch, width)
            self.size = self.times.size = (made.n_requests, width)
            return made

        def copy(plan: Plan, drafts_BN: torch.Tensor) -> CopyStep:
            copied = copier.copy(plan, drafts_BN)
            self.begin(self.size, copied.tokens_BN)
            return copied

        def verify(batch: ScheduleBatch, plan: Plan, tokens_BN: torch.Tensor) -> Target:
            target = verifier.verify(batch, plan, tokens_BN)
            self.seen[self.size].served += 1
            self.end()
            return target

        return stages._replace(
            planner=with_methods(planner, plan=timed("plan", plan)),
            copier=with_methods(copier, copy=copy),
            verifier=with_methods(verifier, verify=verify),
            accept=timed("accept", stages.accept),
        )

    def begin(self, size: Size, tokens_BN: torch.Tensor) -> None:
        """Copy the tokens to verify before the target runs."""
        self.size, self.raw = size, None
        self.tokens, self.copy = tokens_BN, tokens_BN.clone()

    def end(self) -> None:
        """Compare the tokens, after the target has run, with the copy that `begin` made. Count non-finite outputs."""
        seen, n_rows = self.seen[self.size], self.size[0] * self.size[1]
        raw = (self.raw.next_token_logits, self.raw.hidden_states) if self.raw is not None else ()
        outputs = [x for x in raw if isinstance(x, torch.Tensor)]
        seen.steps += 1
        seen.padded += max((len(x) - n_rows for x in outputs), default=0)
        changed = (self.tokens != self.copy).sum()
        padded, real = (
            sum((not_finite(rows) for rows in parts), torch.zeros_like(changed))
            for parts in ([x[n_rows:] for x in outputs], [x[:n_rows] for x in outputs])
        )
        seen.counts = seen.counts + torch.stack((changed, padded, real))

    def _keep_output(self, graphs: DecodeCudaGraphRunner) -> None:
        replay = graphs.backend.replay

        def replayed(*args: Any, **others: Any) -> Any:
            self.raw = replay(*args, **others)
            return self.raw

        graphs.backend.replay = replayed

    # -- the record ------------------------------------------------------------------------------------------------

    def describe(self) -> dict[str, Any]:
        return {
            "captured": self.sizes(),
            "steps": [
                {"requests": size[0], "width": size[1]} | seen.describe() for size, seen in sorted(self.seen.items())
            ],
            "padding_slot": {"target": padding_slot(self.target), "draft": padding_slot(self.draft)},
            "stages": list(self.times.medians()),
            "bytes": self.bytes(),
        }

    def bytes(self) -> dict[str, Any]:
        """Return this rank's pool sizes and memory: bytes, and numbers of tokens, requests, states and record rows."""
        sizes = {
            "target_tokens": int(self.target.max_total_num_tokens),
            "target_kv": kv_bytes(self.target),
            "draft_tokens": int(self.draft.max_total_num_tokens),
            "draft_kv": kv_bytes(self.draft),
            "page_size": int(self.target.page_size),
            "requests": int(self.target.max_running_requests),
        }
        pool = self.target.req_to_token_pool
        states = pool.mamba_pool if "mamba_pool" in vars(pool) else None
        if isinstance(states, RecordPool):
            cache = states.mamba_cache
            sizes |= {
                "states": cache.temporal.shape[1],
                "state_bytes": cache.temporal.nbytes + sum(conv.nbytes for conv in cache.conv),
                "block_bytes": states.block_bytes,
                "block_rows": cache.intermediate_ssm.shape[1],
            }
        if self.has_gpu:
            free, total = torch.cuda.mem_get_info(self.device)
            sizes |= {"device_free": free, "device_total": total, "torch": torch.cuda.memory_allocated(self.device)}
        return sizes


def not_finite(x: torch.Tensor) -> torch.Tensor:
    return (~x.isfinite()).sum()


def kv_bytes(runner: ModelRunner) -> int:
    return int(sum(runner.token_to_kv_pool.get_kv_size_bytes()))


def padding_slot(runner: ModelRunner) -> int:
    """Return the number of non-finite values of K and V in the padding slot, over all layers."""
    pool = runner.token_to_kv_pool
    pool = vars(pool).get("full_kv_pool", pool)
    return sum(int(not_finite(layer[PADDING_SLOT].float())) for layer in (*pool.k_buffer, *pool.v_buffer))


class StageClock:
    """Clock for host and device times by stage and size. If `device` is None it takes host times only."""

    def __init__(self, device: str | None) -> None:
        self.events = DeviceClock(device) if device else None
        self.size: Size = (0, 0)
        self.host_s = defaultdict[tuple[str, Size], deque[float]](lambda: deque(maxlen=KEPT))
        self.marks = defaultdict[tuple[str, Size], deque[tuple[Any, Any]]](lambda: deque(maxlen=KEPT))

    def timed(self, stage: str, run: Callable[P, R]) -> Callable[P, R]:
        """Wrap `run` so that its times are recorded under `stage`."""

        def run_timed(*args: P.args, **others: P.kwargs) -> R:
            marked = self.events.mark() if self.events else None
            began = time.perf_counter()
            result = run(*args, **others)
            self.host_s[stage, self.size].append(time.perf_counter() - began)
            if self.events:
                self.marks[stage, self.size].append((marked, self.events.mark()))
            return result

        return run_timed

    def medians(self) -> Iterator[dict[str, Any]]:
        """Yield median milliseconds by stage and size. `device_ms` is None on a CPU, or if no device time is known."""
        order = ["step", "plan", *STAGES, "accept"]
        for stage, size in sorted(self.host_s, key=lambda key: (key[1], order.index(key[0]))):
            host_s, marks = self.host_s[stage, size], self.marks[stage, size]
            device_s = [s for pair in marks if self.events and (s := self.events.seconds(*pair)) is not None]
            row = {"stage": stage, "requests": size[0], "width": size[1], "steps": len(host_s)}
            device_ms = round(1e3 * median_high(device_s), 4) if device_s else None
            yield row | {"host_ms": round(1e3 * median_high(host_s), 4), "device_ms": device_ms}
