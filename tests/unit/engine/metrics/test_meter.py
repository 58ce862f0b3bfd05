"""Exported metrics must equal values computed by hand, on stand-ins for SGLang's objects."""

from functools import partial
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram
from sglang.srt.mem_cache.memory_pool import ReqToTokenPool
from sglang_dflash_kernels.copy_draft import N_CLASSES

from sglang_dflash.engine.memory.draft_kv import Rings
from sglang_dflash.engine.memory.slots import SharedSlots
from sglang_dflash.engine.metrics import late_counts
from sglang_dflash.engine.metrics.late_counts import LateCounts
from sglang_dflash.engine.metrics.meter import WRITE_EVERY, Exports, Meter, Pool
from sglang_dflash.engine.metrics.stage_times import STAGES, StageTimes
from sglang_dflash.engine.metrics.table import METRICS, PREFIX, Kind
from sglang_dflash.engine.stages.stages import Stages

LABELS = {"model_name": "tiny", "tp_rank": 0}
BLOCK = 4


class Scraped:
    """Prometheus registry, with accessors for the values that a scrape returns."""

    def __init__(self) -> None:
        self.registry = CollectorRegistry()
        self.collector = SimpleNamespace(
            labels=LABELS,
            _counter_cls=partial(Counter, registry=self.registry),
            _gauge_cls=partial(Gauge, registry=self.registry),
            _histogram_cls=partial(Histogram, registry=self.registry),
        )

    def value(self, name: str, **labels: object) -> float | None:
        texts = {key: str(value) for key, value in (LABELS | labels).items()}
        return self.registry.get_sample_value(f"{PREFIX}{name}", texts)

    def by(self, label: str, name: str) -> dict[str, float]:
        """Return the non-zero samples of a metric by one label."""
        samples = [s for family in self.registry.collect() for s in family.samples if s.name == f"{PREFIX}{name}"]
        return {sample.labels[label]: sample.value for sample in samples if sample.value}


class Clock:
    def mark(self) -> float:
        return 1.0

    def seconds(self, began: float, ended: float) -> float:
        return 0.25


@pytest.fixture
def scraped() -> Scraped:
    return Scraped()


@pytest.fixture
def meter(scraped: Scraped) -> Meter:
    """Return a meter with 2 of 8 rings in use. In table row 7, blocks before position 100 lack a part of the window."""
    return Meter(
        Exports(scraped.collector, widest=BLOCK, widths=[1, 2, BLOCK]),
        StageTimes(Clock(), every=1),
        lambda row, prefix_len: row == 7 and prefix_len < 100,
        {"rings": Pool(8, lambda: 2)},
    )


def request(row: int = 1, committed: int = 50, *, finished: bool = False, is_retracted: bool = False) -> Any:
    kv = SimpleNamespace(req_pool_idx=row, kv_committed_len=committed)
    return SimpleNamespace(kv=kv, finished=lambda: finished, is_retracted=is_retracted)


def add(meter: Meter, width: int, *outcomes: tuple[Any, int]) -> None:
    """Add a step that accepted the given number of drafts of each request."""
    tokens_B = [[5] * (n + 1) for _, n in outcomes]
    reqs, accepted = zip(*outcomes, strict=True)
    batch = SimpleNamespace(reqs=reqs)
    result = SimpleNamespace(num_correct_drafts_per_req_cpu=accepted, speculative_num_draft_tokens=width)
    assert meter.add(tokens_B, None, result, batch) is tokens_B


def test_counts_of_steps_tokens_and_drafts(meter: Meter, scraped: Scraped) -> None:
    add(meter, BLOCK, (request(), 3), (request(), 1), (request(finished=True), 2), (request(is_retracted=True), 3))
    add(meter, 2, (request(), 1))
    add(meter, 1, (request(), 0))
    add(meter, BLOCK, (request(finished=True), 3))
    meter.idle(None, None)

    assert scraped.value("committed_tokens_count") == 4
    assert scraped.value("committed_tokens_sum") == 4 + 2 + 2 + 1
    assert [scraped.value("committed_tokens_bucket", le=f"{n}.0") for n in range(1, BLOCK + 1)] == [1, 3, 3, 4]
    assert scraped.by("position", "verified_drafts_total") == {"1": 3, "2": 2, "3": 2}
    assert scraped.by("position", "accepted_drafts_total") == {"1": 3, "2": 1, "3": 1}
    assert scraped.by("width", "steps_total") == {"1": 1, "2": 1, "4": 1}
    assert scraped.value("cut_blocks_total") == 0


