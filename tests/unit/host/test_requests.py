"""Requests: what they may ask for, and how a session's turn ends."""

from collections import deque
from types import SimpleNamespace
from typing import Any

import pytest
from sglang.srt.managers.schedule_batch import FINISH_ABORT, FINISH_LENGTH

from sglang_dflash.host.requests import admit, end_turn, outcomes_first


def test_what_sglangs_own_worker_cannot_serve_is_served():
    """As a hook sees it: SGLang's function comes first, then what it was given."""
    assert admit(lambda *args: pytest.fail("SGLang's own worker was asked"), "request", "overlap") is None


@pytest.mark.parametrize(
    ("memory_suffices", "in_flight", "said"),
    [(False, ["step"], ["outcome of step", "update"]), (True, ["step"], ["update"]), (False, [], ["update"])],
)
def test_a_step_in_flight_is_waited_for_before_requests_are_taken_back(memory_suffices, in_flight, said):
    heard: list[str] = []
    scheduler = SimpleNamespace(
        last_batch="batch" if in_flight else None,
        result_queue=deque((step,) for step in in_flight),
        process_batch_result=lambda step: heard.append(f"outcome of {step}"),
    )
    batch = SimpleNamespace(check_decode_mem=lambda: memory_suffices)
    outcomes_first(lambda *_: heard.append("update"), scheduler, batch)
    assert heard == said
    assert not (scheduler.result_queue and not memory_suffices)


# -- turns of a streaming session on a target with recurrent layers -------------------------------------------------


def stock(*_: Any) -> bool:
    raise AssertionError("the session would keep the turn's memory")


@pytest.mark.parametrize(
    ("streaming", "reason", "calls"),
    [
        (True, FINISH_LENGTH(length=4), ["finished"]),
        (True, FINISH_ABORT("away"), ["aborted"]),
        (True, None, []),  # retracted
        (False, FINISH_LENGTH(length=4), []),
    ],
    ids=["finished", "aborted", "retracted", "another session"],
)
def test_the_session_hears_how_a_turn_ended(streaming, reason, calls):
    heard = list[str]()
    session = SimpleNamespace(
        streaming=streaming, finish_req=lambda req: heard.append("finished"), abort_req=lambda: heard.append("aborted")
    )
    ended = {"finished": lambda: reason is not None, "finished_reason": reason}
    req = SimpleNamespace(session=session, release_mm_inputs_on_abort=lambda: None, **ended)
    assert end_turn(stock, None, req) is False
    assert heard == calls


def test_a_request_without_a_session_is_released_as_it_was() -> None:
    assert end_turn(stock, None, SimpleNamespace(session=None)) is False
