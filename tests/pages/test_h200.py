"""docs/h200.md has the measured steps, the computed table and the computed number of launches.

In the computed table, a step takes at most 0.8 of the time of SGLang's worker at 8 and at 32 requests.
"""

import json
from pathlib import Path

from sglang_dflash.engine.stages import budget
from tests.tools.tables import step_cost

ROOT = Path(__file__).parents[2]
PAGE = ROOT / "sglang_dflash" / "docs" / "h200.md"


def test_page_has_the_measured_steps_and_the_readme_quotes_them() -> None:
    measured = json.loads((ROOT / "launch" / "results" / "2026-11-28-h200-27b-workers.json").read_text())
    short = {(row["arm"], row["requests"]): row["ms"] for row in measured["rows"] if row["context"] == 256}
    at_start = measured["startup"]["ms"]
    for row, ms in {
        "no speculation": [short["off", 1], short["off", 8]],
        "SGLang's DFLASH": [short["stock", 1], short["stock", 8]],
        "this plugin, whole blocks of 16": [short["ours", 1], short["ours", 8]],
        "this plugin, a step without drafts, timed at start-up": [at_start["1"]["1"], at_start["8"]["1"]],
    }.items():
        assert f"| {row} | {ms[0]:.2f} | {ms[1]:.2f} |" in PAGE.read_text()
    readme = (ROOT / "README.md").read_text()
    for quoted in (*(f"{short[arm, 1]:.2f}, {short[arm, 8]:.2f} ms" for arm in ("stock", "ours")), "4.5 and 3.7"):
        assert quoted in readme
    gains = [5.5 * short["off", n] / short["ours", n] for n in (1, 8)]  # 5.5: the least acceptance length of the card
    assert [f"{gain:.1f}" for gain in gains] == ["4.5", "3.7"]
    breaks_even = [short["ours", n] / short["off", n] for n in (1, 8)]
    assert f"above {breaks_even[0]:.2f} (one request) or {breaks_even[1]:.2f} (eight)" in readme


def test_page_has_the_computed_table() -> None:
    assert "\n".join(step_cost.table()) in PAGE.read_text(), "run `python -m tests.tools.tables.write`"


def test_step_is_at_most_four_fifths_of_sglangs_at_8_and_32_requests() -> None:
    ours, sglang = step_cost.by_side(step_cost.rows())
    for B in (8, 32):
        assert sum(side[B] for side in ours) <= 0.8 * sum(side[B] for side in sglang)


def test_launches_of_the_page_are_the_budget() -> None:
    """Sum `budget.LAUNCHES` without `catch_up`, 6 launches of the scheduler, 1 of SGLang's relay and 2 host copies."""
    others = 6 + 1 + 2
    total = sum(row.on_gpu for stage, row in budget.LAUNCHES.items() if stage != "catch_up")
    assert f"-{total + others}**" in PAGE.read_text()
