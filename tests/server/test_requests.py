"""What a request may carry: served as without speculation, or refused with a sentence."""

import json
import math
from collections import Counter
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from itertools import pairwise
from typing import Any

import httpx
import pytest
import torch
from transformers import AutoModelForCausalLM

from sglang_dflash.servers.server import Server
from tests.server.conftest import PAIRS
from tests.server.lib.talk import post
from tests.server.lib.variants import VARIANTS

MAX_NEW_TOKENS = 48


# What changes nothing, and what decides where the text ends. Penalties have a module of their own.
PLAIN: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "stop": ({}, {"stop": ["the", "sum"]}),
    "no_stop_trim": ({}, {"stop": ["the"], "no_stop_trim": True}),
    "stop_token_ids": ({}, {"stop_token_ids": [15, 29, 224]}),
    "stop_regex": ({}, {"stop_regex": "[0-9]"}),
    "ignore_eos": ({}, {"ignore_eos": True}),
    "max_new_tokens": ({}, {"max_new_tokens": 0}),
    "priority": ({"priority": 1}, {}),
    "session_id": ({"session_id": "a"}, {}),
    "extra_key": ({"extra_key": "a"}, {}),
    "cache_salt": ({"cache_salt": "a"}, {}),
    "kv_hints": ({"kv_hints": {"protocol_version": "1", "message_id": "a", "actions": []}}, {}),
    "image_data": ({"image_data": "http://127.0.0.1:9/x.png"}, {}),  # not looked at by a text-only target
    "return_routed_experts": ({"return_routed_experts": True}, {}),  # no experts, nothing to return
    "sampling_seed": ({}, {"sampling_seed": 3}),  # greedy all the same
}


@pytest.mark.parametrize(("fields", "options"), PLAIN.values(), ids=PLAIN)
def test_the_answer_is_the_one_without_speculation(
    ours: Server, off: Server, questions: Callable, fields: dict[str, Any], options: dict[str, Any]
) -> None:
    for prompt in questions(2, seed=9):
        a, b = (s.generate(prompt, fields=fields, **{"max_new_tokens": MAX_NEW_TOKENS, **options}) for s in (ours, off))
        assert (a.token_ids, a.text, a.meta["finish_reason"]) == (b.token_ids, b.text, b.meta["finish_reason"])


def test_several_answers_to_one_prompt(ours: Server, off: Server, questions: Callable) -> None:
    (prompt,) = questions(1, seed=10)
    body = {"input_ids": prompt, "sampling_params": {"temperature": 0, "max_new_tokens": MAX_NEW_TOKENS, "n": 3}}
    answers = [httpx.post(f"{s.url}/generate", json=body, timeout=60).json() for s in (ours, off)]
    assert [a["output_ids"] for a in answers[0]] == [a["output_ids"] for a in answers[1]]
    assert len(answers[0]) == 3


def test_a_stream_adds_up_to_the_answer(ours: Server, questions: Callable) -> None:
    (prompt,) = questions(1, seed=10)
    sampling = {"temperature": 0, "max_new_tokens": MAX_NEW_TOKENS}
    body = {"input_ids": prompt, "sampling_params": sampling, "stream": True}
    with httpx.stream("POST", f"{ours.url}/generate", json=body, timeout=60) as response:
        lines = [line for line in response.iter_lines() if line.startswith("data: {")]
    texts = [json.loads(line.removeprefix("data: "))["text"] for line in lines]
    assert texts[-1] == ours.generate(prompt, max_new_tokens=MAX_NEW_TOKENS).text
    assert all(after.startswith(before) for before, after in pairwise(texts))
    assert len(texts) > 1


def say_in_turns(server: Server, questions: list[list[int]], *, streaming: bool = False) -> list[Any]:
    """A session in which every turn but the last is the context of the next; what each answers, and to how much."""
    opened = post(server, "/open_session", {"capacity_of_str_len": 1000, "session_id": "s", "streaming": streaming})
    said: list[Any] = [opened.status_code]
    ends: list[dict[str, Any]] = [
        {},
        {"stop": "."},
        {"max_new_tokens": 23},
        {"stop": [" is", ","]},
        {"ignore_eos": True},
    ]
    ways: list[dict[str, Any]] = [{}] * 5
    if not streaming:
        ends += [{}] * 4
        ways += [{"offset": 30}, {"drop_previous_output": True}, {"rid": "never heard of"}, {"replace": True}]
    rid = None
    for question, end, way in zip(questions, ends, ways, strict=True):
        body = {
            "input_ids": question,
            "sampling_params": {"temperature": 0, "max_new_tokens": MAX_NEW_TOKENS} | end,
            "session_params": {"id": "s", "rid": rid} | way,
            "return_logprob": True,
        }
        answer = post(server, "/generate", body)
        said.append(answer.status_code)
        if answer.status_code == 200:
            meta = answer.json()["meta_info"]
            rid = meta["id"]
            logprobs = [round(logprob, 3) for logprob, *_ in meta["output_token_logprobs"]]
            said.append((answer.json()["output_ids"], meta["prompt_tokens"], meta["finish_reason"], logprobs))
    said.append(post(server, "/close_session", {"session_id": "s"}).status_code)
    return said


