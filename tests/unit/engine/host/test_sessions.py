"""Session hooks: memory of turns, refused turns, and the state slots of requests that wait."""

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from sglang.srt.managers.schedule_batch import FINISH_ABORT, FINISH_LENGTH, ReqKvInfo
from sglang.srt.managers.schedule_policy import AddReqResult

from sglang_dflash.engine.host.sessions import (
    create_req,
    end_aborted_turns,
    end_turn,
    free_refused,
    keep_read_tokens,
)

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


# -- one turn at a time --------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("streaming", "refused"), [(True, True), (True, False), (False, True)])
def test_a_refused_turn_of_a_streaming_session_is_not_its_turn(streaming: bool, refused: bool) -> None:
    """SGLang marks the session as free when one of its turns is aborted, even if another one runs."""
    session: Any = SimpleNamespace(req_nodes={}, streaming=streaming)
    made: Any = SimpleNamespace(session=session, to_finish=FINISH_ABORT("busy") if refused else None)
    assert create_req(lambda *args: made, session, "request") is made
    assert (made.session is None) == (streaming and refused)


def test_a_turn_that_is_aborted_for_lack_of_memory_ends() -> None:
    ended = list[str]()

    def turn(name: str, *, streaming: bool) -> Any:
        return SimpleNamespace(session=SimpleNamespace(streaming=streaming, abort_req=lambda: ended.append(name)))

    retracted, alone = turn("retracted", streaming=True), SimpleNamespace(session=None)
    result: Any = [retracted], 0.5, [turn("aborted", streaming=True), turn("plain", streaming=False), alone]
    assert end_aborted_turns(result, SimpleNamespace()) is result
    assert ended == ["aborted"]


# -- requests that wait for memory ---------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("session", "added", "frees"), [("s", False, True), ("s", True, False), (None, False, False)],
    ids=["refused", "added", "no session"],
)  # fmt: skip
def test_a_sessions_request_that_is_not_added_keeps_no_state_slot(session: Any, added: bool, frees: bool) -> None:
    """SGLang itself frees the slot of a request without a session."""
    freed = list[int]()
    pool = SimpleNamespace(mamba_allocator=SimpleNamespace(free=lambda slots: freed.extend(slots.tolist())))
    earlier: Any = SimpleNamespace()
    adder: Any = SimpleNamespace(can_run_list=[earlier], tree_cache=SimpleNamespace(req_to_token_pool=pool))
    kv = ReqKvInfo(mamba_pool_idx=torch.tensor(7), mamba_cow_src_index=torch.tensor([2]), mamba_needs_clear=True)
    req: Any = SimpleNamespace(session=session, kv=kv)

    def add(given: Any, asked: Any, has_chunked_req: bool, *, truncation_align_size: None) -> AddReqResult:
        assert (given, asked, has_chunked_req) == (adder, req, True)
        if added:
            adder.can_run_list.append(req)
        return AddReqResult.CONTINUE if added else AddReqResult.NO_TOKEN

    result = free_refused(add, adder, req, True, truncation_align_size=None)
    assert result is (AddReqResult.CONTINUE if added else AddReqResult.NO_TOKEN)
    assert freed == ([7] if frees else [])
    assert kv.holds_mamba != frees
    assert (kv.mamba_cow_src_index, kv.mamba_needs_clear) == (None, False) or not frees
