"""Our worker, watched from inside the scheduler's process: `SGLANG_DFLASH_PROBE=1`.

At launch it takes dummy steps at every captured batch size, at one less than each (such a batch is padded), and at
every width. Then it watches every step that is served. `GET /server_info` tells what was seen, under
`dflash.probe`. Nothing of this runs in a server without the flag.

    drafts    a copy taken when the draft has run, compared with the drafts themselves when the target has
    padding   logits and features of a replay's padded rows, and the K and V of the padding slot, are finite
    stages    host seconds around each stage, and the device's between two events
    bytes     what the pools take
"""

from __future__ import annotations

from collections import defaultdict, deque
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import torch
from sglang.srt.managers.schedule_batch import ScheduleBatch
from sglang.srt.managers.utils import GenerationBatchResult
from sglang.srt.model_executor.model_runner import ModelRunner
from sglang.srt.model_executor.runner import DecodeCudaGraphRunner

from sglang_dflash.host import contract as host
from sglang_dflash.host.names import SECTIONS
from sglang_dflash.memory.records import RecordPool
from sglang_dflash.metrics.stage_times import STAGES, DeviceClock, HostClock, Interval, P, R, measured
from sglang_dflash.stages.copier import CopyStep
from sglang_dflash.stages.dry_run import DryRun, own_states
from sglang_dflash.stages.stages import Stages, with_methods
from sglang_dflash.step import Plan, Target
from sglang_dflash.worker import DFlashWorker, Publish

KEPT = 512  # intervals of a stage and size
PADDING_SLOT = 0

Size = tuple[int, int]  # requests, width


class Rows(NamedTuple):
    """Of the replays at one size; the counts are the device's."""

    n_steps: int
    n_padded: int  # rows of no request, in all steps
    not_finite: torch.Tensor  # values among those rows
    not_finite_real: torch.Tensor  # values among the requests' rows


class ProbedWorker(DFlashWorker):
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
    """Invariant: nothing is read back from the device but by `describe`."""

    def __init__(self, worker: DFlashWorker) -> None:
        self.worker = worker
        self.target, self.draft = worker.target_runner, worker.draft_runner
        self.device = torch.device(worker.device)
        self.has_gpu = self.device.type != "cpu"
        self.changed = dict[Size, torch.Tensor]()  # drafts that are others after the target's replay
        self.n_steps = defaultdict[Size, int](int)
        self.n_served = defaultdict[Size, int](int)  # of `n_steps`, the steps of real requests
        self.rows = dict[Size, Rows]()
        self.raw: Any = None  # the last replay's output, padded rows included
        self.times = StageClock(self.has_gpu, worker.device)
        self.size: Size = (0, 0)
        self.tokens = self.copy = torch.empty(0)
        for engine in worker.stages.verifier.engines.values():
            if engine.graphs is not None:
                self._keep_output(engine.graphs)

    # -- dummy steps -----------------------------------------------------------------------------------------------

    def sizes(self) -> list[int]:
        """Numbers of requests: each captured one, and one less."""
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

    # -- steps that are served -------------------------------------------------------------------------------------

    def watch(self) -> Stages:
        """Return the worker's stages, watched and measured."""
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
            self.n_served[self.size] += 1
            self.end()
            return target

        return stages._replace(
            planner=with_methods(planner, plan=timed("plan", plan)),
            copier=with_methods(copier, copy=copy),
            verifier=with_methods(verifier, verify=verify),
            accept=timed("accept", stages.accept),
        )

    def begin(self, size: Size, tokens_BN: torch.Tensor) -> None:
        """The draft has run, the target has not."""
        self.size, self.raw = size, None
        self.tokens, self.copy = tokens_BN, tokens_BN.clone()

    def end(self) -> None:
        """The target has."""
        changed = (self.tokens != self.copy).sum()
        self.changed[self.size] = self.changed.get(self.size, torch.zeros_like(changed)) + changed
        self.n_steps[self.size] += 1
        if self.raw is None:
            return
        n_rows = self.size[0] * self.size[1]
        outputs = [x for x in (self.raw.next_token_logits, self.raw.hidden_states) if isinstance(x, torch.Tensor)]
        real, padded = (
            sum((not_finite(rows) for rows in parts), torch.zeros((), dtype=torch.int64, device=self.device))
            for parts in ([x[:n_rows] for x in outputs], [x[n_rows:] for x in outputs])
        )
        before = self.rows.get(self.size, Rows(0, 0, torch.zeros_like(real), torch.zeros_like(real)))
        n_padded = max((len(x) - n_rows for x in outputs), default=0)
        self.rows[self.size] = Rows(
            before.n_steps + 1, before.n_padded + n_padded, before.not_finite + padded, before.not_finite_real + real
        )

    def _keep_output(self, graphs: DecodeCudaGraphRunner) -> None:
        replay = graphs.backend.replay

        def replayed(*args: Any, **others: Any) -> Any:
            self.raw = replay(*args, **others)
            return self.raw

        graphs.backend.replay = replayed

    # -- what was seen ---------------------------------------------------------------------------------------------

    def describe(self) -> dict[str, Any]:
        return {
            "captured": self.sizes(),
            "drafts": [
                {
                    "requests": n_requests,
                    "width": width,
                    "steps": self.n_steps[n_requests, width],
                    "served": self.n_served[n_requests, width],
                    "changed": int(changed),
                }
                for (n_requests, width), changed in sorted(self.changed.items())
            ],
            "rows": [
                {
                    "requests": n_requests,
                    "width": width,
                    "steps": seen.n_steps,
                    "padded": seen.n_padded,
                    "not_finite": int(seen.not_finite),
                    "not_finite_real": int(seen.not_finite_real),
                }
                for (n_requests, width), seen in sorted(self.rows.items())
            ],
            "padding_slot": {"target": padding_slot(self.target), "draft": padding_slot(self.draft)},
            "stages": list(self.times.medians()),
            "bytes": self.bytes(),
        }

    def bytes(self) -> dict[str, Any]:
        """Of this rank."""
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
    """Values of K and V there, over all layers, that are not finite."""
    pool = runner.token_to_kv_pool
    pool = vars(pool).get("full_kv_pool", pool)
    return sum(int(not_finite(layer[PADDING_SLOT].float())) for layer in (*pool.k_buffer, *pool.v_buffer))


