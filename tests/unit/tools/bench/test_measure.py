"""The benchmark's arithmetic must give numbers that were worked out by hand."""

import itertools
import math
import sys
import threading
from collections.abc import Callable
from dataclasses import replace
from types import SimpleNamespace

import psutil
import pytest

from sglang_dflash.pairs.servers.document import portable
from sglang_dflash.pairs.servers.errors import ServerError
from sglang_dflash.pairs.tiny import pairs as tiny
from sglang_dflash.plot import Panel
from sglang_dflash.tools.bench import measure
from sglang_dflash.tools.bench.client import lines_of, steps_of
from sglang_dflash.tools.bench.compare import Difference, differences, lead
from sglang_dflash.tools.bench.measure import Completion, Measurement, Spread, Steps, percentile, slices, timed
from sglang_dflash.tools.bench.report import (
    FLUSHED,
    BenchReport,
    few_steps,
    markdown,
    noise,
    panels,
    table,
    title_of,
    warnings,
)
from sglang_dflash.tools.bench.rows import Line, Row, means, row, summarise


def test_differences_name_the_first_token_that_differs():
    reference = [[1, 2, 3], [1, 2, 3], [1, 2], [1, 2, 3]]
    answers = [[1, 2, 3], [1, 9, 8], [1, 2, 3], [1, 2]]
    assert differences(reference, answers) == [
        Difference(prompt=1, position=1, expected=2, found=9),
        Difference(prompt=2, position=2, expected=None, found=3),
        Difference(prompt=3, position=2, expected=3, found=None),
    ]


def test_the_lead_over_an_unlisted_token_is_infinite():
    likeliest = {7: -0.5, 8: -0.75}
    assert [lead(likeliest, token) for token in (7, 8, 9, None, "x")] == [0.0, 0.25, math.inf, math.inf, math.inf]
    assert lead({}, 7) == math.inf


def test_a_run_counts_tokens_and_steps():
    # Acceptance length: 3 + 0 accepted drafts and 3 bonus tokens in 3 steps are 2 tokens per step.
    answers = [Completion(6, steps=Steps(2, 3)), Completion(2, steps=Steps(1, 0))]
    run = Measurement(answers, wall_s=4.0, other_cores=0.0)
    assert (run.tokens_per_s, run.steps) == (2.0, Steps(3, 3))
    assert Steps(3, 3).committed_per_step == 2.0


def test_ratios_are_taken_repeat_by_repeat():
    # In the second repeat the machine is half as fast for both arms, so the ratio within that repeat is unchanged.
    assert measure.ratios([200, 100, 210], [100, 50, 100]) == (2.0, 2.0, 2.1)
    assert measure.spread([3, 1, 2]) == (2, 1, 3)  # median, lowest, highest


def test_parts_of_a_run_are_short_and_complete():
    prompts = list(range(18))
    parts = [prompts[part] for part in slices(len(prompts), concurrency=1)]
    assert [len(part) for part in parts] == [4, 4, 4, 4, 2]
    assert [prompt for part in parts for prompt in part] == prompts
    assert [len(prompts[part]) for part in slices(len(prompts), concurrency=8)] == [16, 2]


def test_every_arm_is_first_in_its_turn():
    firsts = [measure.rotated(["off", "stock", "ours"], by) for by in (0, 1, 2, 4)]
    assert [arms[0] for arms in firsts] == ["off", "stock", "ours", "stock"]
    assert firsts[3] == ["stock", "ours", "off"]


class Machine:
    """Clocks set by the tests, in place of `time` and `psutil`."""

    NoSuchProcess = psutil.NoSuchProcess

    def __init__(self) -> None:
        self.now_s = self.engine_s = self.ours_s = self.others_s = 0.0

    def perf_counter(self) -> float:
        return self.now_s

    def cpu_times(self) -> SimpleNamespace:
        system = self.engine_s + self.ours_s
        return SimpleNamespace(user=self.others_s, nice=0, system=system, irq=0, softirq=0, steal=0, idle=99, iowait=9)

    def process(self, which: str) -> SimpleNamespace:
        return SimpleNamespace(pid=which, cpu_times=lambda: SimpleNamespace(user=getattr(self, which), system=0))

    def Process(self) -> SimpleNamespace:  # as `psutil.Process()`: the process of the test
        return self.process("ours_s")