def test_a_session_goes_on_as_without_speculation(ours: Server, off: Server, questions: Callable) -> None:
    """Also where a turn ended inside a block: what the block went on with is no part of the session."""
    asked = questions(9, seed=12)
    said = say_in_turns(off, asked)
    assert say_in_turns(ours, asked) == said
    assert said.count(200) == 10, said
    assert said.count(400) == 1, "the unknown turn"


def test_a_streaming_session_needs_its_flag(ours: Server, off: Server) -> None:
    body = {"capacity_of_str_len": 1000, "session_id": "s", "streaming": True}
    answers = [post(server, "/open_session", body) for server in (ours, off)]
    assert answers[0].status_code == answers[1].status_code >= 400
    assert "--enable-streaming-session" in answers[0].text


@pytest.mark.full
@pytest.mark.parametrize("target", ["hybrid", "dense"])
def test_a_streaming_session_goes_on_as_without_speculation(server: Callable, questions: Callable, target: str) -> None:
    """Also with recurrent layers, whose state a turn that ends inside a block leaves past its end."""
    servers = [server(arm, target=target, flags=("--enable-streaming-session",)) for arm in ("plugin", "off")]
    for seed in range(13, 17):
        asked = questions(5, target=target, seed=seed)
        said = [say_in_turns(s, asked, streaming=True) for s in servers]
        assert said[0] == said[1]
        assert said[0].count(200) == 7


@pytest.mark.full
@pytest.mark.parametrize("target", ["hybrid", "dense"])
def test_a_prompt_of_embeddings(server: Callable, questions: Callable, reference: Callable, target: str) -> None:
    """The draft's context is what the target makes of them, whatever they are."""
    served = server(target=target, flags=("--disable-radix-cache",))
    model = AutoModelForCausalLM.from_pretrained(PAIRS[target].target, dtype=torch.float32)
    for prompt in questions(4, target=target, seed=14):
        embeds = model.get_input_embeddings()(torch.tensor(prompt)).tolist()
        body = {"input_embeds": embeds, "sampling_params": {"temperature": 0, "max_new_tokens": MAX_NEW_TOKENS}}
        answer = post(served, "/generate", body).json()
        assert answer["output_ids"] == reference(prompt, MAX_NEW_TOKENS, target)
        assert answer["meta_info"]["spec_accept_length"] > 1


REFUSED_BY_SGLANG: dict[str, dict[str, Any]] = {
    "lora_path": {"lora_path": "x"},
    "session_params": {"session_params": {"id": "none"}},
    "watermark": {"watermark": {"enabled": True}},
    "beam_width": {"sampling_params": {"beam_width": 2}},
    "max_thinking_tokens": {"max_thinking_tokens": 4},
    "input_embeds": {"input_embeds": [[0.0] * 64] * 3},
}


@pytest.mark.parametrize("fields", REFUSED_BY_SGLANG.values(), ids=REFUSED_BY_SGLANG)
def test_what_the_server_was_not_started_for_is_refused_alike(
    ours: Server, off: Server, questions: Callable, fields: dict[str, Any]
) -> None:
    prompt = {} if "input_embeds" in fields else {"input_ids": questions(1)[0]}
    answers = [httpx.post(f"{s.url}/generate", json=prompt | fields, timeout=60) for s in (ours, off)]
    assert [answer.status_code for answer in answers] == [400, 400]
    assert all(answer.json()["error"]["message"] for answer in answers)


