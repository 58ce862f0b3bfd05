"""Where an answer ends when a step brought several tokens.

SGLang tests a step's tokens together: stop strings in the order of the request's list, and before stop tokens. Of two
stops in one block the later may win then, and the answer is longer than without speculation. So when a request with
stop strings has ended, SGLang's own test is asked again, token by token. It may then say that the answer goes on: it
looks for a stop string in fewer tokens when it looks after every token.
"""

from __future__ import annotations

from collections.abc import Callable

from sglang.srt.managers.schedule_batch import Req


def update_finish_state(stock: Callable[..., None], req: Req, new_accepted_len: int = 1) -> None:
    """AROUND `Req.update_finish_state`: the request's newest `new_accepted_len` output tokens have just been added."""
    had_ended = req.finished() or req.to_finish is not None
    stock(req, new_accepted_len)
    params = req.sampling_params
    if had_ended or not req.finished() or new_accepted_len < 2 or not (params.stop_strs or params.stop_regex_strs):
        return
    step, grammar = req.output_ids[-new_accepted_len:], req.grammar
    del req.output_ids[-new_accepted_len:]
    req.finished_reason = req.finished_len = None
    for i, token in enumerate(step):
        req.output_ids.append(token)
        # The grammar has read the whole step: only at its end does it know whether the text is complete.
        req.grammar = grammar if i == len(step) - 1 else None
        stock(req, 1)
        if req.finished():
            req.finished_len = req.finished_len or len(req.output_ids)
            break
    req.grammar = grammar
    req.output_ids.extend(step[i + 1 :])
