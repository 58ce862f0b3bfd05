"""Hooks on SGLang's scheduler for sessions, in which a request (a turn) continues earlier ones.

If a session continues an answer, tokens after the answer's end are deleted, so that the history equals the client's.

A streaming session keeps the memory of a turn for the next turn. K/V past the turn's end can be freed, but a recurrent
state that has read tokens past the turn's end cannot be reset. So if the target has recurrent layers, streaming
sessions use the prefix cache, like other sessions.

A streaming session has one turn at a time, and SGLang refuses others. But when a refused turn ends, SGLang marks the
session as free although the first turn runs. A third turn would then change the token list that it shares with the
first. So a refused turn is detached from the session.

A session's request that hits the prefix cache gets a state slot. If memory does not suffice, SGLang keeps the slot for
the next try, but drops the index of the cached state to copy. If the cached prefix is evicted before the next try, the
request would begin with the state of the slot's previous owner. If the cache is flushed during a pause, the slot would
get a second owner. So the slot is freed.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from sglang.srt.managers.schedule_batch import FINISH_ABORT, Req, ScheduleBatch
from sglang.srt.session.session_controller import Session
from sglang.srt.session.streaming_session import StreamingSession

from sglang_dflash.engine.host.requests import free_state

if TYPE_CHECKING:
    from sglang.srt.managers.schedule_policy import AddReqResult, PrefillAdder

Stock = Callable[..., None]


def create_req(stock: Callable[..., Req], session: Session, *args: Any, **kwargs: Any) -> Req:
    """Create a turn after deleting tokens past earlier answers' ends. Detach a refused turn of a streaming session.

    Hook around `Session.create_req`. The module docstring gives the reasons.
    """
    for node in session.req_nodes.values():
        if node.req.finished_len is not None:
            del node.req.output_ids[node.req.finished_len :]
    req = stock(session, *args, **kwargs)
    if session.streaming and req.to_finish is not None:
        req.session = None
    return req


def keep_no_memory(stock: Stock, sessions: StreamingSession, req: Req) -> None:
    """Do nothing, so that a session does not take over a turn's memory. Hook around `StreamingSession.take`."""


def keep_read_tokens(stock: Callable[..., bool], sessions: StreamingSession, req: Req) -> bool:
    """End or interrupt a turn. The session keeps the turn's K/V, except those of its last token.

    The last token may be the bonus of the last step, whose K/V were not computed. SGLang relies on the end of the
    allocated KV slots here, but with speculation more slots are allocated. The next turn reads this token, as without
    speculation. Hook around `StreamingSession.try_cache_finished_req`.
    """
    slot = sessions.borrowed_slot(req)
    keeps = stock(sessions, req)
    if keeps:
        n_output = len(req.output_ids) if req.finished_len is None else req.finished_len
        n_read = max(len(req.origin_input_ids) + n_output - 1, slot.kv.cache_protected_len)
        slot.kv.kv_committed_len = min(slot.kv.kv_committed_len, n_read)
    return keeps


def free_refused(stock: Callable[..., AddReqResult], adder: PrefillAdder, req: Req, *args: Any, **kw: Any) -> Any:
    """Add a waiting request to the next prefill. If a session's request is not added, free its state slot.

    SGLang itself frees the slot of a request without a session. Hook around `PrefillAdder.add_one_req`.
    """
    result = stock(adder, req, *args, **kw)
    added = bool(adder.can_run_list) and adder.can_run_list[-1] is req
    if req.session is not None and not added and req.kv.holds_mamba and not req.kv.holds_kv:
        free_state(req, adder.tree_cache.req_to_token_pool)
    return result


def end_turn(stock: Callable[..., bool], sessions: StreamingSession, req: Req) -> bool:
    """End a turn of a session, and return False, so that the session keeps no memory of the turn.

    Hook around `StreamingSession.try_cache_finished_req`. SGLang also calls this method for retracted requests, whose
    turn goes on.
    """
    session = req.session
    if session is None or not session.streaming or not req.finished():
        return False
    if isinstance(req.finished_reason, FINISH_ABORT):  # the session will continue from the previous turn
        req.release_mm_inputs_on_abort()
        session.abort_req()
    else:
        session.finish_req(req)
    return False


def end_aborted_turns(result: tuple[list[Req], float, list[Req]], batch: ScheduleBatch) -> Any:
    """End the turns of requests that SGLang aborts for lack of memory. Hook after `ScheduleBatch.retract_decode`.

    When `end_turn` runs, these requests have no finish reason yet. So it treats them as retracted, and does not end
    their turns.
    """
    for req in result[2]:
        if req.session is not None and req.session.streaming:
            req.session.abort_req()
    return result
