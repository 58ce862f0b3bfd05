"""Hooks on SGLang's scheduler for requests: admission, end of an answer, sessions, retraction, weight versions.

SGLang tests all tokens of a step together for the end of the answer: stop strings in the order of the request's list,
then stop tokens. If a step contains two stops, SGLang may find the later one. Then the answer would be longer than
without speculation. So when a request with stop strings or patterns has ended, SGLang's test is repeated after each
token. The test of one token searches a shorter tail of the answer for stop strings than the test of a step. If no
repeated test finds an end, the request continues.

SGLang ends an aborted request without this test, so the answer contains its whole last block, even past a stop token or
`max_new_tokens`. Here the test also runs for aborted requests, and cuts the answer. The finish reason remains the
abort.

SGLang computes a request's memory from all its tokens, so tokens after the end of the answer are not deleted. If a
session continues the request, they are deleted, so that the history equals the client's.

A streaming session keeps the memory of a turn (a request of the session) for the next turn. K/V past the turn's end can
be freed, but a recurrent state that has read tokens past the turn's end cannot be reset. So if the target has recurrent
layers, streaming sessions use the prefix cache, like other sessions.

If memory does not suffice for a session's request that hits the prefix cache, SGLang keeps its state slot for the next
try, but not the note to copy the cached state. If the cached prefix is evicted before the next try, the request would
begin with the state of the slot's previous owner. So a request that reads its prompt from the first token begins with a
cleared state.

A decode server (disaggregation) copies a retracted request's recurrent state, and the tokens that the scheduler has, to
the host. The state includes the step in flight. So the outcome of this step must be processed before a retraction.

SGLang records a new weight version with the number of tokens that a request has. The step in flight ran with the old
weights, and its tokens are not counted yet. So its outcome must be processed before a version is recorded.
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
    """Accept every request: return None.

    SGLang's own worker rejects `return_hidden_states` with the overlap schedule. If a request has
    `return_sampling_mask`, that worker also rejects min_p, and sampling without its sampling kernel.

    Hook around `validate_dflash_request` and `validate_spec_sampling_mask_request`.
    """


def update_finish_state(stock: Stock, req: Req, new_accepted_len: int = 1) -> None:
    """Test if the answer ends within its last `new_accepted_len` tokens. Hook around `Req.update_finish_state`."""
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
    """Limit the count of reasoning tokens to the first `n_kept` output tokens.

    SGLang has also counted the tokens after the end of the answer, because it cuts them off later.
    """
    if req._is_reasoning_over:
        n_thoughts = min(req.reasoning_tokens, n_kept)
    else:
        n_thoughts = max(req.reasoning_tokens - (len(req.output_ids) - n_kept), 0)
    # If the answer is cut inside the tag that starts the reasoning, no token counts as reasoning.
    req.reasoning_tokens = n_thoughts if n_kept >= req._think_start_match_len else 0


def find_first_end(stock: Stock, req: Req, n: int) -> None:
    """Repeat SGLang's test for the end of the answer after each of the last `n` tokens, until the test finds an end."""
    step, grammar = req.output_ids[-n:], req.grammar
    del req.output_ids[-n:]
    req.finished_reason = req.finished_len = None
    for i, token in enumerate(step):
        req.output_ids.append(token)
        # The grammar has accepted all tokens of the step, so the grammar's state is only valid after the last token.
        req.grammar = grammar if i == n - 1 else None
        stock(req, 1)
        if req.finished():
            req.finished_len = req.finished_len or len(req.output_ids)
            break
    req.grammar = grammar
    req.output_ids.extend(step[i + 1 :])


def create_req(stock: Callable[..., Req], session: Session, *args: Any, **kwargs: Any) -> Req:
    """Delete tokens after the ends of earlier answers, then create a request. Hook around `Session.create_req`."""
    for node in session.req_nodes.values():
        if node.req.finished_len is not None:
            del node.req.output_ids[node.req.finished_len :]
    return stock(session, *args, **kwargs)


def keep_no_memory(stock: Stock, sessions: StreamingSession, req: Req) -> None:
    """Do nothing, so that a session does not take over a turn's memory. Hook around `StreamingSession.take`."""


def keep_read_tokens(stock: Callable[..., bool], sessions: StreamingSession, req: Req) -> bool:
    """End or interrupt a turn of a session, which keeps the turn's K/V without those of its last token.

    The last token may be the bonus of the last step, whose K/V were not computed. SGLang relies on the end of the
    allocated KV slots here, but with speculation more slots are allocated. As without speculation, the next turn reads
    this token. Hook around `StreamingSession.try_cache_finished_req`.
    """
    slot = sessions.borrowed_slot(req)
    keeps = stock(sessions, req)
    if keeps:
        n_output = len(req.output_ids) if req.finished_len is None else req.finished_len
        n_read = max(len(req.origin_input_ids) + n_output - 1, slot.kv.cache_protected_len)
        slot.kv.kv_committed_len = min(slot.kv.kv_committed_len, n_read)
    return keeps


def clear_first_states(stock: Callable[..., None], batch: ScheduleBatch, reqs: list[Req]) -> None:
    """Clear the recurrent states of requests that read their prompts from the first token.

    Hook around `ScheduleBatch._collect_deferred_mamba_cow_and_clear`.
    """
    for req in reqs:
        req.kv.mamba_needs_clear |= req.prefix_len == 0
    stock(batch, reqs)


def outcomes_first(stock: Callable[..., Any], scheduler: Scheduler, batch: ScheduleBatch) -> Any:
    """Process the outcome of the step in flight before requests are retracted for lack of memory.

    Hook around `Scheduler.update_running_batch`.
    """
    if scheduler.last_batch and scheduler.result_queue and not batch.check_decode_mem():
        process_outcome(scheduler)
    return stock(scheduler, batch)


def outcomes_before_version(stock: Stock, scheduler: Scheduler, new_version: str | None) -> None:
    """Process the outcome of the decode step in flight before SGLang records a new weight version.

    A prefill in flight is left to SGLang, because the next step needs its batch. Its token is counted late, as without
    speculation. Hook around `Scheduler.record_weight_version_change`.
    """
    batch = scheduler.last_batch
    if new_version is not None and batch and batch.forward_mode.is_decode() and scheduler.result_queue:
        process_outcome(scheduler)
    stock(scheduler, new_version)


def process_outcome(scheduler: Scheduler) -> None:
    """Process the outcome of the step in flight now. The scheduler then goes on as if no step had run before."""
    scheduler.process_batch_result(*scheduler.result_queue.popleft())
    scheduler.last_batch = None


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
