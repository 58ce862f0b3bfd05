"""Request hooks: admission, retraction with a step in flight, and the end of a session's turn."""

from collections import deque
from types import SimpleNamespace
from typing import Any

import pytest
from sglang.srt.managers.schedule_batch import FINISH_ABORT, FINISH_LENGTH
from sglang.srt.model_executor.forward_batch_info import ForwardMode

from sglang_dflash.engine.host.requests import (
    admit,
    clear_first_states,
    end_turn,
    keep_read_tokens,
    outcomes_before_version,
    outcomes_first,
)


def test_requests_that_sglangs_worker_refuses_are_admitted():
    """SGLang's own check, the first argument of the hook, must not be called."""
    assert admit(lambda *args: pytest.fail("SGLang's own worker was asked"), "request", "overlap") is None


@pytest.mark.parametrize(
    ("memory_suffices", "in_flight", "order"),
    [(False, ["step"], ["outcome of step", "update"]), (True, ["step"], ["update"]), (False, [], ["update"])],
)
def test_a_step_in_flight_is_processed_before_retraction(memory_suffices, in_flight, order):
    calls_made: list[str] = []
    scheduler = SimpleNamespace(
        last_batch="batch" if in_flight else None,
        result_queue=deque((step,) for step in in_flight),
        process_batch_result=lambda step: calls_made.append(f"outcome of {step}"),
    )
    batch = SimpleNamespace(check_decode_mem=lambda: memory_suffices)
    outcomes_first(lambda *_: calls_made.append("update"), scheduler, batch)
    assert calls_made == order
    assert not (scheduler.result_queue and not memory_suffices)


@pytest.mark.parametrize(
    ("version", "mode", "order"),
    [
        ("new", ForwardMode.DECODE, ["outcome of step", "version"]),
        ("new", ForwardMode.EXTEND, ["version"]),
        (None, ForwardMode.DECODE, ["version"]),
        ("new", None, ["version"]),
    ],
    ids=["decode", "prefill", "no version", "idle"],
)
def test_a_decode_step_in_flight_is_processed_before_a_new_weight_version(version, mode, order):
    calls_made: list[str] = []
    scheduler = SimpleNamespace(
        last_batch=mode and SimpleNamespace(forward_mode=mode),
        result_queue=deque([("step",)] if mode else []),
        process_batch_result=lambda step: calls_made.append(f"outcome of {step}"),
    )
    outcomes_before_version(lambda *_: calls_made.append("version"), scheduler, version)
    assert calls_made == order
    assert (scheduler.last_batch is None) == (not scheduler.result_queue), "the event loop would process it again"


# -- Chat turns of a streaming session on a target with recurrent layers: no memory is kept for the next turn ----------


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
def test_a_session_is_notified_of_the_end_of_a_turn(streaming, reason, calls):
    calls_made = list[str]()
    session = SimpleNamespace(
        streaming=streaming,
        finish_req=lambda req: calls_made.append("finished"),
        abort_req=lambda: calls_made.append("aborted"),
    )
    ended = {"finished": lambda: reason is not None, "finished_reason": reason}
    req = SimpleNamespace(session=session, release_mm_inputs_on_abort=lambda: None, **ended)
    assert end_turn(stock, None, req) is False
    assert calls_made == calls


@pytest.mark.parametrize(
    ("finished_len", "protected", "kept"), [(3, 0, 12), (None, 0, 14), (3, 13, 13)], ids=["cut", "whole", "in the tree"]
)
def test_a_session_keeps_no_memory_of_a_turns_last_token(finished_len, protected, kept):
    """More KV slots are allocated than tokens were read, so SGLang's limit, the allocated slots, has no effect."""
    slot = SimpleNamespace(kv=SimpleNamespace(kv_committed_len=0, cache_protected_len=protected))
    sessions = SimpleNamespace(borrowed_slot=lambda req: slot)
    req = SimpleNamespace(origin_input_ids=[0] * 10, output_ids=[0] * 5, finished_len=finished_len)

    def keep(sessions: Any, req: Any) -> bool:
        slot.kv.kv_committed_len = 10 + (finished_len or 5)
        return True

    assert keep_read_tokens(keep, sessions, req)
    assert slot.kv.kv_committed_len == kept
    slot.kv.kv_committed_len = 7
    assert not keep_read_tokens(lambda *_: False, sessions, req), "another request, or an aborted turn"
    assert slot.kv.kv_committed_len == 7


def test_a_request_without_a_session_is_released_by_sglang() -> None:
    assert end_turn(stock, None, SimpleNamespace(session=None)) is False


@pytest.mark.parametrize(("prefix_len", "noted", "cleared"), [(0, False, True), (64, False, False), (64, True, True)])
def test_a_prompt_read_from_its_first_token_begins_with_a_cleared_state(prefix_len, noted, cleared):
    """A request that waited with a state slot has no note to clear it. A later chunk must keep its state."""
    req = SimpleNamespace(prefix_len=prefix_len, kv=SimpleNamespace(mamba_needs_clear=noted))
    seen = []
    clear_first_states(lambda batch, reqs: seen.append((batch, reqs)), "batch", [req])
    assert seen == [("batch", [req])]
    assert req.kv.mamba_needs_clear == cleared
