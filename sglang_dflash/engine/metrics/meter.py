"""DFLASH metrics on the server's `/metrics`, with SGLang's labels (`--enable-metrics`).

`table.py` lists the metrics. When SGLang has a step's outcome on the host, the outcome is added to counts in Python.
The counts are passed to Prometheus when they include at least `WRITE_EVERY` blocks, or when no request runs.
"""

from __future__ import annotations

from collections import Counter as Count
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

from prometheus_client import Counter, Gauge, Histogram

from sglang_dflash.engine.metrics.late_counts import LateCounts
from sglang_dflash.engine.metrics.stage_times import STAGES, StageTimes, time_stages
from sglang_dflash.engine.metrics.table import METRICS, PREFIX, Kind
from sglang_dflash.engine.stages.copier import TextCopies
from sglang_dflash.engine.width.tally import Tally, is_counted

WRITE_EVERY = 64  # blocks
MATCHES = ("", "3", "4-7", "8-15", "16")  # label of each class of match lengths in tokens, see `copy_draft`; "": unused
# Upper bounds of the buckets of `stage_seconds`, in seconds.
SECONDS = (5e-5, 1e-4, 2e-4, 5e-4, 1e-3, 2e-3, 5e-3, 1e-2, 2e-2, 5e-2, 0.1, 0.2, 0.5, 1.0)


class Pool(NamedTuple):
    """Number of slots of a pool, and a function that returns the number in use."""

    size: int
    in_use: Callable[[], int]


class Exports:
    """Prometheus objects of the metrics in `METRICS`."""

    def __init__(self, collector: Any, *, widest: int, widths: Sequence[int]) -> None:
        """Create the metrics.

        Args:
            collector: SGLang's collector. It has the labels, and with Ray also the classes of metrics to use.
            widest: largest number of tokens that a step can commit for a request.
            widths: verify widths.
        """
        kinds = {
            Kind.COUNTER: collector._counter_cls or Counter,
            Kind.GAUGE: collector._gauge_cls or Gauge,
            Kind.HISTOGRAM: collector._histogram_cls or Histogram,
        }
        options: dict[str, dict[str, Any]] = {
            "committed_tokens": {"buckets": list(range(1, widest + 1))},
            "stage_seconds": {"buckets": SECONDS},
            "pool_size": {"multiprocess_mode": "mostrecent"},
            "pool_in_use": {"multiprocess_mode": "mostrecent"},
        }
        made = {
            metric.name: kinds[metric.kind](
                name=f"{PREFIX}{metric.name}",
                documentation=metric.meaning,
                labelnames=[*collector.labels, *metric.labels],
                **options.get(metric.name, {}),
            )
            for metric in METRICS
        }

        def series(name: str, **labels: object) -> Any:
            return made[name].labels(**collector.labels, **labels)

        positions = range(1, widest)
        # Created at start-up, so that each series begins with 0, not with its first count.
        self.committed = series("committed_tokens")
        self.verified = {p: series("verified_drafts_total", position=p) for p in positions}
        self.accepted = {p: series("accepted_drafts_total", position=p) for p in positions}
        self.steps = {width: series("steps_total", width=width) for width in widths}
        self.seconds = {stage: series("stage_seconds", stage=stage) for stage in STAGES}
        self.cut_blocks, self.cut_committed = series("cut_blocks_total"), series("cut_committed_tokens_total")
        self.copied = [
            [series(name, match=match) for name in ("copied_blocks_total", "copied_drafts_total")]
            for match in MATCHES[1:]
        ]
        self.series = series

    def write_copies(self, added_K2: Sequence[Sequence[int]]) -> None:
        """Add the increase of two counts for each class of matches: blocks with a copy, accepted copied drafts."""
        for series_2, added_2 in zip(self.copied, added_K2[1:], strict=True):
            for series, n in zip(series_2, added_2, strict=True):
                series.inc(n)

    def write(self, tally: Tally, cut: Tally) -> None:
        """Add the counts of both tallies. `cut` has those blocks of `tally` with less context than the draft window."""
        verified, accepted = Count[int](), Count[int]()  # number of drafts by position
        for (width, n_accepted), n in tally.n_blocks.items():
            for _ in range(n):
                self.committed.observe(n_accepted + 1)
            verified.update(dict.fromkeys(range(1, width), n))
            accepted.update(dict.fromkeys(range(1, n_accepted + 1), n))
        for series, counts in ((self.verified, verified), (self.accepted, accepted), (self.steps, tally.n_steps)):
            for label, n in counts.items():
                series[label].inc(n)
        self.cut_blocks.inc(cut.n_blocks.total())
        self.cut_committed.inc(cut.n_committed())

    def write_pools(self, pools: Mapping[str, Pool]) -> None:
        for name, pool in pools.items():
            self.series("pool_size", pool=name).set(pool.size)
            self.series("pool_in_use", pool=name).set(pool.in_use())


