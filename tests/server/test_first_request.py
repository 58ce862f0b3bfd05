"""The width policy drafts from the first request on, and soon again after text on which no draft is accepted.

The first request, and the same request after such text, must take about as many steps as a further repetition. Without
drafts a request would take a step per token.

The server chooses between one token and whole blocks only. On this text a block commits about 12 times as many tokens
as a step of one token. So imprecise step times of a busy machine do not change the choice. With widths in between, they
can cost the first request some steps.
"""

from collections.abc import Callable

import pytest

from sglang_dflash.pairs.servers.server import Server
from sglang_dflash.pairs.tiny.workloads import hopeless_prompts
from tests.server.conftest import AS_USERS
from tests.server.lib.variants import VARIANTS

MAX_NEW_TOKENS = 64
EASY = 2  # index of a held-out question whose drafts are nearly all accepted


def n_steps(server: Server, prompt: list[int]) -> int:
    server.flush_cache()
    return server.generate(prompt, max_new_tokens=MAX_NEW_TOKENS).meta["spec_verify_ct"]


@pytest.mark.parametrize("target", ["dense", pytest.param("hybrid", marks=pytest.mark.full)])
def test_first_request_gets_drafts(server: Callable, questions: Callable, target: str) -> None:
    # No other test uses these widths with these flags, so the server is a new one.
    widths = {"SGLANG_DFLASH_WIDTHS": "1,16"}
    ours = server(target=target, flags=VARIANTS[target].flags, env=AS_USERS | widths)
    easy = questions(3, target=target)[EASY]
    first = n_steps(ours, easy)
    for prompt in hopeless_prompts(4):
        n_steps(ours, prompt)
    after_hopeless = n_steps(ours, easy)
    again = n_steps(ours, easy)
    assert again <= MAX_NEW_TOKENS / 4, "this text is not easy; the test cannot fail"
    assert max(first, after_hopeless) * 0.9 <= again + 1, "drafting starts too late"
