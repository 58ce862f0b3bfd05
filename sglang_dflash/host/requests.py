"""What SGLang's scheduler asks about a request: whether it can be served, and where its answer ends.

SGLang tests all tokens of a step together: stop strings in the order of the request's list, then stop tokens. If a
block holds two stops, the later one may win, and the answer is longer than without speculation. So when a request with
stop strings has ended, SGLang's own test is asked again, token by token. It may then say that the answer goes on: it
looks for a stop string in fewer tokens when it looks after every token.

SGLang ends an aborted request without a test, with all of its last block: past the end token, or `max_new_tokens`. An
answer that would have ended inside the block is cut there; what ended it is still the abort.

What came after the end stays with the request, whose memory is counted by it, until a session goes on from there: the
history is what the client was told.

A streaming session keeps a turn's memory for the next turn. K/V past the turn's end can be given back; the state of
recurrent layers, which a block or a step in flight has taken further, cannot. There turns find what was said in the
prefix cache, as other sessions' do.

A server that others read prompts for copies a request that it takes back to the host, with its state: up to the tokens
the scheduler knows of, so the step in flight must have told it.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from sglang.srt.managers.schedule_batch import FINISH_ABORT, Req, ScheduleBatch
from sglang.srt.session.session_controller import Session
from sglang.srt.session.streaming_session import StreamingSession

if TYPE_CHECKING:
    from sglang.srt.managers.scheduler import Scheduler

Stock = Callable[..., None]


def admit(stock: Callable[..., str | None], *args: Any) -> None:
    """AROUND `validate_dflash_request` and `validate_spec_sampling_mask_request`: why SGLang's own worker cannot serve
    a request, which keeps no hidden states and draws without min_p, and without a GPU greedily. None of it holds here.
    """


def update_finish_state(stock: Stock, req: Req, new_accepted_len: int = 1) -> None:
    """AROUND `Req.update_finish_state`: the request's newest `new_accepted_len` output tokens have just been added."""
    if req.finished() or new_accepted_len < 2:
        stock(req, new_accepted_len)
        return
    abort, req.to_finish = req.to_finish, None
    stock(req, new_accepted_len)
    params = req.sampling_params
    if req.finished() and (params.stop_strs or params.stop_regex_strs):
        find_first_end(stock, req, new_accepted_len)
    req.finished_reason = abort or req.finished_reason
    if req.finished_len is not None:
        uncount_thoughts(req, req.finished_len)


def uncount_thoughts(req: Req, n_kept: int) -> None:
    """Count only the thoughts among the first `n_kept` output tokens. SGLang counts a step before it cuts it."""
    if req._is_reasoning_over:
        n_thoughts = min(req.reasoning_tokens, n_kept)
    else:
        n_thoughts = max(req.reasoning_tokens - (len(req.output_ids) - n_kept), 0)
    # A start tag that was cut is no thought.
    req.reasoning_tokens = n_thoughts if n_kept >= req._think_start_match_len else 0


def find_first_end(stock: Stock, req: Req, n: int) -> None:
    """Ask again about the last `n` tokens, one by one."""
    step, grammar = req.output_ids[-n:], req.grammar
    del req.output_ids[-n:]
    req.finished_reason = req.finished_len = None
    for i, token in enumerate(step):
        req.output_ids.append(token)
        # The grammar has read the whole step: only at its end does it know whether the text is complete.
        req.grammar = grammar if i == n - 1 else None
        stock(req, 1)
        if req.finished():
            req.finished_len = req.finished_len or len(req.output_ids)
            break
    req.grammar = grammar
    req.output_ids.extend(step[i + 1 :])


def create_req(stock: Callable[..., Req], session: Session, *args: Any, **kwargs: Any) -> Req:
    """AROUND `Session.create_req`: the next request of a session, its history before it."""
    for node in session.req_nodes.values():
        if node.req.finished_len is not None:
            del node.req.output_ids[node.req.finished_len :]
    return stock(session, *args, **kwargs)


def keep_no_memory(stock: Stock, sessions: StreamingSession, req: Req) -> None:
    """AROUND `StreamingSession.take`: the session would keep what the request's turn has just been given."""


def outcomes_first(stock: Callable[..., Any], scheduler: Scheduler, batch: ScheduleBatch) -> Any:
    """AROUND `Scheduler.update_running_batch`, where requests are taken back for want of memory."""
    if scheduler.last_batch and scheduler.result_queue and not batch.check_decode_mem():
        scheduler.process_batch_result(*scheduler.result_queue.popleft())
        scheduler.last_batch = None
    return stock(scheduler, batch)


def end_turn(stock: Callable[..., bool], sessions: StreamingSession, req: Req) -> bool:
    """AROUND `StreamingSession.try_cache_finished_req`: whether the session keeps the request's memory.

    Also called for a request that is retracted, which goes on later.
    """
    session = req.session
    if session is None or not session.streaming or not req.finished():
        return False
    if isinstance(req.finished_reason, FINISH_ABORT):  # the session goes on from the turn before
        req.release_mm_inputs_on_abort()
        session.abort_req()
    else:
        session.finish_req(req)
    return False