class Meter:
    """Counter of a scheduler's decode steps. It counts the blocks for which `is_counted` holds.

    Invariant: `tally` and `cut` contain only counts that are not written yet. If `is_written`, `tally` and `cut` are
    empty, and pool gauges are current.
    """

    def __init__(
        self,
        exports: Exports,
        times: StageTimes,
        is_cut: Callable[[int, int], bool],
        pools: Mapping[str, Pool],
        copies: LateCounts | None = None,
    ) -> None:
        """Create a meter without counts.

        Args:
            exports: Prometheus objects.
            times: times of stages.
            is_cut: function of a request's row in req_to_token and its prefix length, see `DraftSlots.is_cut`.
            pools: pools by name.
            copies: reader of copy counts; None: the server makes no copies.
        """
        self.exports, self.times, self.is_cut, self.pools, self.copies = exports, times, is_cut, pools, copies
        self.tally, self.cut = Tally(), Tally()  # all blocks; blocks with less context than the draft window
        self.is_written = False

    @classmethod
    def of(cls, reporter: Any) -> Meter:
        """Return a meter for the scheduler of `reporter`, a `SchedulerMetricsReporter`. Start measuring stage times."""
        scheduler = reporter.scheduler
        worker = scheduler.draft_worker
        worker.stages, times = time_stages(worker.stages, worker.device)
        slots, copier = worker.stages.context_kv.slots, worker.stages.copier
        rows = scheduler.req_to_token_pool
        pools = {name: Pool(*gauge) for name, gauge in worker.config.draft_kv.gauges(rows).items()}
        if scheduler.is_hybrid_ssm:
            # The lambda looks up `pool_stats_observer`, because the scheduler creates it after the reporter.
            pools["states"] = Pool(
                rows.mamba_pool.size, lambda: scheduler.pool_stats_observer.get_pool_stats().mamba_num_used
            )
        return cls(
            Exports(
                reporter.metrics_collector,
                widest=worker.config.widest,
                widths=sorted(worker.stages.verifier.engines),
            ),
            times,
            slots.is_cut,
            pools,
            LateCounts(copier.totals_K2) if isinstance(copier, TextCopies) else None,
        )

    def add(self, tokens_B: list[list[int]], processor: Any, result: Any, batch: Any) -> list[list[int]]:
        """Count a step whose outcome is on the host.

        Hook after `SchedulerBatchResultProcessor._resolve_spec_v2_tokens`.
        """
        counted = [
            (n_accepted, self.is_cut(req.kv.req_pool_idx, req.kv.kv_committed_len - len(tokens)))
            for req, n_accepted, tokens in zip(batch.reqs, result.num_correct_drafts_per_req_cpu, tokens_B, strict=True)
            if is_counted(req)
        ]
        self.tally.add(result.speculative_num_draft_tokens, [n for n, _ in counted])
        self.cut.add(result.speculative_num_draft_tokens, [n for n, is_cut in counted if is_cut])
        self.is_written = False
        if self.tally.n_blocks.total() >= WRITE_EVERY:
            self.write()
        return tokens_B

    def idle(self, result: None, reporter: Any) -> None:
        """Write pending counts when no request runs. Hook after `SchedulerMetricsReporter._maybe_log_idle_metrics`."""
        if not self.is_written:
            self.write(is_idle=True)

    def write(self, *, is_idle: bool = False) -> None:
        """Pass all new counts, stage times and pool gauges to Prometheus. Only if `is_idle`, wait for the device."""
        self.exports.write(self.tally, self.cut)
        for stage, seconds in self.times.read():
            self.exports.seconds[stage].observe(seconds)
        self.exports.write_pools(self.pools)
        if self.copies is not None:
            new_K2 = self.copies.now() if is_idle else self.copies.more()
            self.exports.write_copies(new_K2.tolist())
        self.tally, self.cut, self.is_written = Tally(), Tally(), True
