"""An answer must end at the same token with several tokens per step as with one token per step."""

from array import array
from collections.abc import Callable
from types import SimpleNamespace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from sglang.srt.constrained.base_grammar_backend import BaseGrammarObject
from sglang.srt.managers.io_struct import SessionParams
from sglang.srt.managers.schedule_batch import FINISH_ABORT, Req
from sglang.srt.sampling.sampling_params import SamplingParams
from sglang.srt.session.session_controller import Session, SessionReqNode

from sglang_dflash.engine.host.requests import update_finish_state
from sglang_dflash.engine.host.sessions import create_req
from tests.server.lib.talk import token_ids, tokenizer

TEXT = "Here are the capitals:\n- The capital of Italy is Rome.\n- The capital of Cuba is Havana."
STOPS = [".", ".\n", " is ", ":", "\n", " capital of", "Rome", "ba", "zzz"]


def request(**sampling: object) -> Req:
    params = SamplingParams(**{"max_new_tokens": 64} | sampling)
    params.normalize(tokenizer())
    req = Req("r", "", array("q", [5]), params, eos_token_ids={2}, vocab_size=1024)
    req.tokenizer = tokenizer()
    req.tokenizer.additional_stop_token_ids = None  # SGLang sets this on every tokenizer it loads
    return req


def ended(req: Req) -> tuple[object, list[int], list[int]]:
    reason = req.finished_reason and req.finished_reason.to_json()
    return reason, list(req.output_ids[: req.finished_len]), list(req.output_ids)


def stepped(req: Req, tokens: list[int], widths: list[int], update: Callable, count: Callable | None = None) -> Req:
    for width in widths:
        step, tokens = tokens[:width], tokens[width:]
        if not step or req.finished():
            break
        req.output_ids.extend(step)
        if count:
            count(req, step)
        update(req, len(step))
    return req


def ours(req: Req, n: int) -> None:
    update_finish_state(Req.update_finish_state, req, n)


@settings(max_examples=300)
@given(
    stop=st.lists(st.sampled_from(STOPS), max_size=4),
    stop_token_ids=st.lists(st.sampled_from([17, 29, 15, 2]), max_size=2),
    stop_regex=st.lists(st.sampled_from([r"[A-Z]o", r"is$", r"\n"]), max_size=1),
    max_new_tokens=st.integers(1, 40),
    widths=st.lists(st.integers(1, 16), min_size=40, max_size=40),
)
def test_ends_as_if_tokens_came_one_by_one(stop, stop_token_ids, stop_regex, max_new_tokens, widths):
    asked = {"stop": stop or None, "stop_token_ids": stop_token_ids, "max_new_tokens": max_new_tokens}
    asked["stop_regex"] = stop_regex or None
    tokens = [*token_ids(TEXT), 2, *token_ids(TEXT)]
    one_by_one = stepped(request(**asked), tokens, [1] * len(tokens), Req.update_finish_state)
    in_blocks = stepped(request(**asked), tokens, widths, ours)
    assert ended(in_blocks)[:2] == ended(one_by_one)[:2]


@settings(max_examples=200)
@given(
    stop=st.lists(st.sampled_from(STOPS), max_size=2),
    max_new_tokens=st.integers(1, 40),
    n_start=st.integers(0, 3),
    end=st.lists(st.sampled_from(token_ids(TEXT)), min_size=1, max_size=2),
    widths=st.lists(st.integers(1, 16), min_size=40, max_size=40),
    aborted=st.booleans(),
)
def test_reasoning_tokens_are_counted_one_by_one(stop, max_new_tokens, n_start, end, widths, *, aborted):
    """The answer begins with a start tag of `n_start` tokens; 0: the start tag is in the prompt."""
    tokens = [*token_ids(TEXT), 2]
    asked = {"stop": stop or None, "max_new_tokens": max_new_tokens}

    def count(req: Req, step: list[int]) -> None:
        if n_start:
            req.update_self_opened_reasoning_tokens(step, tokens[:n_start], end)
        else:
            req.update_reasoning_tokens(step, end)

    one_by_one = stepped(request(**asked), tokens, [1] * len(tokens), Req.update_finish_state, count)
    req = stepped(request(**asked), tokens, widths[:2] if aborted else widths, ours, count)
    if aborted and not req.finished():
        req.to_finish = FINISH_ABORT()
        stepped(req, tokens[sum(widths[:2]) :], widths[2:], ours, count)
    if req.finished_len == one_by_one.finished_len:
        assert req.reasoning_tokens == one_by_one.reasoning_tokens
    assert req.reasoning_tokens <= len(req.output_ids[: req.finished_len])


def test_no_token_of_the_step_is_lost():
    tokens = token_ids(TEXT)[:12]
    req = stepped(request(stop=[".", ":"]), tokens, [12], ours)
    assert list(req.output_ids) == tokens
    assert ended(req)[0] == {"type": "stop", "matched": ":"}


