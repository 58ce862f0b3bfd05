"""Random requests, valid and invalid, for two servers that must answer alike. Hypothesis draws and shrinks them.

A request is drawn field by field. Its sampling parameters are one group of fields, all other fields another. In one of
four draws of a group, a value of `ODD` replaces one value; most of `ODD` is invalid. Some prompts and fields are
invalid too (`odd_prompts`, `ODD_FIELDS`). One to eight requests are sent at once, so that they share batches.
"""

import json
from concurrent.futures import ThreadPoolExecutor
from typing import Any, NamedTuple

import httpx
from hypothesis import strategies as st

from sglang_dflash.pairs.servers.server import Server

MAX_NEW_TOKENS = 24
TIMEOUT_S = 120.0
TEMPERATURES = [0, 0.7, 1.5]
CONTEXT_ATOL = 2e-3  # for log-probabilities: a prompt read in one prefill or in two is rounded differently
GRAMMARS = {
    "regex": ["(yes|no)", "[a-z]{3,9}", r"\d{2}-\d{2}", "a*"],
    "json_schema": [
        '{"type": "object", "properties": {"a": {"type": "integer"}}, "required": ["a"]}',
        '{"enum": ["red", "green"]}',
        '{"type": "array", "items": {"type": "boolean"}, "maxItems": 3}',
    ],
    "ebnf": ['root ::= "x" [a-f]+', 'root ::= ("yes" | "no") "!"'],
    "structural_tag": ['{"type": "structural_tag", "format": {"type": "const_string", "value": "ok"}}'],
}
STOPS = ["e", "the ", "\n", '"', "0", "é", "a b c", "<|im_end|>", "�", "ab" * 40]


class Request(NamedTuple):
    path: str
    body: dict[str, Any]

    @property
    def asked(self) -> Any:
        """Sampling parameters: a dictionary, unless a value of `ODD` replaced it."""
        return self.body.get("sampling_params", self.body)

    @property
    def is_greedy(self) -> bool:
        if not isinstance(self.asked, dict):
            return False
        temperature = self.asked.get("temperature")
        # At temperature 1e308 (`ODD`) top_k 1 is not greedy: all probabilities are equal, so the batch decides.
        return temperature == 0 or (self.asked.get("top_k") == 1 and temperature in TEMPERATURES)

    @property
    def has_independent_logprobs(self) -> bool:
        """True if log-probabilities do not depend on other requests of the batch.

        SGLang divides logits by the temperatures (1 instead of 0) only if the batch has a request with temperature > 0.
        """
        return self.is_greedy and self.asked["temperature"] == 0


class Outcome(NamedTuple):
    """Status, and one answer per choice: (tokens or text, finish reason, log-probabilities)."""

    status: int
    answers: list[tuple[Any, Any, list[float]]]
    text: str  # body of the reply, shown if outcomes differ


# -- drawing requests ----------------------------------------------------------------------------------------------

ODD: tuple[Any, ...] = (
    None, True, -1, 0, 1.5, 2**31, 2**40, 2**63, 2**70, -(2**63), 1e308, -1e308, 1e-320, "", "many", [], [[]], {}, [-1],
)  # fmt: skip
odd = st.sampled_from(ODD)
token = st.integers(1, 1023)  # without 0, the padding token: its embedding is zero, after which all logits tie
short = st.lists(token, min_size=1, max_size=40)
words = st.one_of(
    st.sampled_from(["Spell the words candle and castle.", "apple " * 30, "7 x 8 ="]),
    st.text(st.characters(exclude_categories=["Cs"]), min_size=1, max_size=60),
)


def one_in(draw: st.DrawFn, n: int) -> bool:
    """Draw True with probability 1/n; False is simpler, so hypothesis shrinks towards it."""
    return draw(st.integers(1, n)) == n


def mapping(required: dict[str, Any], optional: dict[str, Any]) -> st.SearchStrategy[dict[str, Any]]:
    return st.fixed_dictionaries(required, optional=optional)


