"""Request fields that `test_parity.py` does not cover: same answer or same refusal as without speculation."""

from collections.abc import Callable, Iterator
from typing import Any

import httpx
import pytest
import torch
from transformers import AutoModelForCausalLM

from sglang_dflash.pairs.servers.server import Generation, Server
from sglang_dflash.tools.prove import distribution
from tests.server.conftest import PAIRS
from tests.server.lib.talk import post, stream, together
from tests.server.lib.variants import VARIANTS
from tests.tools import parameters

MAX_NEW_TOKENS = 48


PLAIN: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "max_new_tokens": ({}, {"max_new_tokens": 0}),
    "priority": ({"priority": 1}, {}),
    "session_id": ({"session_id": "a"}, {}),
    "extra_key": ({"extra_key": "a"}, {}),
    "cache_salt": ({"cache_salt": "a"}, {}),
    "kv_hints": ({"kv_hints": {"protocol_version": "1", "message_id": "a", "actions": []}}, {}),
    "image_data": ({"image_data": "http://127.0.0.1:9/x.png"}, {}),  # ignored by a text-only target
    "return_routed_experts": ({"return_routed_experts": True}, {}),  # no experts, nothing to return
    "sampling_seed": ({}, {"sampling_seed": 3}),  # no effect on greedy requests
}


@pytest.mark.parametrize(("fields", "options"), PLAIN.values(), ids=PLAIN)
def test_the_answer_is_the_one_without_speculation(
    ours: Server, off: Server, questions: Callable, fields: dict[str, Any], options: dict[str, Any]
) -> None:
    for prompt in questions(2, seed=9):
        a, b = (s.generate(prompt, fields=fields, **{"max_new_tokens": MAX_NEW_TOKENS, **options}) for s in (ours, off))
        assert (a.token_ids, a.text, a.meta["finish_reason"]) == (b.token_ids, b.text, b.meta["finish_reason"])


def run_session(server: Server, questions: list[list[int]], *, streaming: bool = False) -> list[Any]:
    """Run a session of several turns, where each turn continues the one before; return statuses and answers."""
    opened = post(server, "/open_session", {"capacity_of_str_len": 1000, "session_id": "s", "streaming": streaming})
    results: list[Any] = [opened.status_code]
    ends: list[dict[str, Any]] = [
        {}, {"stop": "."}, {"max_new_tokens": 23}, {"stop": [" is", ","]}, {"ignore_eos": True},
    ]  # fmt: skip
    ways: list[dict[str, Any]] = [{}] * 5
    if not streaming:
        ends += [{}] * 4
        ways += [{"offset": 30}, {"drop_previous_output": True}, {"rid": "unknown"}, {"replace": True}]
    rid = None
    for question, end, way in zip(questions, ends, ways, strict=True):
        body = {
            "input_ids": question,
            "sampling_params": {"temperature": 0, "max_new_tokens": MAX_NEW_TOKENS} | end,
            "session_params": {"id": "s", "rid": rid} | way,
            "return_logprob": True,
        }
        answer = post(server, "/generate", body)
        results.append(answer.status_code)
        if answer.status_code == 200:
            meta = answer.json()["meta_info"]
            rid = meta["id"]
            logprobs = [round(logprob, 3) for logprob, *_ in meta["output_token_logprobs"]]
            results.append((answer.json()["output_ids"], meta["prompt_tokens"], meta["finish_reason"], logprobs))
    results.append(post(server, "/close_session", {"session_id": "s"}).status_code)
    return results


def test_session_continues_as_without_speculation(ours: Server, off: Server, questions: Callable) -> None:
    """If a turn ends inside a block, tokens after its end must not become part of the session."""
    asked = questions(9, seed=12)
    results = run_session(off, asked)
    assert run_session(ours, asked) == results
    assert results.count(200) == 10, results
    assert results.count(400) == 1, "the unknown turn"


def test_a_streaming_session_needs_its_flag(ours: Server, off: Server) -> None:
    body = {"capacity_of_str_len": 1000, "session_id": "s", "streaming": True}
    answers = [post(server, "/open_session", body) for server in (ours, off)]
    assert answers[0].status_code == answers[1].status_code >= 400
    assert "--enable-streaming-session" in answers[0].text


@pytest.mark.full
@pytest.mark.parametrize(
    ("target", "flags", "env"),
    [("hybrid", (), {}), ("dense", (), {}), ("dense", ("--disable-overlap-schedule",), {"SGLANG_DFLASH_WIDTHS": "1"})],
    ids=["hybrid", "dense", "dense-one-token"],
)
def test_streaming_session_continues_as_without_speculation(
    server: Callable, questions: Callable, target: str, flags: tuple[str, ...], env: dict[str, str]
) -> None:
    """A turn that ends inside a block leaves a recurrent state past its end. The next turn must not use this state.

    If no step follows the last one, the K/V of the turn's last token are missing. The next turn must read this token.
    """
    flags = ("--enable-streaming-session", *flags)
    servers = [server("plugin", target=target, flags=flags, env=env), server("off", target=target, flags=flags)]
    for seed in range(13, 17):
        asked = questions(5, target=target, seed=seed)
        results = [run_session(s, asked, streaming=True) for s in servers]
        assert results[0] == results[1]
        assert results[0].count(200) == 7