def test_logit_bias_changes_the_answer_as_without_speculation(ours: Server, off: Server, questions: Callable) -> None:
    for prompt in questions(3, seed=3):
        favoured = off.generate(prompt, max_new_tokens=4).token_ids[2]
        options = {"max_new_tokens": MAX_NEW_TOKENS, "logit_bias": {str(favoured): 3.0, "17": -100.0}}
        assert ours.generate(prompt, **options).token_ids == off.generate(prompt, **options).token_ids


@pytest.mark.parametrize(
    "rule", [{"regex": r"The sum is [0-9]{2,4}\. (Yes|No)"}, {"json_schema": '{"type": "object"}'}]
)
def test_a_grammar_holds_and_gives_the_same_text(
    ours: Server, off: Server, questions: Callable, rule: dict[str, str]
) -> None:
    for prompt in questions(3, seed=4):
        answers = [server.generate(prompt, max_new_tokens=24, **rule) for server in (ours, off)]
        assert answers[0].token_ids == answers[1].token_ids


@pytest.mark.full
def test_a_grammar_ends_an_answer_that_ignores_ends(ours: Server, off: Server, server: Callable) -> None:
    """SGLang's rule for speculation. Without it SGLang asks before the grammar has the token, and says one more."""
    stock = server("stock", flags=VARIANTS["hybrid"].flags)
    for rule in ("(yes|no)", "[0-9]{3}"):
        options = {"max_new_tokens": 17, "regex": rule, "ignore_eos": True}
        said, builtin, without = (one.generate([5, 6, 7], **options).token_ids for one in (ours, stock, off))
        assert said == builtin == without[:-1]


def test_greedy_sampled_and_constrained_requests_share_a_batch(ours: Server, off: Server, questions: Callable) -> None:
    prompts = questions(9, seed=6)
    mix = [{}, {"temperature": 0.8, "top_p": 0.9}, {"regex": "[a-z ]{12}"}]
    bodies = [{"max_new_tokens": 32, **mix[i % 3]} for i in range(9)]
    with ThreadPoolExecutor(len(prompts)) as pool:
        together = list(pool.map(lambda prompt, body: ours.generate(prompt, **body), prompts, bodies))
    for i, answer in enumerate(together):
        if i % 3 != 1:
            assert answer.token_ids == off.generate(prompts[i], **bodies[i]).token_ids


def test_logprobs_are_those_without_speculation(ours: Server, off: Server, questions: Callable) -> None:
    fields = {"return_logprob": True, "top_logprobs_num": 3, "logprob_start_len": 0, "token_ids_logprob": [5, 17]}
    for prompt in questions(3, seed=7):
        metas = [s.generate(prompt, fields=fields, max_new_tokens=MAX_NEW_TOKENS).meta for s in (ours, off)]
        ours_TL, off_TL = ([(token, logprob) for logprob, token, _ in meta["output_token_logprobs"]] for meta in metas)
        assert [token for token, _ in ours_TL] == [token for token, _ in off_TL]
        assert all(abs(a - b) < 1e-4 for (_, a), (_, b) in zip(ours_TL, off_TL, strict=True))
        for a, b in zip(*(meta["output_top_logprobs"] for meta in metas), strict=True):
            assert {token for _, token, _ in a} == {token for _, token, _ in b}
        for name in ("input_token_logprobs", "input_token_ids_logprobs", "output_token_ids_logprobs"):
            assert flat(metas[0][name]) == pytest.approx(flat(metas[1][name]), abs=1e-4), name


def flat(entries: list[Any]) -> list[float]:
    """Every logprob and every token of a nested list of entries; the first prompt token has no logprob."""
    return [x for entry in entries for x in (flat(entry) if isinstance(entry, list) else [entry]) if x is not None]


def test_sampled_tokens_follow_the_target_s_distribution(ours: Server, off: Server, questions: Callable) -> None:
    """The first decoded token after the prompt's own, over many draws, on and off: within 5 standard errors."""
    (prompt,) = questions(1, seed=8)
    n, options = 400, {"temperature": 1.5, "top_p": 0.95, "max_new_tokens": 3}
    counts = []
    for s in (ours, off):
        answers = s.generate_many([prompt] * n, concurrency=8, **options)
        counts.append(Counter(tuple(answer.token_ids[:3]) for answer in answers))
    for outcome in counts[0] | counts[1]:
        a, b = counts[0][outcome] / n, counts[1][outcome] / n
        pooled = (a + b) / 2
        assert abs(a - b) <= 5 * math.sqrt(2 * pooled * (1 - pooled) / n), (outcome, a, b)
    assert len(counts[1]) > 3, "the draws show no randomness; this test could not fail"
