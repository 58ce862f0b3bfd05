"""Counts of steps, against counts made by hand."""

from types import SimpleNamespace

import pytest

from sglang_dflash.metrics.tally import Tally, goes_on


def tally() -> Tally:
    """Three steps: two requests and all 4 tokens, one of them drafted after a hit; one at width 2; an empty one."""
    tally = Tally()
    tally.add(4, [3, 0], [False, True])
    tally.add(2, [1], [True])
    tally.add(4, [], [])
    return tally


def test_steps_are_counted_once_for_all_their_requests() -> None:
    assert tally().n_steps == {4: 1, 2: 1}
    assert tally().n_blocks.total() == 3


def test_committed_is_accepted_and_the_bonus() -> None:
    assert tally().committed() == {4: 1, 1: 1, 2: 1}


def test_a_position_is_verified_up_to_the_width_and_accepted_with_all_before_it() -> None:
    verified, accepted = tally().by_position()
    assert verified == {1: 3, 2: 2, 3: 2}
    assert accepted == {1: 2, 2: 1, 3: 1}


def test_a_step_without_drafts_verifies_none() -> None:
    alone = Tally()
    alone.add(1, [0, 0], [False, False])
    assert alone.by_position() == ({}, {})
    assert alone.committed() == {1: 2}


def test_cut_blocks_by_what_they_committed() -> None:
    assert tally().n_cut_blocks == {1: 1, 2: 1}


def test_each_request_has_its_own_outcome() -> None:
    with pytest.raises(ValueError, match="zip"):
        Tally().add(4, [1, 2], [False])


@pytest.mark.parametrize(
    ("is_retracted", "finished", "counted"), [(False, False, True), (True, False, False), (False, True, False)]
)
def test_the_outcome_of_an_ended_or_retracted_request_is_not_counted(
    is_retracted: bool, finished: bool, counted: bool
) -> None:
    assert goes_on(SimpleNamespace(is_retracted=is_retracted, finished=lambda: finished)) is counted
