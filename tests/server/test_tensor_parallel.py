"""Two ranks, over gloo: they emit what one rank emits, and draw the same tokens.

SGLang seeds its ranks alike, and ranks that draw alike need no exchange to agree. Here each has random numbers of
its own (`unlike_ranks/`). With `SGLANG_SPEC_TP_SYNC=off`, which lets each keep what it drew, the last test fails: their
steps differ in length, and the server stops answering.
"""

from collections.abc import Callable
from pathlib import Path

import pytest

from launch import parameters
from launch.tiny import HYBRID
from sglang_dflash.bench.server import Server
from tests.server.lib.rows import require_logprobs
from tests.server.lib.variants import TWO_NODES

UNLIKE = parameters.path_with(Path(__file__).parent / "unlike_ranks")
TWO_RANKS = {"flags": ("--tp", "2"), "env": dict(TWO_NODES) | UNLIKE}
MAX_NEW_TOKENS = 48

pytestmark = pytest.mark.full


@pytest.fixture(scope="module", params=["fixed", "auto", "window"])
def two_ranks(request: pytest.FixtureRequest, server: Callable) -> Server:
    """`auto`: the ranks time their steps each with a clock of its own, and must choose the same width. `window`: the
    draft's K/V are a ring per request, which each rank keeps for its own heads."""
    env = {"SGLANG_DFLASH_WIDTHS": "auto"} if request.param == "auto" else {}
    window = ("--speculative-draft-window-size", "64") if request.param == "window" else ()
    ranks = server(flags=[*TWO_RANKS["flags"], *window], env=TWO_RANKS["env"] | env)
    assert all(f"random numbers of its own: rank {rank}" in ranks.log_text() for rank in (0, 1))
    return ranks


def test_two_ranks_say_what_one_says(two_ranks: Server, questions: Callable, reference: Callable) -> None:
    prompts = questions(8)
    expected = [reference(prompt, MAX_NEW_TOKENS) for prompt in prompts]
    for concurrency in (1, 8):
        answers = two_ranks.generate_many(prompts, concurrency=concurrency, max_new_tokens=MAX_NEW_TOKENS)
        assert [answer.token_ids for answer in answers] == expected
    assert sum(answer.meta["spec_verify_ct"] for answer in answers) < len(prompts) * MAX_NEW_TOKENS / 4


def test_ranks_draw_the_same_tokens(two_ranks: Server, questions: Callable) -> None:
    """Each rank keeps its heads of the K/V of the tokens it drew. Were they different ones, the next logits would not
    be the target's: the log-probabilities that come with sampled text are compared with Transformers' own."""
    prompts = questions(8, seed=11)
    answers = two_ranks.generate_many(
        prompts,
        concurrency=4,
        max_new_tokens=MAX_NEW_TOKENS,
        temperature=1.0,
        ignore_eos=True,
        fields={"return_logprob": True},
    )
    assert len({tuple(answer.token_ids) for answer in answers}) == len(prompts)
    for prompt, answer in zip(prompts, answers, strict=True):
        require_logprobs(HYBRID.target, prompt, answer)
