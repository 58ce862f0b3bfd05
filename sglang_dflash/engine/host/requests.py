"""Hooks on SGLang's scheduler for requests: admission, end of an answer, retraction, weight versions, repeated matches.

SGLang tests all tokens of a step together for the end of the answer: stop strings in the order of the request's list,
then stop tokens. If a step contains two stops, SGLang may find the later one. Then the answer would be longer than
without speculation. So when a request with stop strings or patterns has ended, SGLang's test is repeated after each
token. The test of one token searches a shorter tail of the answer for stop strings than the test of a step. If no
repeated test finds an end, the request continues.

SGLang ends an aborted request without this test, so the answer contains its whole last block, even past a stop token or
`max_new_tokens`. Here the test also runs for aborted requests, and cuts the answer. The finish reason remains the
abort.

SGLang computes a request's memory from all its tokens, so tokens after the end of the answer are not deleted
here. `sessions.py` deletes them if a session continues the answer.

With recurrent layers, a waiting request that hits the prefix cache gets a state slot, and the index of the cached state
to copy (`mamba_cow_src_index`). With `--hicache-storage-backend`, SGLang may postpone the request and match its prompt
again. If the new match finds no state, the old index would remain. So each match begins without a slot and without an
index.

A decode server (disaggregation) copies a retracted request's recurrent state, and the tokens that the scheduler has, to
the host. The state includes the step in flight. So the outcome of this step must be processed before a retraction.

SGLang records a new weight version with the number of tokens that a request has. The step in flight ran with the old
weights, and its tokens are not counted yet. So its outcome must be processed before a version is recorded.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from sglang.srt.managers.schedule_batch import Req, ScheduleBatch

if TYPE_CHECKING:
    from sglang.srt.managers.scheduler import Scheduler
    from sglang.srt.mem_cache.memory_pool import HybridReqToTokenPool

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


def match_anew(stock: Stock, req: Req, tree_cache: Any = None, *args: Any, **kwargs: Any) -> None:
    """Match a waiting request's prompt without the state slot of an earlier match.

    Hook around `Req.init_next_round_input`. `tree_cache` is None if the request goes on with the next chunk.
    """
    if tree_cache is not None and req.kv.holds_mamba and not req.kv.holds_kv:
        free_state(req, tree_cache.req_to_token_pool)
    stock(req, tree_cache, *args, **kwargs)


def free_state(req: Req, pool: HybridReqToTokenPool) -> None:
    """Free a waiting request's state slot, and cancel a planned copy into it or its clearing."""
    pool.mamba_allocator.free(req.kv.mamba_pool_idx.unsqueeze(-1))
    req.kv.mamba_pool_idx = req.kv.mamba_cow_src_index = None
    req.kv.mamba_needs_clear = False
