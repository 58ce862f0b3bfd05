"""Which widths get an engine, where the graphs of all take more memory than there is."""

import math

import pytest

from sglang_dflash.engines import build_while_they_fit
from sglang_dflash.state import NoState
from sglang_dflash.verifier import Engine

WIDTHS = (1, 2, 4, 6, 8, 12, 16)


def built(free_gib: float, graphs_gib: float) -> tuple[list[int], float]:
    """The widths in the order in which they were built, and what is then free."""
    left, widths = free_gib, list[int]()

    def build(width: int) -> Engine:
        nonlocal left
        left -= graphs_gib if width < 16 else 0  # SGLang's own are there already
        widths.append(width)
        return Engine(None, None, NoState())  # type: ignore[arg-type]

    engines = build_while_they_fit(WIDTHS, build, lambda: left)
    assert list(engines) == widths
    return widths, left


@pytest.mark.parametrize("free_gib", [10.0, math.inf])
def test_all_are_built_where_they_fit(free_gib: float) -> None:
    assert built(free_gib, 0.5)[0] == [16, 1, 4, 8, 2, 12, 6]


@pytest.mark.parametrize(("graphs_gib", "n_built"), [(1.0, 6), (1.25, 5), (2.0, 3), (2.6, 2), (6.0, 2)])
def test_half_stays_free_as_far_as_was_known(graphs_gib: float, n_built: int) -> None:
    """What graphs take is known only once some have been captured: the first ones are."""
    widths, left = built(10.0, graphs_gib)
    assert widths == [16, 1, 4, 8, 2, 12, 6][:n_built]
    assert left >= 5 or graphs_gib > 5
