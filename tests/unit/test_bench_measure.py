"""The benchmarks' arithmetic, by hand."""

import math

from sglang_dflash.bench.compare import Difference, differences
from sglang_dflash.bench.measure import Answer, Run, Steps, joined, percentile, ratios, slices, spread


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