SAMPLING = {
    "top_k": st.sampled_from([-1, 1, 2, 40, 2**31 - 1]),
    "top_p": st.sampled_from([0.1, 0.9, 1.0]),
    "min_p": st.sampled_from([0.0, 0.05, 0.5]),
    "frequency_penalty": st.sampled_from([-2.0, 0.3, 2.0]),
    "presence_penalty": st.sampled_from([-2.0, 0.3, 2.0]),
    "repetition_penalty": st.sampled_from([0.5, 1.0, 1.3, 2.0]),
    "min_new_tokens": st.integers(0, 8),
    "stop": st.one_of(st.sampled_from(STOPS), st.lists(st.sampled_from(STOPS), max_size=4)),
    "stop_token_ids": st.lists(st.integers(-2, 1100), max_size=4),
    "stop_regex": st.sampled_from(["e.", r"\d\d", "^x$"]),
    "ignore_eos": st.booleans(),
    "skip_special_tokens": st.booleans(),
    "spaces_between_special_tokens": st.booleans(),
    "no_stop_trim": st.booleans(),
    "logit_bias": st.dictionaries(token.map(str), st.sampled_from([-100.0, -1.0, 2.0, 100.0]), max_size=4),
    "n": st.integers(1, 3),
    "sampling_seed": st.integers(-(2**63), 2**63 - 1),
    "custom_params": st.just({"a": 1}),
}
FIELDS = {
    "return_logprob": st.booleans(),
    "top_logprobs_num": st.sampled_from([0, 1, 5, 1024]),
    "return_text_in_logprobs": st.booleans(),
    "return_hidden_states": st.just(False),
    "session_params": st.just({}),
    "priority": st.integers(-5, 5),
    "extra_key": st.sampled_from(["a", ""]),
    "bootstrap_room": st.integers(0, 5),
    "routed_experts_start_len": st.integers(-2, 5),
}
# Fields whose values are mostly refused, some only in combination with another field.
ODD_FIELDS = {
    "logprob_start_len": st.integers(-3, 12),
    "top_logprobs_num": st.integers(1020, 1030),
    "token_ids_logprob": st.lists(st.integers(-1, 1030), max_size=5),
    "return_hidden_states": st.booleans(),
    "lora_path": st.just("none-such"),
    "session_params": st.sampled_from([{"id": "none-such"}, {"id": None, "offset": -5}]),
    "image_data": st.sampled_from(["garbage", "data:image/png;base64,AAAA", [], ["a", "b"]]),
    "input_embeds": st.sampled_from([[], [[0.5]], [[0.5] * 128]]),
    "data_parallel_rank": st.integers(-1, 1),
    "custom_logit_processor": st.just("garbage"),
    "multi_item_delimiter_indices": st.lists(st.integers(-1, 50), max_size=2),
    "positional_embed_overrides": st.just({"a": 1}),
    "token_type_ids": st.lists(st.integers(0, 1), max_size=3),
    "max_thinking_tokens": st.integers(-1, 5),
}
OPENAI = {
    "n": st.integers(1, 2),
    "seed": st.integers(-(2**63), 2**63 - 1),
    **{name: SAMPLING[name] for name in ("stop", "logit_bias", "presence_penalty", "frequency_penalty", "top_p")},
    "ignore_eos": st.booleans(),
    "min_tokens": st.integers(0, 8),
    "echo": st.booleans(),
    "user": st.text(max_size=5),
}
temperature = st.sampled_from([0, 0, *TEMPERATURES])


@st.composite
def sampling(draw: st.DrawFn) -> dict[str, Any]:
    length = st.integers(0, MAX_NEW_TOKENS)
    chosen = draw(mapping({"temperature": temperature, "max_new_tokens": length}, SAMPLING))
    if one_in(draw, 4):
        kind = draw(st.sampled_from(sorted(GRAMMARS)))
        chosen[kind] = draw(st.sampled_from(GRAMMARS[kind]))
        for name in ("ignore_eos", "min_new_tokens"):  # neither works with a complete grammar: docs/exactness.md
            chosen.pop(name, None)
    return chosen


@st.composite
def with_odd_value(draw: st.DrawFn, fields: dict[str, Any]) -> dict[str, Any]:
    """Replace the value of one field by one of `ODD`, in one of four draws."""
    if fields and one_in(draw, 4):
        fields = fields | {draw(st.sampled_from(sorted(fields))): draw(odd)}
    return fields


prompts = st.one_of(
    short.map(lambda ids: {"input_ids": ids}),
    words.map(lambda text: {"text": text}),
    st.lists(short, min_size=1, max_size=3).map(lambda ids: {"input_ids": ids}),
)
odd_prompts = st.one_of(
    st.lists(st.integers(-1, 1100).filter(bool), max_size=4).map(lambda ids: {"input_ids": ids}), st.just({"text": ""})
)


