"""Random requests to a server without speculation and one with this plugin: statuses and greedy answers are equal."""

from collections.abc import Callable

import pytest
from hypothesis import HealthCheck, Phase, given, seed, settings

from sglang_dflash.pairs.servers.server import Server
from tests.server.conftest import AS_USERS, require_nothing_lost
from tests.server.lib.fuzz import Request, difference, differences, neighbours, send
from tests.server.lib.variants import RETRACT, VARIANTS
from tests.server.test_lifecycle import TIGHT
from tests.tools.parameters import REQUEST_FLAGS

N_SHORT, N_LONG = 100, 2500  # requests per server; `test_long` tests four servers with this plugin
PHASES = (Phase.generate, Phase.shrink)
SETTINGS = settings(
    deadline=None, database=None, derandomize=False, phases=PHASES, suppress_health_check=list(HealthCheck)
)


def fuzzed(off: Server, ours: Server, n_requests: int, start: int) -> int:
    """Send at least `n_requests` to both servers, require equal outcomes, and return the number of requests sent."""
    n_sent = 0

    @seed(start)
    @settings(SETTINGS, max_examples=2 * n_requests)
    @given(neighbours)
    def agree(sent: list[Request]) -> None:
        nonlocal n_sent
        if n_sent >= n_requests:
            return
        found = differences(off, ours, sent)
        assert off.running, "the server without speculation ended"
        assert ours.running, "our server ended"
        assert not found, "\n".join(found)
        n_sent += len(sent)

    agree()
    assert n_sent >= n_requests
    for server in (off, ours):
        require_nothing_lost(server)
    return n_sent


def test_short(off: Server, ours: Server) -> None:
    fuzzed(off, ours, N_SHORT, start=1)


@pytest.mark.full
@pytest.mark.soak
@pytest.mark.parametrize(
    ("start", "flags", "env"),
    [
        (2, VARIANTS["hybrid"].flags, {"SGLANG_DFLASH_WIDTHS": "random", "SGLANG_DFLASH_COPY": "random"}),
        (3, VARIANTS["hybrid"].flags, AS_USERS),
        (4, (*VARIANTS["hybrid"].flags, "--disable-overlap-schedule", "--chunked-prefill-size", "16"), {}),
        (5, (*TIGHT, *REQUEST_FLAGS), dict(RETRACT)),
    ],
    ids=["random", "default", "chunked-without-overlap", "tight-retract"],
)
def test_long(server: Callable, start: int, flags: tuple[str, ...], env: dict[str, str]) -> None:
    context = TIGHT[TIGHT.index("--context-length") :][:2] if set(TIGHT) <= set(flags) else ()
    off = server("off", flags=context)  # an answer without max_new_tokens ends at the context length
    fuzzed(off, server(flags=flags, env=env), N_LONG, start)


def test_most_requests_are_answered_and_many_are_refused(off: Server) -> None:
    statuses: list[int] = []

    @seed(1)
    @settings(SETTINGS, max_examples=20)
    @given(neighbours)
    def ask(sent: list[Request]) -> None:
        statuses.extend(send(off, request).status for request in sent)

    ask()
    share = statuses.count(200) / len(statuses)
    assert 0.4 < share < 0.9


def test_differences_are_found(off: Server) -> None:
    asked = {"temperature": 0, "max_new_tokens": 4}
    greedy = Request("/generate", {"input_ids": [5], "sampling_params": asked, "return_logprob": True})
    right = send(off, greedy)
    ((tokens, end, scores),) = right.answers
    assert difference(greedy, right, right) == ""
    assert "with it" in difference(greedy, right, right._replace(answers=[([*tokens[:-1], 7], end, [])]))
    assert "status 200 without speculation, 400 with it" in difference(greedy, right, right._replace(status=400))
    scored = right._replace(answers=[(tokens, end, [score - 0.1 for score in scores])])
    assert "log-probabilities" in difference(greedy, right, scored)
    first = greedy._replace(body=greedy.body | {"sampling_params": asked | {"temperature": 0.7, "top_k": 1}})
    assert difference(first, right, scored) == ""
    assert "with it" in difference(first, right, right._replace(answers=[([*tokens[:-1], 7], end, scores)]))
    drawn = Request("/generate", {"input_ids": [5], "sampling_params": {"temperature": 1.5}})
    assert difference(drawn, right, right._replace(answers=[([7], end, [])])) == ""
