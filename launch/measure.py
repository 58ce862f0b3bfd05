"""Runs over prompts that are token ids, through SGLang's own `/generate`: what the repository's benchmarks measure."""

import json
import time
from collections.abc import Callable, Sequence
from typing import Any

import httpx

from sglang_dflash.bench.chat import steps_of
from sglang_dflash.bench.errors import ServerError
from sglang_dflash.bench.measure import NAN, Answer, Run, timed
from sglang_dflash.bench.server import LIMITS, REQUEST_TIMEOUT_S, Server


def run(
    server: Server, prompts: Sequence[list[int]], *, concurrency: int, stream: bool = False, **sampling: Any
) -> Run:
    """Send every prompt, at most `concurrency` in flight, greedy; `sampling` is SGLang's (`max_new_tokens=128`, ...).

    The prefix cache is flushed first, so every prompt is computed in every run.
    """
    server.flush_cache()
    send = _streamed if stream else _unstreamed
    with httpx.Client(base_url=server.url, timeout=REQUEST_TIMEOUT_S, trust_env=False, limits=LIMITS) as http:

        def ask(prompt: list[int]) -> Callable[[], Answer]:
            body = {"input_ids": prompt, "sampling_params": {"temperature": 0.0} | sampling, "stream": stream}
            answer = send(http, body)
            return lambda: answer

        return timed(ask, prompts, concurrency=concurrency, processes=server.processes)


def _unstreamed(http: httpx.Client, body: dict[str, Any]) -> Answer:
    response = http.post("/generate", json=body)
    if response.status_code != 200:
        raise ServerError(f"/generate answered {response.status_code}: {response.text[:500]}")
    return _answer(response.json())


def _streamed(http: httpx.Client, body: dict[str, Any]) -> Answer:
    # Only the last event is parsed: each carries the whole answer so far, and reading them all would be timed.
    sent, first, last, event = time.perf_counter(), 0.0, 0.0, ""
    with http.stream("POST", "/generate", json=body) as response:
        if response.status_code != 200:
            raise ServerError(f"/generate answered {response.status_code}: {response.read()[:500]!r}")
        for line in response.iter_lines():
            if line.startswith("data: {"):
                last = time.perf_counter()
                first, event = first or last, line
    if not event:
        raise ServerError("/generate streamed no event; look at the server's log")
    answer = _answer(json.loads(event.removeprefix("data: ")))
    n_later = answer.n_tokens - 1
    return answer._replace(ttft_s=first - sent, tpot_s=(last - first) / n_later if n_later else NAN)


def _answer(result: dict[str, Any]) -> Answer:
    token_ids = tuple(result["output_ids"])
    return Answer(len(token_ids), token_ids, steps=steps_of(result["meta_info"], len(token_ids)))
