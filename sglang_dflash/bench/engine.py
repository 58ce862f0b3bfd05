"""Who answers: what every engine can do, and a server that runs somewhere and is asked over HTTP."""

import json
import re
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from typing import Any, Protocol

import httpx
import psutil

from sglang_dflash.bench.chat import Kind, Prompt, Sampling, TokenIds, ask, ask_streamed, refusal
from sglang_dflash.bench.measure import Answer, Steps
from sglang_dflash.servers.errors import ServerError
from sglang_dflash.servers.server import LIMITS

# An answer of thousands of tokens from a server that is full takes minutes; an hour means that it hangs.
TIMEOUT_S = 3600.0
Processes = Callable[[], Sequence[psutil.Process]]


class Engine(Protocol):
    """One arm of a benchmark."""

    @property
    def name(self) -> str:
        """Of the arm."""

    @property
    def kind(self) -> str:
        """Whose engine it is: answers of one kind are compared by token ids, of two kinds by text."""

    @property
    def processes(self) -> Processes | None:
        """Those it runs in; None where they are not known here."""

    def running(self) -> AbstractContextManager[None]:
        """The arm can be asked inside; what it shares a machine with is left alone outside."""

    def flush(self) -> bool:
        """Empty the prefix cache; False where nothing is known to do it."""

    def ask(self, prompt: Prompt, sampling: Sampling, *, stream: bool) -> Callable[[], Answer]:
        """Returns when the answer has come; what it returns reads it."""

    def likeliest(self, context: Sequence[int]) -> Sequence[tuple[float, int]]:
        """The two likeliest tokens after `context`, by log-probability; none where the engine does not tell."""

    def counted(self) -> Steps | None:
        """Steps since the engine started; None where the engine does not count them for all requests together."""

    def widths(self) -> dict[str, int] | None:
        """Steps by width since the engine started; None where it does not tell."""

    def describe(self) -> dict[str, Any]:
        """What it is and how it was started, for the document."""