def _end() -> None:
    raise psutil.NoSuchProcess(1)


ENDED = SimpleNamespace(cpu_times=_end)  # a process that has ended since it was listed


@pytest.fixture
def machine(monkeypatch: pytest.MonkeyPatch) -> Machine:
    machine = Machine()
    monkeypatch.setattr(measure, "time", machine)
    monkeypatch.setattr(measure, "psutil", machine)
    return machine


def test_answers_are_read_after_the_clock_has_stopped(machine):
    """Each request takes 2 s. Reading its answer takes 100 s, which must not count."""

    def ask(prompt: str) -> Callable[[], Completion]:
        machine.now_s += 2

        def read() -> Completion:
            machine.now_s += 100
            return Completion(3, text=prompt)

        return read

    run = timed(ask, ["a", "b"], concurrency=1, processes=None)
    assert [answer.text for answer in run.completions] == ["a", "b"]
    assert (run.wall_s, run.tokens_per_s) == (4, 1.5)
    assert math.isnan(run.other_cores), "without the engine's processes other cores are unknown"


@pytest.mark.parametrize(("others_s", "other_cores"), [(3.0, 1.5), (-0.1, 0.0)])
def test_other_cores_exclude_the_engine_and_this_process(machine, others_s, other_cores):
    """In 2 s of wall clock the engine uses 5 s of CPU time, and this process 1 s.

    The CPU time of other processes is a difference of times that are not read at the same instant. If it is slightly
    negative, it counts as 0.
    """

    def ask(prompt: str) -> Callable[[], Completion]:
        machine.now_s += 2
        machine.engine_s += 5
        machine.ours_s += 1
        machine.others_s += others_s
        return lambda: Completion(1)

    run = timed(ask, ["a"], concurrency=1, processes=lambda: [machine.process("engine_s"), ENDED])
    assert run.other_cores == other_cores


def test_earlier_times_of_an_ended_process_do_not_count(machine):
    """The engine used 50 s before the run, and its process ends in it. Another one begins and uses 3 s."""
    machine.engine_s = 50.0
    first, second = (
        machine.process("engine_s"),
        SimpleNamespace(pid=2, cpu_times=lambda: SimpleNamespace(user=3, system=0)),
    )
    listed = [first]

    def ask(prompt: str) -> Callable[[], Completion]:
        machine.now_s += 2
        machine.others_s += 3
        listed[:] = [second]
        return lambda: Completion(1)

    assert timed(ask, ["a"], concurrency=1, processes=lambda: listed).other_cores == 0


def test_exactly_the_concurrency_is_in_flight():
    together, in_flight, most = threading.Barrier(3, timeout=120), list[int](), 0

    def ask(prompt: int) -> Callable[[], Completion]:
        nonlocal most
        in_flight.append(prompt)
        most = max(most, len(in_flight))
        together.wait()
        in_flight.remove(prompt)
        return lambda: Completion(prompt)

    run = timed(ask, range(9), concurrency=3, processes=None)
    assert [answer.n_tokens for answer in run.completions] == list(range(9))
    assert most == 3


def test_a_steady_load_counts_the_window_only(monkeypatch):
    """Each request takes 2 s and generates 4 tokens. The window of 5 s begins at 2 s, when the first request has ended.

    Two requests lie inside it, and half of a third: 10 tokens.
    """
    now_s = [0.0]
    monkeypatch.setattr(measure.time, "perf_counter", lambda: now_s[0])

    def ask(prompt: int) -> Callable[[], Completion]:
        now_s[0] += 2.0
        return lambda: Completion(4, text=str(prompt))

    run = measure.steady(ask, range(3), concurrency=1, seconds=5.0, processes=None)
    assert (run.prompts, run.within, run.wall_s) == ((1, 2, 0), (1.0, 1.0, 0.5), 5.0)
    assert (run.n_tokens, run.n_whole, run.tokens_per_s) == (10, 2, 2.0)
    assert [one.text for one in run.completions] == ["1", "2", "0"]
    assert measure.joined([run]) == run


