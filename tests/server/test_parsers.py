"""Reasoning tokens are counted as without speculation. Streamed tool calls equal those of an unstreamed answer.

Both must hold even if one streamed chunk has many tokens.
"""

import json
import re
from collections.abc import Callable
from typing import Any

import httpx
import pytest

from sglang_dflash.pairs.servers.server import Server
from tests.server.lib.talk import post
from tests.server.lib.variants import VARIANTS
from tests.tools.parameters import QUESTIONS
from tests.tools.tool_answers import WRITERS, Call

# With 40 tokens per streamed chunk, a chunk holds whole tool calls, as one decode step can.
PARSERS = ("--reasoning-parser", "qwen3", "--tool-call-parser", "qwen25", "--stream-interval", "40")
TOOLS = [{"type": "function", "function": {"name": name, "parameters": {"type": "object"}}} for name in "fg"]
CALLS: tuple[list[Call], ...] = (
    [("f", {})],
    [("f", {}), ("g", {"a": [1, "b"]})],
    [("f", {}), ("f", {}), ("g", {})],
    [("g", {}), ("f", {"a": {"b": True}}), ("g", {}), ("f", {})],
)


@pytest.fixture
def thinking(server: Callable) -> Server:
    return server(flags=[*VARIANTS["hybrid"].flags, *PARSERS])


def thoughts(server: Server, prompt: list[int], max_new_tokens: int, **sampling: Any) -> tuple[int, int, list[int]]:
    answer = server.generate(
        prompt, fields={"require_reasoning": True}, max_new_tokens=max_new_tokens, ignore_eos=True, **sampling
    )
    return answer.meta["reasoning_tokens"], answer.meta["completion_tokens"], answer.token_ids


def test_thoughts_are_counted_as_without_speculation(thinking: Server, server: Callable, questions: Callable) -> None:
    off = server("off", flags=PARSERS)
    for prompt in questions(3, seed=31):
        for n in (1, 2, 5, 11, 23):
            assert thoughts(thinking, prompt, n) == thoughts(off, prompt, n)
        assert thoughts(thinking, prompt, 40, stop=["the", "."]) == thoughts(off, prompt, 40, stop=["the", "."])
    message = [{"role": "user", "content": QUESTIONS[1]}]
    for n in (5, 9, 40):
        body = {"model": "default", "messages": message, "temperature": 0, "max_tokens": n}
        usages = [post(one, "/v1/chat/completions", body).json()["usage"] for one in (thinking, off)]
        assert usages[0]["reasoning_tokens"] == usages[1]["reasoning_tokens"] <= usages[0]["completion_tokens"]


def asked(calls: list[Call]) -> dict[str, Any]:
    """Return a request whose regex forces an answer with exactly these calls."""
    return {
        "model": "default",
        "messages": [{"role": "user", "content": "Call them."}],
        "tools": TOOLS,
        "regex": re.escape(WRITERS["qwen25"]("", calls)),
        "temperature": 0,
        "max_tokens": 600,
        "chat_template_kwargs": {"enable_thinking": False},
    }


def streamed(server: Server, request: dict[str, Any]) -> list[Call]:
    names, arguments = dict[int, str](), dict[int, str]()
    body = request | {"stream": True}
    with httpx.stream("POST", f"{server.url}/v1/chat/completions", json=body, timeout=120) as response:
        lines = [line.removeprefix("data: ") for line in response.iter_lines() if line.startswith("data: {")]
    for choice in (choice for line in lines for choice in json.loads(line)["choices"]):
        for part in choice["delta"].get("tool_calls") or []:
            i, function = part["index"], part["function"]
            names[i] = names.get(i, "") + (function["name"] or "")
            arguments[i] = arguments.get(i, "") + (function["arguments"] or "")
    return [(name, json.loads(arguments[i] or "{}")) for i, name in names.items()]


@pytest.mark.parametrize("calls", CALLS, ids=lambda calls: "".join(name for name, _ in calls))
def test_calls_of_a_stream_are_those_of_the_answer(thinking: Server, calls: list[Call]) -> None:
    request = asked(calls)
    message = post(thinking, "/v1/chat/completions", request).json()["choices"][0]["message"]
    whole = [(call["function"]["name"], json.loads(call["function"]["arguments"])) for call in message["tool_calls"]]
    assert whole == calls
    assert streamed(thinking, request) == calls


@pytest.mark.full
def test_calls_of_a_stream_from_one_of_several_processes(server: Callable) -> None:
    ours = server(
        flags=[*VARIANTS["hybrid"].flags, *PARSERS, "--tokenizer-worker-num", "2"],
        env={"SGLANG_UVICORN_WORKER_HEALTHCHECK_TIMEOUT": "300"},  # on few cores SGLang takes long to import
    )
    for _ in range(3):
        assert streamed(ours, asked(CALLS[-1])) == CALLS[-1]
