"""docs/step-cost.md has the table and the number of launches that the code computes.

In the table, a step takes at most 0.8 of the time of SGLang's worker at 8 and at 32 requests.
"""

from pathlib import Path

from sglang_dflash.engine.stages import budget
from tests.tools.tables import step_cost

PAGE = Path(__file__).parents[2] / "sglang_dflash" / "docs" / "step-cost.md"


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
