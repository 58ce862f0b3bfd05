"""Counts over several scrapes: every increase must be exported exactly once."""

import pytest
import torch

from sglang_dflash.engine.metrics.late_counts import LateCounts
from sglang_dflash.engine.metrics.meter import WRITE_EVERY, Meter
from tests.unit.engine.metrics.test_meter import BLOCK, Scraped, add, meter, request, scraped  # noqa: F401  (fixtures)


def test_counts_continue_across_scrapes(meter: Meter, scraped: Scraped) -> None:  # noqa: F811
    for n in (1, 2, 3):
        add(meter, BLOCK, (request(row=7, committed=103), 3), (request(), 0))
        meter.idle(None, None)
        assert scraped.value("committed_tokens_count") == 2 * n
        assert (scraped.value("cut_blocks_total"), scraped.value("cut_committed_tokens_total")) == (n, 4 * n)
        assert scraped.by("width", "steps_total") == {str(BLOCK): n}


def test_a_step_that_passes_the_limit_is_written(meter: Meter, scraped: Scraped) -> None:  # noqa: F811
    """A step of several requests may raise the number of blocks past `WRITE_EVERY` without equalling it."""
    for _ in range(2):
        add(meter, 2, *[(request(), 0)] * (WRITE_EVERY - 10))
    assert scraped.value("committed_tokens_count") == 2 * (WRITE_EVERY - 10)


@pytest.mark.parametrize("start", [0, 2**31 - 5])
def test_late_counts_add_up(start: int) -> None:
    counts = torch.tensor([start], dtype=torch.int32)
    late, read = LateCounts(counts), list[int]()
    for _ in range(4):
        counts += 3
        read += late.more().tolist()
    assert read == [start + 3, 3, 3, 3]
