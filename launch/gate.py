"""Are the outputs the same? Asked before any speed of this repository is shown, and of every run that is.

In fp32 an answer differs or it does not. In a lower precision two tokens can be so close that another batch shape swaps
them; a difference is then forgiven only where the reference itself has the two tokens on top, no further apart than a
bound fixed beforehand.
"""

from collections.abc import Sequence

from sglang_dflash.bench.compare import Difference
from sglang_dflash.bench.server import Server


def is_near_tie(difference: Difference, context: Sequence[int], server: Server, gap: float) -> bool:
    """Whether `server` itself sees the two tokens on top after `context`, within `gap` in log-probability."""
    fields = {"return_logprob": True, "top_logprobs_num": 2}
    top = server.generate(context, fields=fields, max_new_tokens=1).meta["output_top_logprobs"][0]
    (first_logprob, first_id, _), (second_logprob, second_id, _) = top
    return {first_id, second_id} == {difference.expected, difference.found} and first_logprob - second_logprob <= gap