def test_a_steady_load_keeps_its_concurrency(monkeypatch):
    ticks = itertools.count()
    monkeypatch.setattr(measure.time, "perf_counter", lambda: next(ticks) / 1000)
    together, numbers = threading.Barrier(3, timeout=120), itertools.count()

    def ask(prompt: int) -> Callable[[], Completion]:
        if next(numbers) < 3:  # the first three are in flight at once
            together.wait()
        return lambda: Completion(1)

    run = measure.steady(ask, range(2), concurrency=3, seconds=1.0, processes=None)
    assert run.n_whole > 3
    assert set(run.prompts) == {0, 1}


def test_an_error_ends_a_steady_load():
    def ask(prompt: int) -> Callable[[], Completion]:
        if prompt:
            raise ServerError("the server died")
        return lambda: Completion(1)

    with pytest.raises(ServerError, match="the server died"):
        measure.steady(ask, range(2), concurrency=2, seconds=1e9, processes=None)


def test_parts_are_joined():
    """Other processes used 0.5 cores for 3 s and none for 1 s, so 1.5 / 4 = 0.375 cores on average."""
    parts = (5, 3.0, 0.5), (3, 1.0, 0)
    run = measure.joined([Measurement([Completion(n, steps=Steps(1, n - 1))], *rest) for n, *rest in parts])
    assert (run.n_tokens, run.tokens_per_s, run.steps, run.other_cores) == (8, 2.0, Steps(2, 6), 0.375)


def test_percentiles_are_observed_values():
    """The rank is rounded up: 50 % of three values is the second smallest, 1 % the smallest."""
    values = [float(i) for i in range(1, 101)]
    assert [percentile(values, p) for p in (50, 99, 100)] == [50, 99, 100]
    assert [percentile([3.0, 1.0, 2.0], p) for p in (1, 33, 50, 67, 99)] == [1, 1, 2, 3, 3]
    assert percentile([5.0, float("nan"), 7.0], 50) == 5.0
    assert math.isnan(percentile([], 50))


def test_steps_by_position_come_from_the_histogram():
    # 4 of 10 steps accepted no draft, 3 one, 1 two and 2 three. So 6 accepted the first, 3 the second, 2 the third.
    meta = {"spec_verify_ct": 10, "spec_num_correct_drafts": 11, "spec_correct_drafts_histogram": [4, 3, 1, 2]}
    steps = steps_of(meta, n_tokens=22)
    assert steps == Steps(10, 11, (6, 3, 2))
    assert (steps.committed_per_step, steps.acceptance_by_position) == (2.1, [0.6, 0.3, 0.2])
    assert steps_of({}, n_tokens=5) == Steps(4, 0)  # no counters: one token from the prefill, then one per step
    assert steps_of({}, n_tokens=1) == Steps(0, 0)


def test_steps_of_several_answers_are_summed():
    whole = measure.total([Steps(4, 3, (2, 1)), Steps(1, 0), Steps(2, 3, (1, 1, 1))])
    assert whole == Steps(7, 6, (3, 2, 1))
    assert whole.since(Steps(4, 3, (2, 1, 0))) == Steps(3, 3, (1, 1, 1))


def test_only_line_feeds_end_an_event():
    """A delta may contain U+2028, at which `str.splitlines` and httpx end a line. Chunks may end anywhere."""
    text = 'data: {"a": "b\u2028c\x85d"}\n\ndata: [DONE]'
    for size in (1, 7, len(text)):
        chunks = (text[i : i + size] for i in range(0, len(text), size))
        assert list(lines_of(chunks)) == ['data: {"a": "b\u2028c\x85d"}', "", "data: [DONE]"]


