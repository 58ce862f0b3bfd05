"""Harmful requests that no front end has checked: the scheduler refuses them, alone, in a session and on all ranks.

`unchecked_tokenizer/` switches off the checks of the tokenizing process. tests/server/test_disaggregation.py sends such
requests to a prefill and a decode server.
"""

import re
from collections.abc import Callable
from typing import Any

import httpx
import pytest

from sglang_dflash.pairs.servers.server import Server
from tests.server.conftest import AS_USERS, require_nothing_lost
from tests.server.lib.bad_requests import GREEDY, HARMFUL, PROMPT
from tests.server.lib.unchecked import UNCHECKED, refusal
from tests.server.lib.variants import TWO_NODES, VARIANTS
from tests.server.test_front_ends import require_right
from tests.tools.parameters import REQUEST_FLAGS

pytestmark = pytest.mark.full


@pytest.fixture(params=[1, 2], ids=["one-rank", "two-ranks"])
def unchecked(request: pytest.FixtureRequest, server: Callable) -> Server:
    ranks = ("--tp", str(request.param))
    return server(flags=[*VARIANTS["hybrid"].flags, *REQUEST_FLAGS, *ranks], env=AS_USERS | dict(TWO_NODES) | UNCHECKED)


def test_the_scheduler_refuses(unchecked: Server, questions: Callable, reference: Callable) -> None:
    log = unchecked.log_text()
    for name, (bad, sentence) in HARMFUL.items():
        status, text = refusal(unchecked, bad)
        assert status == 400, name
        assert re.search(sentence, text), name
    require_right(unchecked, questions, reference)
    require_nothing_lost(unchecked)
    assert unchecked.log_text()[len(log) :].count(" refused: ") >= len(HARMFUL), "refused before the scheduler"


def test_turns_of_a_session_are_checked(unchecked: Server, questions: Callable, reference: Callable) -> None:
    """A refused turn leaves the session as it was."""
    session = httpx.post(f"{unchecked.url}/open_session", json={"capacity_of_str_len": 1000}, timeout=60).json()

    def turn(ids: list[int], after: str | None, **sampling: Any) -> httpx.Response:
        asked = {"id": session, "rid": after}
        body = {"input_ids": ids, "sampling_params": GREEDY | sampling, "session_params": asked}
        return httpx.post(f"{unchecked.url}/generate", json=body, timeout=60)

    first = turn(PROMPT, None)
    assert first.status_code == 200
    after = first.json()["meta_info"]["id"]
    assert turn([5, 1024], after).status_code == 400
    assert turn([8], after, top_k=2**31, temperature=1).status_code == 400
    second = turn([8, 9], after)
    assert second.status_code == 200
    history = [*PROMPT, *first.json()["output_ids"], 8, 9]
    assert second.json()["output_ids"] == reference(history, GREEDY["max_new_tokens"])
    httpx.post(f"{unchecked.url}/close_session", json={"session_id": session}, timeout=60)
    require_right(unchecked, questions, reference)
