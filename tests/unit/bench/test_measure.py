"""The benchmarks' arithmetic, by hand."""

import math
import sys

from sglang_dflash.bench import tiny
from sglang_dflash.bench.chat import steps_of
from sglang_dflash.bench.compare import Difference, differences
from sglang_dflash.bench.measure import Answer, Run, Steps, joined, percentile, ratios, slices, spread, total
from sglang_dflash.bench.report import markdown, means
from sglang_dflash.bench.rows import noise, portable, row, summarise


def test_differences_name_the_first_token_that_differs() -> None:
    reference = [[1, 2, 3], [1, 2, 3], [1, 2], [1, 2, 3]]
    answers = [[1, 2, 3], [1, 9, 8], [1, 2, 3], [1, 2]]
    assert differences(reference, answers) == [
        Difference(prompt=1, position=1, expected=2, found=9),
        Difference(prompt=2, position=2, expected=None, found=3),
        Difference(prompt=3, position=2, expected=3, found=None),
    ]


def test_a_run_counts_tokens_and_steps() -> None:
    # 2 steps accept 3 drafts between them, 1 step accepts none: (3 + 0 + 3 bonus) / 3 steps
    answers = [Answer(6, steps=Steps(2, 3)), Answer(2, steps=Steps(1, 0))]
    run = Run(answers, wall_s=4.0, other_cores=0.0)
    assert (run.tokens_per_s, run.committed_per_step) == (2.0, 2.0)


def test_ratios_are_taken_repeat_by_repeat() -> None:
    # The second repeat ran on a machine half as fast: no ratio shows it, though the medians' ratio would.
    assert ratios([200, 100, 210], [100, 50, 100]) == (2.0, 2.0, 2.1)
    assert spread([3, 1, 2]) == (2, 1, 3)


def test_parts_of_a_run_are_short_and_complete() -> None:
    prompts = list(range(18))
    parts = [prompts[part] for part in slices(len(prompts), concurrency=1)]
    assert [len(part) for part in parts] == [4, 4, 4, 4, 2]
    assert [prompt for part in parts for prompt in part] == prompts
    assert [len(prompts[part]) for part in slices(len(prompts), concurrency=8)] == [16, 2]


def test_parts_are_joined() -> None:
    """Half of 3 s and none of 1 s are other processes'."""
    one, other = (
        Run([Answer(n, steps=Steps(1, n - 1))], wall_s, cores) for n, wall_s, cores in ((5, 3.0, 0.5), (3, 1.0, 0))
    )
    run = joined([one, other])
    assert (run.n_tokens, run.tokens_per_s, run.committed_per_step, run.other_cores) == (8, 2.0, 4.0, 0.375)


def test_percentiles_are_values_that_occurred() -> None:
    values = [float(i) for i in range(1, 101)]
    assert [percentile(values, p) for p in (50, 99, 100)] == [50, 99, 100]
    assert percentile([5.0, float("nan"), 7.0], 50) == 5.0
    assert math.isnan(percentile([], 50))


def test_steps_by_position_come_from_the_histogram() -> None:
    # Of 10 steps 4 accepted no draft, 3 one, 1 two, 2 three: 6 reached the first, 3 the second, 2 the third.
    meta = {"spec_verify_ct": 10, "spec_num_correct_drafts": 11, "spec_correct_drafts_histogram": [4, 3, 1, 2]}
    steps = steps_of(meta, n_tokens=22)
    assert steps == Steps(10, 11, (6, 3, 2))
    assert (steps.committed_per_step, steps.acceptance_by_position) == (2.1, [0.6, 0.3, 0.2])
    assert steps_of({}, n_tokens=5) == Steps(4, 0)  # no speculation: a token a step, after the prefill's
    assert steps_of({}, n_tokens=1) == Steps(0, 0)


def test_steps_of_several_answers_are_summed() -> None:
    whole = total([Steps(4, 3, (2, 1)), Steps(1, 0), Steps(2, 3, (1, 1, 1))])
    assert whole == Steps(7, 6, (3, 2, 1))
    assert whole.since(Steps(4, 3, (2, 1, 0))) == Steps(3, 3, (1, 1, 1))