class HttpEngine:
    """A server with the OpenAI API at a URL."""

    def __init__(self, name: str, url: str, *, model: str = "", api_key: str = "none") -> None:
        """`model`: empty for the first one the server lists."""
        self.name, self.model = name, model
        self.url = url.rstrip("/").removesuffix("/v1")
        self.kind = Kind.OTHER
        self.http = httpx.Client(
            base_url=self.url,
            timeout=TIMEOUT_S,
            trust_env=False,
            headers={"Authorization": f"Bearer {api_key}"},
            limits=LIMITS,
        )

    @property
    def processes(self) -> Processes | None:
        return None

    @contextmanager
    def running(self) -> Iterator[None]:
        yield

    def meet(self, expected: Kind | None = None) -> None:
        """Find out whose server it is, and which model it serves.

        Raises:
            ServerError: no server answers, the server is not of the expected kind, or lacks the model.
        """
        try:
            self.kind = self._whose()
            models = self._get("/v1/models")
        except httpx.TransportError as error:
            raise ServerError(
                f"{self.name}: no server answers at {self.url} ({error}); start the server first"
            ) from error
        if expected is not None and self.kind is not expected:
            raise ServerError(f"{self.name}: {self.url} is no {expected} server; drop --backend, or name that server")
        if models is None:
            raise ServerError(f"{self.name}: {self.url} has no /v1/models; give the URL of an OpenAI-compatible server")
        served = [model["id"] for model in models["data"]]
        self.model = self.model or served[0]
        if self.model not in served:
            raise ServerError(f"{self.name}: {self.url} serves {', '.join(served)}, not {self.model}; mend --model")

    def flush(self) -> bool:
        if self.kind is not Kind.SGLANG:
            return False
        response = self.http.post("/flush_cache?timeout=30")
        if response.status_code != 200:
            raise ServerError(f"{self.name}: {refusal(self.http, response)}")
        return True

    def ask(self, prompt: Prompt, sampling: Sampling, *, stream: bool) -> Callable[[], Answer]:
        if isinstance(prompt, TokenIds) and self.kind is not Kind.SGLANG:
            raise ServerError(f"{self.name}: {self.url} takes no token ids in a chat; drop that set of prompts")
        body = sampling.body(self.model, prompt)
        return ask_streamed(self.http, body) if stream else ask(self.http, self.kind, body)

    def likeliest(self, context: Sequence[int]) -> Sequence[tuple[float, int]]:
        if self.kind is not Kind.SGLANG:
            return ()
        sampling = {"temperature": 0.0, "max_new_tokens": 1}
        body = {"input_ids": list(context), "sampling_params": sampling, "return_logprob": True, "top_logprobs_num": 2}
        response = self.http.post("/generate", json=body)
        if response.status_code != 200:
            raise ServerError(f"{self.name}: {refusal(self.http, response)}")
        return [(logprob, token) for logprob, token, _ in response.json()["meta_info"]["output_top_logprobs"][0]]

    def counted(self) -> Steps | None:
        return vllm_steps(self.http.get("/metrics").text) if self.kind is Kind.VLLM else None

    def widths(self) -> dict[str, int] | None:
        dflash = self._internal_state().get("dflash")
        return dflash["width"]["n_steps"] if dflash else None

    def describe(self) -> dict[str, Any]:
        return {"url": self.url, "kind": str(self.kind), "model": self.model} | self._told()

    def _told(self) -> dict[str, Any]:
        """What the server says of itself."""
        if self.kind is Kind.OTHER:
            return {}
        if self.kind is Kind.VLLM:
            return {"version": (self._get("/version") or {}).get("version")}
        told = self._get("/server_info") or {}
        wanted = ("version", "speculative_algorithm", "speculative_num_draft_tokens", "attention_backend", "dtype")
        dflash = self._internal_state().get("dflash", {})
        ours = {"sglang_dflash": dflash["version"], "width": dflash["width"]["policy"]} if dflash else {}
        return {name: told[name] for name in wanted if told.get(name) is not None} | ours

    def _internal_state(self) -> dict[str, Any]:
        told = self._get("/server_info") if self.kind is Kind.SGLANG else None
        return (told or {}).get("internal_states", [{}])[0]

    def _whose(self) -> Kind:
        if "internal_states" in (self._get("/server_info") or {}):
            return Kind.SGLANG
        return Kind.VLLM if set(self._get("/version") or {}) == {"version"} else Kind.OTHER

    def _get(self, path: str) -> dict[str, Any] | None:
        """The JSON object at `path`; None where there is none."""
        response = self.http.get(path)
        if response.status_code in (401, 403):
            raise ServerError(f"{self.name}: {self.url} wants a key and took none of ours; give it with --api-key")
        if response.status_code != 200:
            return None
        try:
            found = response.json()
        except json.JSONDecodeError:
            return None
        return found if isinstance(found, dict) else None


# vLLM's Prometheus counters, up to the labels.
STEPS = "vllm:spec_decode_num_drafts_total"
ACCEPTED = "vllm:spec_decode_num_accepted_tokens_total"
ACCEPTED_AT = "vllm:spec_decode_num_accepted_tokens_per_pos_total"


def vllm_steps(metrics: str) -> Steps | None:
    """vLLM's own account, summed over its engines; None without speculation."""
    values: dict[str, float] = {}
    for name, labels, value in re.findall(r"^([\w:]+)(\{[^}]*\})? (\S+)$", metrics, re.MULTILINE):
        position = re.search(r'position="(\d+)"', labels)
        key = name + (f" {position[1]}" if position else "")
        values[key] = values.get(key, 0.0) + float(value)
    if STEPS not in values:
        return None
    reached_D = list[int]()
    while (key := f"{ACCEPTED_AT} {len(reached_D)}") in values:
        reached_D.append(int(values[key]))
    return Steps(int(values[STEPS]), int(values[ACCEPTED]), tuple(reached_D))