def test_cut_contexts_are_counted_at_the_start_of_the_block(meter: Meter, scraped: Scraped) -> None:
    """A block starts at `kv_committed_len` less the step's tokens, because SGLang has already added them."""
    add(meter, BLOCK, (request(row=7, committed=103), 3), (request(row=7, committed=104), 3), (request(), 2))
    meter.idle(None, None)
    assert scraped.value("cut_blocks_total") == 1
    assert scraped.value("cut_committed_tokens_total") == 4


def test_copies_are_exported_by_length_of_their_match(scraped: Scraped) -> None:
    counts_K2 = torch.zeros(N_CLASSES, 2, dtype=torch.int32)
    exports = Exports(scraped.collector, widest=BLOCK, widths=[1, BLOCK])
    meter = Meter(exports, StageTimes(Clock()), lambda row, prefix_len: False, {}, LateCounts(counts_K2))
    counts_K2[1:] = torch.tensor([[1, 0], [2, 3], [4, 20], [5, 60]])
    meter.write()
    counts_K2[4] += torch.tensor([1, 15])
    meter.write()
    assert scraped.by("match", "copied_blocks_total") == {"3": 1, "4-7": 2, "8-15": 4, "16": 6}
    assert scraped.by("match", "copied_drafts_total") == {"4-7": 3, "8-15": 20, "16": 75}


def test_overflowed_counts_are_still_increments() -> None:
    counts = torch.tensor([2**31 - 1, 7], dtype=torch.int32)
    late = LateCounts(counts)
    assert late.more().tolist() == [2**31 - 1, 7]
    counts[0] += 3
    assert late.more().tolist() == [3, 0]


def test_counts_of_a_device_arrive_asynchronously(monkeypatch: pytest.MonkeyPatch) -> None:
    """A second copy is made only after the first one has arrived."""
    passed, asked = [False], list[int]()
    event = SimpleNamespace(record=lambda: None, query=lambda: passed[0])
    monkeypatch.setattr(torch, "get_device_module", lambda device: SimpleNamespace(Event=lambda: event))
    copies = iter((torch.tensor([4, 5]), torch.tensor([4, 9])))
    monkeypatch.setattr(late_counts, "async_d2h", lambda counts: asked.append(1) or next(copies))
    late = LateCounts(torch.zeros(2, dtype=torch.int32, device="meta"))
    assert late.more().tolist() == [0, 0]
    assert late.more().tolist() == [0, 0]
    passed[0] = True
    assert late.more().tolist() == [4, 5]
    assert len(asked) == 1, "only one copy is in flight at a time"
    assert late.more().tolist() == [0, 4]


def test_an_idle_server_shows_all_copies(scraped: Scraped) -> None:
    """No later step would write what a copy in flight lacks."""
    counts_K2 = torch.zeros(N_CLASSES, 2, dtype=torch.int32)
    exports = Exports(scraped.collector, widest=BLOCK, widths=[1, BLOCK])
    meter = Meter(exports, StageTimes(Clock()), lambda row, prefix_len: False, {}, late := LateCounts(counts_K2))
    late.asked = counts_K2.clone(), SimpleNamespace(query=lambda: False)
    counts_K2[4] += torch.tensor([1, 15])
    meter.is_written = False
    meter.idle(None, None)
    assert scraped.by("match", "copied_drafts_total")["16"] == 15
    assert late.asked is None


def test_counts_are_written_after_enough_blocks_or_when_idle(meter: Meter, scraped: Scraped) -> None:
    for _ in range(WRITE_EVERY - 1):
        add(meter, 2, (request(), 0))
    assert scraped.value("committed_tokens_count") == 0
    add(meter, 2, (request(), 0))
    assert scraped.value("committed_tokens_count") == WRITE_EVERY
    meter.idle(None, None)
    assert scraped.value("committed_tokens_count") == WRITE_EVERY
    add(meter, 2, (request(), 0))
    meter.idle(None, None)
    assert scraped.value("committed_tokens_count") == WRITE_EVERY + 1
    assert scraped.by("width", "steps_total") == {"2": WRITE_EVERY + 1}