def test_a_run_has_steps_only_if_every_answer_tells() -> None:
    told, untold = Answer(2, steps=Steps(1, 0)), Answer(2)
    assert Run([told, untold], 1.0, 0.0).steps is None
    assert math.isnan(Run([told, untold], 1.0, 0.0).committed_per_step)
    assert Run([untold, untold], 1.0, 0.0, counted=Steps(2, 2)).committed_per_step == 2.0


def test_tables_have_the_model_cards_layout() -> None:
    def line(arm: str, concurrency: int, speed: float, ratio: float | None, committed: float | None) -> dict:
        over = {} if ratio is None else {"over_off": {"median": ratio}}
        place = {"task": "GSM8K", "concurrency": concurrency, "arm": arm}
        return place | {"tokens_per_s": {"median": speed}, "committed_per_step": committed} | over

    summary = [line("off", 1, 84.2, None, 1.0), line("ours", 1, 396.6, 4.71, 7.0)]
    summary += [line("off", 8, 625.0, None, 1.0), line("ours", 8, 2270.4, 3.63, 8.0)]
    assert markdown({"arms": {"off": {}, "ours": {}}, "summary": summary}).split("\n\n") == [
        "Tokens/sec (speedup over off, medians)",
        "| Task | Concurrency | off | ours |\n|---|---:|---:|---:|\n"
        "| GSM8K | 1 | 84 | 397 (4.7x) |\n|  | 8 | 625 | 2270 (3.6x) |",
        "Committed tokens per step (mean over concurrencies)",
        "| Task | ours |\n|---|---:|\n| GSM8K | 7.50 |",
    ]


# Tokens per second at concurrency 1, in two repeats.
SPEEDS = {"ours": (300, 360), "off": (100, 90), "stock": (150, 120)}
ARMS = ["off", "stock", "ours"]


def measured() -> list[dict]:
    rows = []
    for concurrency in (8, 1):
        for repeat in (0, 1):
            for arm, speeds in SPEEDS.items():
                answer = Answer(speeds[repeat] * concurrency, steps=Steps(4, 8), ttft_s=0.01, tpot_s=0.002)
                run = Run([answer], wall_s=1.0, other_cores=0.1)
                place = {"task": "t", "arm": arm, "concurrency": concurrency, "repeat": repeat}
                rows.append(row(place, run, run))
    return rows


def test_the_summary_compares_arms_per_concurrency() -> None:
    lines = summarise(measured(), place=["task", "concurrency"], arms=ARMS, over=["off", "stock"])
    assert [(line["concurrency"], line["arm"]) for line in lines] == [(c, arm) for c in (1, 8) for arm in ARMS]
    off, stock, ours = lines[:3]
    assert ours["tokens_per_s"] == {"median": 330, "low": 300, "high": 360}
    assert ours["over_off"] == {"median": 3.5, "low": 3, "high": 4}
    assert ours["over_stock"] == {"median": 2.5, "low": 2, "high": 3}
    assert ours["committed_per_step"] == 3
    assert "over_off" not in off
    assert "over_stock" not in stock
    assert off["ttft_ms"]["p50"] == 10


def test_means_weigh_every_concurrency_alike() -> None:
    lines = means(measured(), arms=ARMS, over=["off"])
    assert [(line["arm"], line["concurrency"], line["tokens_per_s"]["median"]) for line in lines] == [
        ("off", "mean", 427.5), ("stock", "mean", 607.5), ("ours", "mean", 1485),
    ]  # fmt: skip
    assert lines[2]["over_off"] == {"median": 3.5, "low": 3, "high": 4}
    assert means([row for row in measured() if row["concurrency"] == 8], arms=ARMS, over=["off"]) == []


def test_a_busy_machine_is_told_apart_from_a_quiet_one() -> None:
    document = {"machine": {"cores": 2}, "rows": [{"other_cores": 0.02}, {"other_cores": 0.09}]}
    assert noise(document) == ""
    document["rows"].append({"other_cores": 0.5})
    assert "up to 0.5 of 2 cores busy" in noise(document)


def test_documents_do_not_name_this_machine() -> None:
    command = f"{sys.executable} -m x --target {tiny.HYBRID.target} --draft=/models/mine/draft-1 --port 3"
    assert portable(command) == "python -m x --target sglang_dflash/assets/tiny/target --draft=draft-1 --port 3"