@st.composite
def generate(draw: st.DrawFn) -> Request:
    """Draw a `/generate` request: one in six has a prompt of `odd_prompts`, one in four a field of `ODD_FIELDS`."""
    body = draw(odd_prompts if one_in(draw, 6) else prompts)
    asked = draw(sampling().flatmap(with_odd_value))
    few = {name: FIELDS[name] for name in draw(st.lists(st.sampled_from(sorted(FIELDS)), max_size=3, unique=True))}
    if one_in(draw, 4):
        name = draw(st.sampled_from(sorted(ODD_FIELDS)))
        few[name] = ODD_FIELDS[name]
    fields = draw(mapping(few, {}).flatmap(with_odd_value))
    return Request("/generate", body | {"sampling_params": asked} | fields)


@st.composite
def openai(draw: st.DrawFn) -> Request:
    length = st.integers(0, MAX_NEW_TOKENS)
    body = draw(mapping({"temperature": temperature, "max_tokens": length}, OPENAI).flatmap(with_odd_value))
    body["model"] = "tiny"
    if draw(st.booleans()):
        return Request("/v1/chat/completions", body | {"messages": [{"role": "user", "content": draw(words)}]})
    return Request("/v1/completions", body | {"prompt": draw(st.one_of(words, short, st.lists(words, max_size=2)))})


requests = st.one_of(generate(), generate(), openai())
neighbours = st.lists(requests, min_size=1, max_size=8)


# -- comparing answers ---------------------------------------------------------------------------------------------


def send(server: Server, request: Request) -> Outcome:
    content = json.dumps(request.body).encode()
    headers = {"Content-Type": "application/json"}
    reply = httpx.post(f"{server.url}{request.path}", content=content, headers=headers, timeout=TIMEOUT_S)
    if reply.status_code != 200:
        return Outcome(reply.status_code, [], reply.text)
    body = reply.json()
    if request.path == "/generate":
        answers = [outcome_of(answer) for answer in (body if isinstance(body, list) else [body])]
    else:
        answers = [(choice.get("message") or choice["text"], choice["finish_reason"], []) for choice in body["choices"]]
    return Outcome(200, answers, reply.text)


def outcome_of(answer: dict[str, Any]) -> tuple[Any, Any, list[float]]:
    meta = answer["meta_info"]
    scores = [score for score, *_ in meta.get("output_token_logprobs") or []]
    return answer["output_ids"], meta["finish_reason"], scores


def difference(request: Request, off: Outcome, ours: Outcome) -> str:
    """Describe the difference of two outcomes, or return "". Answers are compared only if the request is greedy."""
    if off.status != ours.status:
        return f"status {off.status} without speculation, {ours.status} with it: {ours.text[:300]}"
    if len(off.answers) != len(ours.answers):
        return f"{len(off.answers)} answers without speculation, {len(ours.answers)} with it"
    if not request.is_greedy:
        return ""
    for (tokens, end, scores), (our_tokens, our_end, our_scores) in zip(off.answers, ours.answers, strict=True):
        if (tokens, end) != (our_tokens, our_end):
            return f"{tokens} {end} without speculation, {our_tokens} {our_end} with it"
        if not tokens:  # max_new_tokens 0: with speculation SGLang returns a log-probability without a token
            continue
        if len(scores) != len(our_scores):
            return f"{len(scores)} log-probabilities without speculation, {len(our_scores)} with it"
        pairs = zip(scores, our_scores, strict=True)
        if request.has_independent_logprobs and any(abs(a - b) > CONTEXT_ATOL for a, b in pairs if a != b):
            return f"log-probabilities {scores} without speculation, {our_scores} with it"
    return ""


def differences(off: Server, ours: Server, sent: list[Request]) -> list[str]:
    """Send all requests at once to one server, then to the other; return the differences."""
    with ThreadPoolExecutor(len(sent)) as pool:
        outcomes_off, outcomes_ours = (list(pool.map(lambda one, to=to: send(to, one), sent)) for to in (off, ours))
    found = (
        (difference(request, *pair), request) for request, *pair in zip(sent, outcomes_off, outcomes_ours, strict=True)
    )
    return [f"{request.path} {json.dumps(request.body)}: {text}" for text, request in found if text]