def test_stages_are_written_with_the_counts(meter: Meter, scraped: Scraped) -> None:
    meter.times.timed("verify", lambda: None)()
    add(meter, 2, (request(), 0))
    meter.idle(None, None)
    assert scraped.by("stage", "stage_seconds_count") == {"verify": 1}
    assert scraped.value("stage_seconds_sum", stage="verify") == 0.25


def test_pools_are_exported_before_the_first_request_and_after_the_last(meter: Meter, scraped: Scraped) -> None:
    meter.idle(None, None)
    assert (scraped.value("pool_size", pool="rings"), scraped.value("pool_in_use", pool="rings")) == (8, 2)
    add(meter, 2, (request(finished=True), 0))
    meter.pools = {"rings": Pool(8, lambda: 0)}
    meter.idle(None, None)
    assert scraped.value("pool_in_use", pool="rings") == 0


def test_pools_of_a_scheduler_are_found(scraped: Scraped) -> None:
    """Three of eight request-table rows are used, and so three rings. Five of twelve recurrent states are used."""
    rows: Any = ReqToTokenPool(size=8, max_context_len=16, device="cpu", enable_memory_saver=False)
    rows.mamba_pool = SimpleNamespace(size=12)
    rows.alloc_rows(3)
    stage: Any = SimpleNamespace(slots=SharedSlots(), engines=[1, BLOCK], **dict.fromkeys(STAGES, print))
    worker = SimpleNamespace(
        device="cpu",
        config=SimpleNamespace(widest=BLOCK, draft_kv=Rings(64, BLOCK)),
        stages=Stages(*[stage] * len(Stages._fields)),
    )
    scheduler = SimpleNamespace(
        draft_worker=worker,
        req_to_token_pool=rows,
        is_hybrid_ssm=True,
        pool_stats_observer=SimpleNamespace(get_pool_stats=lambda: SimpleNamespace(mamba_num_used=5)),
    )
    Meter.of(SimpleNamespace(scheduler=scheduler, metrics_collector=scraped.collector)).idle(None, None)
    assert scraped.by("pool", "pool_size") == {"rings": 8, "states": 12}
    assert scraped.by("pool", "pool_in_use") == {"rings": 3, "states": 5}


def test_exported_metrics_match_the_table(meter: Meter, scraped: Scraped) -> None:
    meter.write()
    families = {family.name.removeprefix(PREFIX): family for family in scraped.registry.collect()}
    assert set(families) == {metric.name.removesuffix("_total") for metric in METRICS}
    for metric in METRICS:
        family = families[metric.name.removesuffix("_total")]
        samples = [sample for sample in family.samples if not sample.name.endswith("_created")]
        assert family.type == metric.kind
        assert family.documentation == metric.meaning
        assert {sample.name for sample in samples} == metric.exported()
        for sample in samples:
            assert set(sample.labels) - {"le"} == {*LABELS, *metric.labels}


def test_series_start_at_zero(meter: Meter, scraped: Scraped) -> None:
    assert [scraped.value("verified_drafts_total", position=p) for p in range(BLOCK + 1)] == [None, 0, 0, 0, None]
    assert [scraped.value("steps_total", width=w) for w in (1, 2, 3, 4)] == [0, 0, None, 0]
    assert [scraped.value("stage_seconds_count", stage=stage) for stage in STAGES] == [0] * len(STAGES)


def test_sglangs_metric_classes_are_used() -> None:
    made: list[tuple[Kind, str]] = []

    def kind(kind: Kind) -> Any:
        def make(name: str, **_: Any) -> Any:
            made.append((kind, name))
            return SimpleNamespace(labels=lambda **_: None)

        return make

    kinds = {f"_{one.lower()}_cls": kind(one) for one in Kind}
    Exports(SimpleNamespace(labels=LABELS, **kinds), widest=BLOCK, widths=[BLOCK])
    assert made == [(metric.kind, f"{PREFIX}{metric.name}") for metric in METRICS]