def test_a_run_has_steps_only_if_every_answer_has():
    counted, uncounted = Completion(2, steps=Steps(1, 0)), Completion(2)
    assert Measurement([counted, uncounted], 1.0, 0.0).steps is None
    assert math.isnan(Steps(0, 0).committed_per_step)
    assert Steps(0, 0, (0,)).acceptance_by_position == [], "no JSON has a number for 0 / 0"
    assert Measurement([uncounted, uncounted], 1.0, 0.0, counted=Steps(2, 2)).steps == Steps(2, 2)


@pytest.mark.parametrize(("p50", "shown"), [(None, False), (3.0, True)])
def test_table_has_latencies_only_if_they_were_measured(p50: float | None, shown: bool) -> None:
    latencies: dict[str, float | None] = {"p50": p50, "p99": p50}
    line = Line("GSM8K", 1, "off", Spread(8.0, 8.0, 8.0), 1.0, latencies, latencies, None, {}, 1, None, [], [])
    about = {"machine": {"gpus": [], "cpu": "C", "cores": 2}, "versions": {"sglang": "0"}, "commit": "c", "gate": None}
    about |= {"max_new_tokens": 8, "temperature": 0.0, "thinking": False, "repeats": 1}
    made = table(BenchReport(about, {"off": {}}, [], [line], [], []))
    assert any("TTFT" in str(column.header) for column in made.columns) is shown


def test_tables_have_the_model_cards_layout():
    def line(arm: str, concurrency: int, speed: float, ratio: float | None, committed: float | None) -> Line:
        latencies: dict[str, float | None] = {"p50": None, "p99": None}
        over = {} if ratio is None else {"off": Spread(ratio, ratio, ratio)}
        shown = "GSM8K", concurrency, arm, Spread(speed, speed, speed), committed
        return Line(*shown, latencies, latencies, None, over, 1, None, [], [])

    lines = [line("off", 1, 84.2, None, 1.0), line("ours", 1, 396.6, 4.71, 7.0)]
    lines += [line("off", 8, 625.0, None, 1.0), line("ours", 8, 2270.4, 3.63, 8.0)]
    assert markdown(["off", "ours"], lines).split("\n\n") == [
        "Tokens/sec (speedup over off, medians)",
        "| Task | Concurrency | off | ours |\n|---|---:|---:|---:|\n"
        "| GSM8K | 1 | 84 | 397 (4.7x) |\n|  | 8 | 625 | 2270 (3.6x) |",
        "Acceptance length (mean over concurrencies)",
        "| Task | ours |\n|---|---:|\n| GSM8K | 7.50 |",
    ]


# Tokens per second at concurrency 1, by arm and repeat. `measured` lists the repeats of `ours` in reverse order.
SPEEDS = {"ours": (300, 360), "off": (100, 90), "stock": (150, 120)}
ARMS = ["off", "stock", "ours"]


def measured() -> list[Row]:
    rows = []
    for concurrency in (8, 1):
        for arm, speeds in SPEEDS.items():
            for repeat in (1, 0) if arm == "ours" else (0, 1):
                answer = Completion(speeds[repeat] * concurrency, steps=Steps(4, 8), ttft_s=0.01, tpot_s=0.002)
                run = Measurement([answer], wall_s=1.0, other_cores=0.1 + 0.3 * repeat)
                rows.append(row(("t", concurrency, arm, repeat), run, run))
    return rows


def test_the_summary_compares_arms_per_concurrency():
    lines = summarise(measured(), ARMS, ["off", "stock"])
    assert [(line.concurrency, line.arm) for line in lines] == [(c, arm) for c in (1, 8) for arm in ARMS]
    off, stock, ours = lines[:3]
    assert ours.tokens_per_s == (330, 300, 360)
    assert ours.over == {"off": (3.5, 3, 4), "stock": (2.5, 2, 3)}
    assert ours.committed_per_step == 3
    assert ours.other_cores_max == 0.4
    assert off.over == {}
    assert set(stock.over) == {"off"}
    assert off.ttft_ms["p50"] == 10