@pytest.mark.full
@pytest.mark.parametrize("target", ["hybrid", "dense"])
def test_refused_turns_leave_the_running_one_alone(server: Callable, questions: Callable, target: str) -> None:
    """While a turn of a streaming session runs, other turns are refused. They do not change its answer."""
    ours = server(target=target, flags=("--enable-streaming-session",))
    first, second, *others = questions(6, target=target, seed=18)
    long = {"max_new_tokens": 1000, "ignore_eos": True}

    def start() -> Iterator[Generation]:
        assert post(
            ours, "/open_session", {"capacity_of_str_len": 1000, "session_id": "s", "streaming": True}
        ).is_success
        turn = {"session_params": {"id": "s", "rid": None}}
        ours.generate(first, fields=turn, max_new_tokens=MAX_NEW_TOKENS)
        return stream(ours, second, fields=turn, **long)

    def close() -> None:
        assert post(ours, "/close_session", {"session_id": "s"}).is_success

    *_, alone = start()
    close()
    disturbed, statuses = list[Generation](), list[int]()
    for chunk in start():
        disturbed.append(chunk)
        if others:
            body = {"input_ids": others.pop(), "sampling_params": {"max_new_tokens": 4}, "session_params": {"id": "s"}}
            statuses.append(post(ours, "/generate", body).status_code)
    close()
    assert statuses == [400] * 4
    assert disturbed[-1].token_ids == alone.token_ids
    ours.flush_cache()


@pytest.mark.full
@pytest.mark.parametrize("target", ["hybrid", "dense"])
def test_a_prompt_of_embeddings(server: Callable, questions: Callable, reference: Callable, target: str) -> None:
    """The draft needs only the target's features, not token ids. So prompts given as embeddings are served too."""
    served = server(target=target, flags=("--disable-radix-cache",))
    model = AutoModelForCausalLM.from_pretrained(PAIRS[target].target, dtype=torch.float32)
    for prompt in questions(4, target=target, seed=14):
        embeds = model.get_input_embeddings()(torch.tensor(prompt)).tolist()
        body = {"input_embeds": embeds, "sampling_params": {"temperature": 0, "max_new_tokens": MAX_NEW_TOKENS}}
        answer = post(served, "/generate", body).json()
        assert answer["output_ids"] == reference(prompt, MAX_NEW_TOKENS, target)
        assert answer["meta_info"]["spec_accept_length"] > 1


REFUSED_BY_SGLANG: dict[str, dict[str, Any]] = {
    "watermark": {"watermark": {"enabled": True}},
    "beam_width": {"sampling_params": {"beam_width": 2}},
    "max_thinking_tokens": {"max_thinking_tokens": 4},
    "input_embeds": {"input_embeds": [[0.0] * 64] * 3},
}


@pytest.mark.parametrize("fields", REFUSED_BY_SGLANG.values(), ids=REFUSED_BY_SGLANG)
def test_refusals_equal_those_without_speculation(
    ours: Server, off: Server, questions: Callable, fields: dict[str, Any]
) -> None:
    prompt = {} if "input_embeds" in fields else {"input_ids": questions(1)[0]}
    answers = [httpx.post(f"{s.url}/generate", json=prompt | fields, timeout=60) for s in (ours, off)]
    assert [answer.status_code for answer in answers] == [400, 400]
    assert all(answer.json()["error"]["message"] for answer in answers)


@pytest.mark.full
def test_a_grammar_ends_an_answer_that_ignores_ends(ours: Server, off: Server, server: Callable) -> None:
    """With speculation an answer ends with its grammar.

    Without speculation SGLang checks one step late, adding a token.
    """
    stock = server("stock", flags=VARIANTS["hybrid"].flags)
    for rule in ("(yes|no)", "[0-9]{3}"):
        options = {"max_new_tokens": 17, "regex": rule, "ignore_eos": True}
        plugin, builtin, without = (one.generate([5, 6, 7], **options).token_ids for one in (ours, stock, off))
        assert plugin == builtin == without[:-1]


def test_greedy_sampled_and_constrained_requests_share_a_batch(ours: Server, off: Server, questions: Callable) -> None:
    prompts = questions(9, seed=6)
    mix = [{}, {"temperature": 0.8, "top_p": 0.9}, {"regex": "[a-z ]{12}"}]
    bodies = [{"max_new_tokens": 32, **mix[i % 3]} for i in range(9)]
    for i, answer in enumerate(together(ours, list(zip(prompts, bodies, strict=True)), n=9)):
        if i % 3 != 1:
            assert answer.token_ids == off.generate(prompts[i], **bodies[i]).token_ids


def test_sampled_tokens_follow_the_targets_distribution(ours: Server, off: Server) -> None:
    case = next(case for case in parameters.SAMPLED if case.name == "top_p 0.8")
    drawn, wanted = (parameters.draws(server, case, 400) for server in (ours, off))
    assert not distribution.violations(wanted, drawn)
    assert len(set(wanted)) > 3, "the draws show no randomness; this test cannot fail"
