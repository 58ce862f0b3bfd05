"""Turns of a streaming session on a target with recurrent layers: released as any request, and the session goes on."""

from types import SimpleNamespace
from typing import Any

import pytest
from sglang.srt.managers.schedule_batch import FINISH_ABORT, FINISH_LENGTH

from sglang_dflash.host.requests import end_turn


def stock(*_: Any) -> bool:
    raise AssertionError("the session would keep the turn's memory")


class Session:
    def __init__(self, *, streaming: bool) -> None:
        self.streaming = streaming
        self.told = list[str]()

    def finish_req(self, req: Any) -> None:
        self.told.append("finished")

    def abort_req(self) -> None:
        self.told.append("aborted")


@pytest.mark.parametrize(
    ("streaming", "reason", "told"),
    [
        (True, FINISH_LENGTH(length=4), ["finished"]),
        (True, FINISH_ABORT("away"), ["aborted"]),
        (True, None, []),  # retracted
        (False, FINISH_LENGTH(length=4), []),
    ],
    ids=["finished", "aborted", "retracted", "another session"],
)
def test_the_session_hears_how_a_turn_ended(streaming: bool, reason: Any, told: list[str]) -> None:
    session = Session(streaming=streaming)
    req: Any = SimpleNamespace(
        session=session,
        finished=lambda: reason is not None,
        finished_reason=reason,
        release_mm_inputs_on_abort=lambda: None,
    )
    assert end_turn(stock, None, req) is False
    assert session.told == told


def test_a_request_without_a_session_is_released_as_it_was() -> None:
    req: Any = SimpleNamespace(session=None)
    assert end_turn(stock, None, req) is False