class StageClock:
    """Host and device seconds of stages, by stage and size."""

    def __init__(self, has_gpu: bool, device: str) -> None:
        self.host, self.gpu = HostClock(), DeviceClock(device) if has_gpu else None
        self.size: Size = (0, 0)
        self.host_s = defaultdict[tuple[str, Size], deque[float]](lambda: deque(maxlen=KEPT))
        self.device_s = defaultdict[tuple[str, Size], deque[float]](lambda: deque(maxlen=KEPT))
        self.pending = deque[tuple[Interval, Size]](maxlen=KEPT)

    def timed(self, stage: str, run: Callable[P, R]) -> Callable[P, R]:
        """Return `run`, measured as `stage`."""

        def run_timed(*args: P.args, **others: P.kwargs) -> R:
            marked = self.gpu.mark() if self.gpu else None
            began = self.host.mark()
            result = run(*args, **others)
            self.host_s[stage, self.size].append(self.host.mark() - began)
            if self.gpu:
                self.pending.append((Interval(stage, marked, self.gpu.mark()), self.size))
            return result

        return run_timed

    def medians(self) -> Iterator[dict[str, Any]]:
        """In milliseconds; the device's None where there is none."""
        while self.gpu and self.pending:
            (stage, began, ended), size = self.pending[0]
            seconds = self.gpu.seconds(began, ended)
            if seconds is None:
                break
            self.device_s[stage, size].append(seconds)
            self.pending.popleft()
        order = ["step", "plan", *STAGES, "accept"]
        for stage, size in sorted(self.host_s, key=lambda key: (key[1], order.index(key[0]))):
            host_s, device_s = self.host_s[stage, size], self.device_s.get((stage, size), ())
            yield {
                "stage": stage,
                "requests": size[0],
                "width": size[1],
                "steps": len(host_s),
                "host_ms": round(1e3 * middle(host_s), 4),
                "device_ms": round(1e3 * middle(device_s), 4) if device_s else None,
            }


def middle(values: Any) -> float:
    return sorted(values)[len(values) // 2]
