"""Comparison of two samplers: equal distributions must pass, and shifts must be found with the stated probability."""

from random import Random

import pytest

from sglang_dflash.tools.prove import distribution
from sglang_dflash.tools.prove.distribution import Draw

TOKENS = [7, 8, 9, 10]
WEIGHTS = [0.5, 0.3, 0.15, 0.05]
N = 2000


def draws(n: int, seed: int, weights: list[float] = WEIGHTS, length: int = 4) -> list[Draw]:
    random = Random(seed)
    return [tuple(random.choices(TOKENS, weights, k=length)) for _ in range(n)]


@pytest.mark.parametrize("seed", range(20))
def test_the_same_distribution_passes(seed: int) -> None:
    assert distribution.violations(draws(N, seed), draws(N, seed + 1000)) == []


@pytest.mark.parametrize("seed", range(20))
def test_a_large_shift_is_found(seed: int) -> None:
    """A shift of nine standard errors is four above the bound of five, so it must be found with each of 20 seeds."""
    shift = 9 * distribution.standard_error(0.5, N, N)
    shifted = [0.5 + shift, 0.3 - shift, 0.15, 0.05]
    assert distribution.violations(draws(N, seed), draws(N, seed + 1000, shifted))


def test_the_stated_power_holds() -> None:
    """A shift of size `detectable` is found with probability 0.84, so almost certainly in 26 or more of 40 runs."""
    p = WEIGHTS[0]
    shifted = [
        p + distribution.detectable(p, N),
        *(w * (1 - p - distribution.detectable(p, N)) / (1 - p) for w in WEIGHTS[1:]),
    ]
    caught = sum(
        bool(distribution.violations(draws(N, s, length=1), draws(N, s + 1000, shifted, length=1))) for s in range(40)
    )
    assert caught >= 26


@pytest.mark.parametrize(("p", "n", "shift"), [(0.5, 1280, 0.119), (0.1, 1280, 0.071), (0.5, 5000, 0.06)])
def test_detectable_shifts(p: float, n: int, shift: float) -> None:
    assert distribution.detectable(p, n) == pytest.approx(shift, abs=0.001)


def test_dependent_tokens_are_found() -> None:
    """Both samples have equal token frequencies at each position. Only the joint distribution of the two differs."""
    random = Random(3)
    apart = [(first, random.choice((7, 8))) for first in random.choices((7, 8), k=N)]
    together = [(first, first) for first in random.choices((7, 8), k=N)]
    assert {cell.view for cell in distribution.violations(apart, together)} == {"tokens 1 and 2"}


def test_a_shift_only_at_the_last_position_is_found() -> None:
    a, b = draws(N, 1), draws(N, 2)
    spoilt = [(*draw[:3], 7) if i % 3 == 0 else draw for i, draw in enumerate(b)]
    assert {cell.view for cell in distribution.violations(a, spoilt)} == {"token 4"}


def test_an_early_end_is_an_outcome() -> None:
    short = [draw[:2] if i % 4 == 0 else draw for i, draw in enumerate(draws(N, 5))]
    assert {cell.outcome for cell in distribution.violations(draws(N, 4), short)} >= {(distribution.ENDED,)}


def test_rare_outcomes_share_a_cell_and_nothing_is_lost() -> None:
    a = [(token, 0) for token in range(100)] + [(500, 0)] * 900
    b = [(token, 0) for token in range(100, 200)] + [(500, 0)] * 900
    found = distribution.cells(a, b)
    first = [cell for cell in found if cell.view == "token 1"]
    assert [(cell.outcome, cell.n_a, cell.n_b) for cell in first] == [((500,), 900, 900), (distribution.REST, 100, 100)]
    for view, _ in distribution.views():
        assert sum(cell.n_a for cell in found if cell.view == view) == len(a)
        assert sum(cell.n_b for cell in found if cell.view == view) == len(b)


def test_many_rare_outcomes_on_one_side_are_found() -> None:
    assert distribution.violations([(500,)] * 900 + [(token,) for token in range(100)], [(500,)] * 1000)


def test_certain_outcomes_are_equal() -> None:
    assert distribution.violations([(1, 2, 3, 4)] * 50, [(1, 2, 3, 4)] * 70) == []
    assert distribution.violations([(1, 2, 3, 4)] * 50, [(1, 2, 3, 5)] * 70)