def test_a_title_names_the_machine_of_the_servers_only():
    machine = {"machine": {"gpus": [], "cpu": "C", "cores": 2}, "versions": {"sglang": "0"}}
    served = BenchReport(machine | {"commit": "c"}, {"off": {}}, [], [], [], [])
    assert title_of(served) == "C, 2 cores, SGLang 0, commit c"
    remote = BenchReport({"client": machine, "commit": "c"}, {"off": {"url": "http://a:1"}}, [], [], [], [])
    assert title_of(remote) == "http://a:1 (machine not known), client of commit c"


@pytest.mark.parametrize(("steady_s", "n_warnings"), [(None, 1), (6.0, 0)])
def test_unequal_prompts_are_suspicious_unless_the_load_is_steady(steady_s, n_warnings):
    """At steady load a faster arm answers more prompts in the same time."""
    rows = [SimpleNamespace(task="t", concurrency=1, n_prompt_tokens=n, other_cores=0.0) for n in (5, 6)]
    arms = {arm: {"prefix_cache": FLUSHED} for arm in ("off", "ours")}
    found = list(warnings(BenchReport({"steady_s": steady_s}, arms, rows, [], [], [])))
    assert [line.startswith("t, 1 in flight: arms read different numbers") for line in found] == [True] * n_warnings


def test_a_plot_has_speed_by_concurrency_and_acceptance_by_slot():
    def drawn(lines: list[Line]) -> list[list[Panel]]:
        return panels(BenchReport({}, {arm: {} for arm in ARMS}, [], lines, [], []))

    lines = summarise(measured(), ARMS, ["off"])
    assert [[panel.y_label for panel in row] for row in drawn(lines)] == [["tokens per second, median"]]
    counted = [
        replace(line, acceptance_by_position=[1 / int(line.concurrency), 0.1]) for line in lines if line.arm != "off"
    ]
    ((speed, accepted),) = drawn([*lines[::3], *counted])
    assert (speed.title, list(speed.curves)) == ("t", ARMS)
    assert speed.curves["ours"] == ([1, 8], [330, 2640])
    assert list(accepted.curves) == ["stock", "ours"]
    assert accepted.curves["ours"] == (range(1, 3), [(1 + 1 / 8) / 2, 0.1])


def test_json_lines_name_their_speedups():
    *_, ours = summarise(measured(), ARMS, ["off"])
    line = ours.as_json()
    assert line["over_off"] == {"median": 3.5, "low": 3, "high": 4}
    assert line["tokens_per_s"] == {"median": 2640, "low": 2400, "high": 2880}
    assert "over" not in line
    assert line["ttft_ms"] == {"p50": 10, "p99": 10}


def test_means_weigh_every_concurrency_alike():
    lines = means(measured(), ARMS, ["off"])
    assert [(line.arm, line.concurrency, line.tokens_per_s.median) for line in lines] == [
        ("off", "mean", 427.5), ("stock", "mean", 607.5), ("ours", "mean", 1485),
    ]  # fmt: skip
    assert lines[2].over == {"off": (3.5, 3, 4)}
    assert means([row for row in measured() if row.concurrency == 8], ARMS, ["off"]) == []


def test_only_a_busy_machine_is_reported():
    rows = [replace(measured()[0], other_cores=cores) for cores in (0.02, None, 0.09)]
    assert list(noise(rows, 2)) == []
    (sentence,) = noise([*rows, replace(rows[0], other_cores=0.5)], 2)
    assert "other processes kept 0.5 cores busy, of 2" in sentence


def test_turns_too_short_for_widths_are_reported():
    turns = [{"arm": "ours", "n_steps": {"1": 60, "16": 40}}, {"arm": "fixed", "n_steps": {"16": 20}}]
    assert list(few_steps(turns, ["ours"])) == []
    for short in ({"1": 60, "16": 39}, {"1": 99}):
        (sentence,) = few_steps([*turns, {"arm": "ours", "n_steps": short}], ["ours"])
        assert sentence.startswith("ours: some turns had fewer than 100 steps")


def test_documents_do_not_name_this_machine():
    command = f"{sys.executable} -m x --target {tiny.HYBRID.target} --draft=/models/mine/draft-1 --port 3"
    assert portable(command) == "python -m x --target sglang_dflash/assets/tiny/target --draft=draft-1 --port 3"
