"""What is exported, with SGLang played by small objects: every number against one counted by hand."""

from functools import partial
from types import SimpleNamespace
from typing import Any

import pytest
from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram

from sglang_dflash.metrics.meter import WRITE_EVERY, Exports, Meter, Pool
from sglang_dflash.metrics.stage_times import STAGES, StageTimes
from sglang_dflash.metrics.table import METRICS, PREFIX, Kind

LABELS = {"model_name": "tiny", "tp_rank": 0}
BLOCK = 4


class Scraped:
    """A registry as a scrape sees it."""

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
        """What is not 0, by one label."""
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
    """Of a server with rings of which two are held. A context is cut up to position 100, in row 7."""
    return Meter(
        Exports(scraped.collector, block_size=BLOCK, widths=[1, 2, BLOCK]),
        StageTimes(Clock(), every=1),
        lambda row, prefix_len: row == 7 and prefix_len < 100,
        {"rings": Pool(8, lambda: 2)},
    )


def request(row: int = 1, committed: int = 50, *, finished: bool = False, is_retracted: bool = False) -> Any:
    return SimpleNamespace(
        kv=SimpleNamespace(req_pool_idx=row, kv_committed_len=committed),
        finished=lambda: finished,
        is_retracted=is_retracted,
    )


def add(meter: Meter, width: int, *outcomes: tuple[Any, int]) -> None:
    """A step that accepted so many drafts of each request."""
    tokens_B = [[5] * (n + 1) for _, n in outcomes]
    batch = SimpleNamespace(reqs=[req for req, _ in outcomes])
    result = SimpleNamespace(
        num_correct_drafts_per_req_cpu=[n for _, n in outcomes], speculative_num_draft_tokens=width
    )
    assert meter.add(tokens_B, None, result, batch) is tokens_B


def test_the_counts(meter: Meter, scraped: Scraped) -> None:
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


def test_a_context_is_cut_or_not_by_where_the_block_began(meter: Meter, scraped: Scraped) -> None:
    """`kv_committed_len` has the step's tokens in it already."""
    add(meter, BLOCK, (request(row=7, committed=103), 3), (request(row=7, committed=104), 3), (request(), 2))
    meter.idle(None, None)
    assert scraped.value("cut_blocks_total") == 1
    assert scraped.value("cut_committed_tokens_total") == 4


def test_counts_are_written_once_after_so_many_blocks_or_at_rest(meter: Meter, scraped: Scraped) -> None:
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


def test_pools_are_told_before_the_first_request_and_after_the_last(meter: Meter, scraped: Scraped) -> None:
    meter.idle(None, None)
    assert (scraped.value("pool_size", pool="rings"), scraped.value("pool_in_use", pool="rings")) == (8, 2)
    add(meter, 2, (request(finished=True), 0))
    meter.pools = {"rings": Pool(8, lambda: 0)}
    meter.idle(None, None)
    assert scraped.value("pool_in_use", pool="rings") == 0


def test_the_table_is_what_is_exported(meter: Meter, scraped: Scraped) -> None:
    meter.write()
    families = {family.name.removeprefix(PREFIX): family for family in scraped.registry.collect()}
    assert set(families) == {metric.name.removesuffix("_total") for metric in METRICS}
    for metric in METRICS:
        family = families[metric.name.removesuffix("_total")]
        samples = [sample for sample in family.samples if not sample.name.endswith("_created")]
        assert family.type == metric.kind
        assert family.documentation == metric.tells
        assert {sample.name for sample in samples} == metric.exported()
        for sample in samples:
            assert set(sample.labels) - {"le"} == {*LABELS, *metric.labels}


def test_series_begin_with_zero(meter: Meter, scraped: Scraped) -> None:
    assert [scraped.value("verified_drafts_total", position=p) for p in range(BLOCK + 1)] == [None, 0, 0, 0, None]
    assert [scraped.value("steps_total", width=w) for w in (1, 2, 3, 4)] == [0, 0, None, 0]
    assert [scraped.value("stage_seconds_count", stage=stage) for stage in STAGES] == [0] * len(STAGES)


def test_kinds_of_metric_that_sglang_was_given_are_used() -> None:
    made: list[tuple[Kind, str]] = []

    def kind(kind: Kind) -> Any:
        def make(name: str, **_: Any) -> Any:
            made.append((kind, name))
            return SimpleNamespace(labels=lambda **_: None)

        return make

    Exports(
        SimpleNamespace(
            labels=LABELS, _counter_cls=kind(Kind.COUNTER), _gauge_cls=kind(Kind.GAUGE),
            _histogram_cls=kind(Kind.HISTOGRAM),
        ),
        block_size=BLOCK, widths=[BLOCK],
    )  # fmt: skip
    assert made == [(metric.kind, f"{PREFIX}{metric.name}") for metric in METRICS]
