"""What a decode step took, seen from decisions and from outcomes."""

from collections.abc import Iterator, Sequence

import pytest

from sglang_dflash.width.clock import DecisionClock, OutcomeClock, Step, StepClock


def step(n_requests: int, width: int) -> Step:
    return Step(n_requests, width, epoch=0, expected_s=width / 10)


def seconds(width: int) -> float:
    """What a step really takes: not what is expected of it."""
    return width / 8


@pytest.mark.parametrize(
    ("steps", "timed"),
    [
        # An 8 between two 4s: all but the 0.4 s that a 4 takes, whichever of the two intervals was the 8's.
        ([(1, 4, 1.0), (1, 8, 1.4), (1, 4, 2.2)], [(1, 8, 0.8)]),
        ([(1, 4, 1.0), (1, 8, 1.8), (1, 4, 2.2)], [(1, 8, 0.8)]),
        ([(1, 4, 1.0), (1, 8, 1.4), (1, 1, 2.2)], []),
        ([(1, 4, 1.0), (2, 4, 1.4), (1, 4, 2.2)], []),
        ([(1, 4, 1.0), (2, 8, 1.4), (2, 4, 2.2)], []),
        ([(1, 4, 1.0), (1, 4, 1.5), (1, 8, 1.8), (1, 4, 2.8)], [(1, 4, 0.5), (1, 8, 0.9)]),
        ([(1, 4, 1.0), None, (1, 4, 2.0)], []),
        ([(1, 4, 1.0), (1, 8, 1.4), None, (1, 4, 2.2)], []),
    ],
)
def test_outcomes_tell_where_the_time_is_known(
    steps: Sequence[tuple[int, int, float] | None], timed: list[tuple[int, int, float]]
) -> None:
    """Steps: requests, width, and when the outcome is known; None is a prefill."""
    told = list[tuple[int, int, float]]()
    clock = OutcomeClock(lambda *what: told.append(what))
    for one in steps:
        if one is None:
            clock.interrupt()
        else:
            clock.known(step(*one[:2]), one[2])
    assert told == [(*kind, pytest.approx(took)) for *kind, took in timed]


def host_that_computes(clock: StepClock, widths: Sequence[int]) -> None:
    """The overlap schedule on a CPU: a step has run when it is launched; then the outcome of the one before is read."""
    now, before = 0.0, list[Step]()
    for width in widths:
        clock.decided(step(1, width), now)
        now += seconds(width)
        for ran in before:
            clock.known(ran, now)
        before = [step(1, width)]


def looks(n: int) -> Iterator[int]:
    """Width 1, and every fifth step a look at 16."""
    return (16 if i % 5 == 4 else 1 for i in range(n))


def test_decisions_tell_what_every_step_took_where_the_host_computes() -> None:
    told = list[tuple[int, int, float]]()
    host_that_computes(DecisionClock(lambda *what: told.append(what)), list(looks(20)))
    assert told == [(1, width, pytest.approx(seconds(width))) for width in looks(19)]


def test_what_ends_a_request_is_no_part_of_a_step() -> None:
    told = list[tuple[int, int, float]]()
    clock = DecisionClock(lambda *what: told.append(what))
    for n_requests, now_s in [(2, 0.0), (2, 1.0), (1, 3.0), (1, 4.0)]:  # the step from 1.0 on was one's last
        clock.decided(step(n_requests, 4), now_s)
    assert told == [(2, 4, 1.0), (1, 4, 1.0)]


def test_there_outcomes_would_tell_the_time_of_another_step() -> None:
    """Why there are two clocks: lone looks at 16 would seem to take no longer than the steps around them."""
    told = list[tuple[int, int, float]]()
    host_that_computes(OutcomeClock(lambda *what: told.append(what)), list(looks(20)))
    assert min(took for _, width, took in told if width == 16) < seconds(16) / 5