@pytest.mark.parametrize("asked", ["stop", "stop_regex"])
@pytest.mark.parametrize("stops", [["\n", ":"], [":", "\n"]])
@pytest.mark.parametrize("widths", [[16], [4, 2]], ids=str)  # the fifth token is ":", the sixth "\n"
def test_the_order_of_stops_does_not_matter(asked, stops, widths):
    req = stepped(request(**{asked: stops}), token_ids(TEXT), widths, ours)
    assert ended(req)[0] == {"type": "stop", "matched": ":"}
    assert req.finished_len == 5


def test_faults_of_sglangs_finish_conditions():
    """If an assertion fails, SGLang has fixed this fault, and its workaround in `host/requests.py` can be removed."""

    def count(req: Req, step: list[int]) -> None:
        req.update_reasoning_tokens(step, [0])

    later = stepped(request(stop=["\n", ":"]), token_ids(TEXT), [16], Req.update_finish_state)
    assert ended(later)[0] == {"type": "stop", "matched": "\n"}
    counted = stepped(request(max_new_tokens=4), token_ids(TEXT), [16], Req.update_finish_state, count)
    assert (counted.finished_len, counted.reasoning_tokens) == (4, 16), "more reasoning tokens than tokens"
    aborted = request(max_new_tokens=4)
    aborted.to_finish = FINISH_ABORT()
    stepped(aborted, token_ids(TEXT), [16], Req.update_finish_state)
    assert len(aborted.output_ids[: aborted.finished_len]) == 16, "the whole step is kept"


class Complete(BaseGrammarObject):
    """A grammar that has accepted a whole step and allows no further token."""

    def is_terminated(self) -> bool:
        return True


@pytest.mark.parametrize(
    ("stop", "reason", "length"),
    [("zzz", {"type": "stop", "matched": 17}, 15), (":", {"type": "stop", "matched": ":"}, 5)],
    ids=["by the grammar", "by a stop string"],
)
def test_a_completed_grammar_ends_the_answer(stop, reason, length):
    req, grammar = request(stop=[stop]), Complete()
    req.grammar = grammar
    stepped(req, token_ids(TEXT)[:15], [15], ours)
    assert ended(req)[0] == reason
    assert req.finished_len == length
    assert req.grammar is grammar, "SGLang ends the grammar itself"


def test_an_answer_continues_as_with_tokens_one_by_one():
    """With one token per step SGLang searches only the last few tokens for a stop string.

    A stop string that the answer spells with a token per letter does not fit into them, so the answer must not end.
    """
    letters = [token for letter in "The capital" for token in token_ids(letter)]
    req = stepped(request(stop=["The capital"]), letters, [len(letters)], Req.update_finish_state)
    assert req.finished(), "SGLang has fixed it: it checks a step's tokens one by one"
    req = stepped(request(stop=["The capital"]), letters, [len(letters)], ours)
    assert (req.finished_reason, req.finished_len, list(req.output_ids)) == (None, None, letters)


@settings(max_examples=100)
@given(
    stop=st.lists(st.sampled_from(STOPS), max_size=3),
    max_new_tokens=st.integers(1, 40),
    widths=st.lists(st.integers(1, 16), min_size=40, max_size=40),
    aborted_at=st.integers(0, 10),
)
def test_an_aborted_answer_is_a_prefix_of_the_whole_one(stop, max_new_tokens, widths, aborted_at):
    asked = {"stop": stop or None, "max_new_tokens": max_new_tokens}
    tokens = [*token_ids(TEXT), 2, *token_ids(TEXT)]
    whole = ended(stepped(request(**asked), tokens, [1] * len(tokens), Req.update_finish_state))
    before = sum(widths[:aborted_at])
    req = stepped(request(**asked), tokens, widths[:aborted_at], ours)
    if req.finished():
        return
    req.to_finish = FINISH_ABORT()
    stepped(req, tokens[before:], widths[aborted_at:], ours)
    assert (req.finished_reason.to_json()["type"], req.to_finish) == ("abort", None)
    answer = list(req.output_ids[: req.finished_len])
    assert answer == whole[1][: len(answer)]
    assert len(answer) > before


def test_a_session_continues_where_the_answer_ended():
    def next_prompt(session: Session) -> list[int]:
        asked = SimpleNamespace(session_params=SessionParams(id="s", rid="r"), input_ids=array("q", [9]))
        (last,) = (node.req for node in session.req_nodes.values())
        return list(session._concat_token_arrays(last, asked, asked.session_params)[0])

    tokens, session = token_ids(TEXT), Session(1000, "s")
    req = stepped(request(stop=[":"]), tokens, [16], ours)
    session.req_nodes["r"] = SessionReqNode(req)
    end = req.finished_len
    assert end < 16
    assert next_prompt(session) == [5, *tokens[:16], 9], "SGLang has fixed it: `create_req` can go"
    assert create_req(next_prompt, session) == [5, *tokens[:end], 9]


def test_running_requests_of_a_session_keep_their_tokens():
    tokens, session = token_ids(TEXT), Session(1000, "s")
    req = stepped(request(), tokens, [16], ours)
    session.req_nodes["r"] = SessionReqNode(req)
    create_req(lambda session: None, session)
    assert list(req.output_ids) == tokens[:16]
