"""Helpers for requests: prompts of conversations, concurrent requests, streams, weight pushes, steps of an answer."""

import base64
import json
import pickle
import socket
from collections.abc import Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import cache
from random import Random
from typing import Any

import httpx

from sglang_dflash.pairs.servers.ports import HOST
from sglang_dflash.pairs.servers.server import REQUEST_TIMEOUT_S, Generation, Server
from sglang_dflash.pairs.tiny.corpus import draw
from sglang_dflash.pairs.tiny.pairs import DENSE, HYBRID

Message = dict[str, str]
LOGPROBS = {"return_logprob": True}  # fields of a request that asks for log probabilities
# Largest allowed difference of two log probabilities. Rounding caused up to 4e-6.
TOLERANCE = 2e-5


@cache
def tokenizer(target: str = "hybrid") -> Any:
    # Imported late: `transformers` imports Triton, and tests/kernels/conftest.py must set TRITON_INTERPRET before.
    from transformers import AutoTokenizer

    return AutoTokenizer.from_pretrained({"hybrid": HYBRID, "dense": DENSE}[target].target)


def token_ids(text: str, target: str = "hybrid") -> list[int]:
    return tokenizer(target).encode(text, add_special_tokens=False)


def conversation(seed: int, n_turns: int) -> list[Message]:
    """Return `n_turns` held-out questions, all but the last one answered."""
    random = Random(seed)
    messages = []
    for _ in range(n_turns):
        exchange = draw(random, held_out=True)
        messages += [{"role": "user", "content": exchange.prompt}, {"role": "assistant", "content": exchange.answer}]
    return messages[:-1]


def as_prompt(messages: Sequence[Message], target: str = "hybrid") -> list[int]:
    return tokenizer(target).apply_chat_template(list(messages), add_generation_prompt=True, return_dict=False)


def chat(question: str, target: str = "hybrid") -> list[int]:
    return as_prompt([{"role": "user", "content": question}], target)


def as_text(token_ids: Sequence[int], target: str = "hybrid") -> str:
    return tokenizer(target).decode(list(token_ids), skip_special_tokens=True)


def tokens_of(answers: Iterable[Generation]) -> list[list[int]]:
    return [answer.token_ids for answer in answers]


def logprobs_of(answer: Generation) -> list[float]:
    return [logprob for logprob, *_ in answer.meta["output_token_logprobs"]]


def worst(found: Sequence[float], expected: Sequence[float]) -> tuple[float, int]:
    """Return the largest difference of two lists of log probabilities, and its index."""
    return max((abs(a - b), i) for i, (a, b) in enumerate(zip(found, expected, strict=True)))


def require_same_logprobs(found: Generation, expected: Generation) -> None:
    """Require equal log probabilities, because a small error of a cached state or of K/V changes hardly any token."""
    error, i = worst(logprobs_of(found), logprobs_of(expected))
    assert error <= TOLERANCE, f"the log probability of token {i} differs by {error:.1e}"


def steps(answer: Generation) -> dict[int, int]:
    """Return n -> number of decode steps that accepted n drafts; {} if the prefill gave the only token."""
    return {n: count for n, count in enumerate(answer.meta.get("spec_correct_drafts_histogram", ())) if count}


def post(server: Server, path: str, body: dict[str, Any] | None = None) -> httpx.Response:
    return httpx.post(f"{server.url}{path}", json=body or {}, timeout=REQUEST_TIMEOUT_S)


def push(server: Server, tensors: dict[str, Any], **options: Any) -> httpx.Response:
    body = {"serialized_named_tensors": [base64.b64encode(pickle.dumps(list(tensors.items()))).decode()], **options}
    assert post(server, "/begin_weight_update").status_code == 200
    answer = post(server, "/update_weights_from_tensor", body)
    assert post(server, "/end_weight_update").status_code == 200
    return answer


def together(server: Server, requests: Sequence[tuple[list[int], dict[str, Any]]], n: int = 8) -> list[Generation]:
    """Return answers to prompts with their own options, `n` at a time."""
    with ThreadPoolExecutor(n) as pool:
        return list(pool.map(lambda request: server.generate(request[0], **request[1]), requests))


def stream(
    server: Server, prompt: Sequence[int], *, fields: dict[str, Any] | None = None, **sampling: Any
) -> Iterator[Generation]:
    """Yield the answer so far after each streamed chunk; closing the iterator disconnects."""
    body = {
        "input_ids": list(prompt),
        "stream": True,
        "sampling_params": {"temperature": 0} | sampling,
        **(fields or {}),
    }
    with httpx.stream("POST", f"{server.url}/generate", json=body, timeout=REQUEST_TIMEOUT_S) as response:
        for line in response.iter_lines():
            if line.startswith("data: {"):
                chunk = json.loads(line.removeprefix("data: "))
                yield Generation(chunk["output_ids"], chunk["text"], chunk["meta_info"])


def ask_and_never_read(server: Server, prompt: Sequence[int], **sampling: Any) -> socket.socket:
    """Request a stream and return its connection without reading; the reply fills the kernel's socket buffers."""
    body = json.dumps({"input_ids": list(prompt), "stream": True, "sampling_params": {"temperature": 0} | sampling})
    head = f"POST /generate HTTP/1.1\r\nHost: {HOST}\r\nContent-Type: application/json\r\n"
    connection = socket.create_connection((HOST, server.port), timeout=REQUEST_TIMEOUT_S)
    connection.sendall(f"{head}Content-Length: {len(body)}\r\n\r\n{body}".encode())
    return connection
