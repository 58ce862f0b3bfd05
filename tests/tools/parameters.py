"""Table of request parameters, and functions that send requests and read their answers.

Token ids are those of the tiny pair's tokenizer.
"""

import json
import os
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from itertools import pairwise
from pathlib import Path
from random import Random
from typing import Any, NamedTuple

import httpx

from sglang_dflash.pairs.servers.errors import ServerError
from sglang_dflash.pairs.servers.server import REQUEST_TIMEOUT_S, Server
from sglang_dflash.tools.prove import distribution
from tests.server.lib.talk import chat, token_ids

# The tiny pair was trained on questions like some of these, so drafts are accepted. For the others the next tokens are
# uncertain, so parameters change the answer.
QUESTIONS = (
    "Tell a short story about Anna, a driver in Oslo.",
    "How much is 527 plus 244?",
    "Tell me about the weather and the sea.",
    "Tell me the capitals of Vietnam and Cuba.",
    "Who is the largest person in France?",
    "Define a Animal class in Python that has size and age.",
    "Count apples, boxes and stones.",
    "Put 80, 43, 4, 62, 81 in order from small to large.",
)
MAX_NEW_TOKENS = 48
NEWLINE, COMMA, FULL_STOP, ONE, COLON, EQUALS, END = 202, 15, 17, 20, 29, 278, 2
ONE_DAY = 872  # " One"

# SGLang takes a logits processor as a pickled class. Pickle's opcode `c` (module, name) refers to a class; `.` ends.
BAN_TOKENS = json.dumps(
    {"callable": b"csglang.srt.sampling.custom_logit_processor\nDisallowedTokensLogitsProcessor\n.".hex()}
)
# Without these flags SGLang refuses requests with a processor or for hidden states.
REQUEST_FLAGS = ("--enable-custom-logit-processor", "--enable-return-hidden-states")
# Flags of the server without speculation. Under the overlap schedule SGLang 0.5.23 computes wrong penalties: it counts
# output one token late, starting with the prompt's last token.
REFERENCE_FLAGS = (*REQUEST_FLAGS, "--disable-overlap-schedule")
STAND_INS = Path(__file__).parent / "stand_ins"
AFTER_LOADING = Path(__file__).parent / "after_loading"

PERSON = json.dumps(
    {
        "type": "object",
        "properties": {"name": {"type": "string", "maxLength": 12}, "age": {"type": "integer"}},
        "required": ["name", "age"],
    }
)
NUMBERS = json.dumps({"type": "array", "items": {"type": "integer"}, "minItems": 3, "maxItems": 8})
YES_NO = 'root ::= ("yes" | "no") (" and " ("yes" | "no"))*'
SUM = 'root ::= number (" + " number)+ " = " number\nnumber ::= [0-9]+'


class Case(NamedTuple):
    """One set of request parameters."""

    row: str  # row in the table of exactness.md
    name: str
    sampling: Mapping[str, Any] = {}  # sampling parameters
    fields: Mapping[str, Any] = {}  # other fields of the request
    # Least number of QUESTIONS whose answer must differ from the plain answer, or the case tests nothing.
    bites: int = 0

    def __str__(self) -> str:
        return self.name


def greedy(row: str, name: str, bites: int, **sampling: Any) -> Case:
    return Case(row, name, sampling, {}, bites)


def asking(row: str, name: str, **fields: Any) -> Case:
    return Case(row, name, {}, fields)


def processor(name: str, bites: int, *banned: int, **sampling: Any) -> Case:
    sampling |= {"custom_params": {"token_ids": list(banned)}}
    return Case("custom_logit_processor", name, sampling, {"custom_logit_processor": BAN_TOKENS}, bites)


PLAIN = Case("temperature 0", "plain")
# At temperature 0, in fp32, answers must equal those without speculation, token for token.
GREEDY = (
    PLAIN,
    greedy("frequency_penalty", "frequency +1.2", 2, frequency_penalty=1.2),
    greedy("frequency_penalty", "frequency +2", 3, frequency_penalty=2.0),
    greedy("frequency_penalty", "frequency -0.8", 2, frequency_penalty=-0.8),
    greedy("presence_penalty", "presence +1.4", 1, presence_penalty=1.4),
    greedy("presence_penalty", "presence +2", 2, presence_penalty=2.0),
    greedy("presence_penalty", "presence -1.5", 2, presence_penalty=-1.5),
    greedy("repetition_penalty", "repetition 1.3", 2, repetition_penalty=1.3),
    greedy("repetition_penalty", "repetition 2", 4, repetition_penalty=2.0),
    greedy("repetition_penalty", "repetition 0.7", 3, repetition_penalty=0.7),
    greedy("penalties mixed", "frequency + presence", 3, frequency_penalty=1.5, presence_penalty=1.0),
    greedy("penalties mixed", "presence - repetition", 3, presence_penalty=-0.9, repetition_penalty=1.3),
    greedy(
        "penalties mixed", "all three and min_new_tokens", 5,
        frequency_penalty=0.6, presence_penalty=0.4, repetition_penalty=1.2, min_new_tokens=40,
    ),
    greedy("min_new_tokens", "min_new_tokens past the end", 2, min_new_tokens=MAX_NEW_TOKENS),
    greedy("min_new_tokens", "min_new_tokens with stop ids", 5, min_new_tokens=12, stop_token_ids=[FULL_STOP, COMMA]),
    greedy(
        "min_new_tokens", "min_new_tokens past a stop string", 5, min_new_tokens=20, stop=["."], stop_token_ids=[COLON]
    ),
    greedy("logit_bias", "two tokens banned", 5, logit_bias={str(NEWLINE): -100.0, str(COMMA): -100.0}),
    greedy("logit_bias", "one token pushed", 4, logit_bias={str(ONE): 6.0}),
    greedy("logit_bias", "the end pushed, one banned", 3, logit_bias={str(END): 8.0, str(FULL_STOP): -5.0}),
    greedy("logit_bias", "one token forced", 8, logit_bias={str(EQUALS): 100.0}),
    greedy("regex", "regex of fixed length", 8, regex=r"The sum is [0-9]{2,4}\. (Yes|No)"),
    greedy("regex", "regex without end", 7, regex=r"([a-z]+ )+[a-z]+\."),
    greedy("regex", "regex that most answers fit", 1, regex=r"[A-Za-z0-9 ,.:+=\n-]*"),
    greedy("json_schema", "object", 7, json_schema=PERSON),
    greedy("json_schema", "array", 7, json_schema=NUMBERS),
    greedy("ebnf", "yes and no", 8, ebnf=YES_NO),
    greedy("ebnf", "a sum", 7, ebnf=SUM),
    greedy("stop", "one stop string", 5, stop="."),
    greedy("stop", "a stop string kept", 4, stop=["is"], no_stop_trim=True),
    greedy("stop", "stop by regex", 3, stop_regex=["[0-9]+ "]),
    greedy("several stops at once", "stop strings, the later one named first", 5, stop=["\n", ",", " is ", " a"]),
    greedy("several stops at once", "a stop string past the limit", 8, stop=["\n", ",", "."], max_new_tokens=4),
    greedy("several stops at once", "a stop string past a stop id", 3, stop=["\n", " is"], stop_token_ids=[29, 15]),
    greedy("stop_token_ids", "stop ids", 5, stop_token_ids=[COMMA, COLON, EQUALS]),
    greedy("ignore_eos", "ignore_eos", 2, ignore_eos=True),
    greedy("ignore_eos", "ignore_eos and a stop id", 2, ignore_eos=True, stop_token_ids=[FULL_STOP]),
    greedy("n > 1", "n = 2", 0, n=2),
    greedy("mixes", "n = 2 with penalties", 3, n=2, frequency_penalty=2.0),
    processor("a processor that bans tokens", 5, NEWLINE, COMMA, COLON),
    processor("a processor and penalties", 5, NEWLINE, COMMA, COLON, presence_penalty=0.6)._replace(row="mixes"),
    greedy("mixes", "bias + grammar", 7, regex=r"[a-z ,.]{10,30}", logit_bias={str(COMMA): 3.0}),
    greedy("mixes", "penalties + grammar", 7, regex=r"([a-z]+ )+[a-z]+\.", frequency_penalty=0.6),
    greedy(
        "mixes", "penalties + bias + stop", 5,
        repetition_penalty=1.2, logit_bias={str(NEWLINE): 2.0}, stop=["."], min_new_tokens=6,
    ),
    greedy("mixes", "min_new_tokens + ignore_eos + bias", 3, min_new_tokens=30, ignore_eos=True, logit_bias={"20": 6}),
)  # fmt: skip
# Tokens and logprobs must equal those without speculation.
LOGPROBS = (
    asking("logprobs", "logprobs", return_logprob=True),
    asking("top_logprobs", "top 4 logprobs", return_logprob=True, top_logprobs_num=4),
    asking("top_logprobs", "logprobs of given tokens", return_logprob=True, token_ids_logprob=[NEWLINE, COMMA, END]),
    asking("top_logprobs", "top logprobs under a bias", return_logprob=True, top_logprobs_num=3)._replace(
        sampling={"logit_bias": {str(NEWLINE): -100.0, str(ONE): 4.0}}, bites=5
    ),
    asking("mixes", "top logprobs under penalties", return_logprob=True, top_logprobs_num=3)._replace(
        sampling={"frequency_penalty": 2.0}, bites=3
    ),
    asking(
        "prompt logprobs", "prompt logprobs",
        return_logprob=True, top_logprobs_num=2, logprob_start_len=0, token_ids_logprob=[NEWLINE, ONE],
    ),
)  # fmt: skip
STREAMED = (
    asking("streaming", "streamed", stream=True),
    asking("streaming", "streamed up to a stop string", stream=True)._replace(sampling={"stop": ["."]}, bites=3),
)
RETURNED = (
    asking("return_hidden_states", "hidden states", return_hidden_states=True),
    asking("return_hidden_states", "hidden states, stop", return_hidden_states=True)._replace(
        sampling={"stop": ["the"]}
    ),
    asking("return_sampling_mask", "sampling masks", return_sampling_mask=True, sampling_logprobs_mode="support"),
)
EXACT = (*GREEDY, *LOGPROBS, *RETURNED, *STREAMED)

# Question and beginning of an answer, to compare sampling distributions. The first token, sampled by the prefill, is
# nearly certain. Then the story has many continuations, in which drafts are accepted.
STORY = QUESTIONS[0], "Anna was a driver who lived in Oslo"
# The next number, 44, repeats a digit, which `repetition_penalty` suppresses.
NUMBERS_BEGUN = "Count from 11 to 99 by 11.", "Here are the numbers:\n11, 22, 33, "
# A draw of four tokens shows a penalty only if a token may repeat. This bias gives a second full stop a probability of
# about 0.5.
REPEATING = {str(FULL_STOP): 9.5}
# Above temperature 0 the first tokens must have the same sampling distribution as without speculation.
SAMPLED = (
    greedy("temperature > 0", "T 0.5", 0, temperature=0.5),
    greedy("temperature > 0", "T 1", 0, temperature=1.0),
    greedy("temperature > 0", "T 1.7", 0, temperature=1.7),
    greedy("top_k", "top_k 3", 0, temperature=1.5, top_k=3),
    greedy("top_p", "top_p 0.8", 0, temperature=1.5, top_p=0.8),
    greedy("min_p", "min_p 0.1", 0, temperature=1.7, min_p=0.1),
    greedy("min_p", "min_p, top_k and top_p", 0, temperature=1.7, min_p=0.02, top_k=40, top_p=0.95),
    greedy(
        "frequency_penalty", "frequency -2 at T 1", 0, temperature=1.0, frequency_penalty=-2.0, logit_bias=REPEATING
    ),
    greedy("presence_penalty", "presence +2 at T 1", 0, temperature=1.0, presence_penalty=2.0, logit_bias=REPEATING),
    greedy("repetition_penalty", "repetition 2 at T 1", 0, temperature=1.0, repetition_penalty=2.0),
    greedy(
        "penalties mixed", "penalties, top_k and min_p", 0, temperature=1.5, logit_bias=REPEATING,
        presence_penalty=-1.5, frequency_penalty=-0.5, repetition_penalty=1.2, top_k=50, min_p=0.01,
    ),
    greedy(
        "min_new_tokens", "min_new_tokens at T 1.5", 0,
        temperature=1.5, min_new_tokens=3, stop_token_ids=[ONE_DAY, COMMA],
    ),
    greedy("logit_bias", "bias at T 1", 0, temperature=1.0, logit_bias=REPEATING),
    greedy("regex", "regex at T 1.5", 0, temperature=1.5, regex=r"\. (One|The|In) [a-z ,]*"),
    processor("a processor at T 1.5", 0, ONE_DAY, COMMA, temperature=1.5),
)  # fmt: skip


def bare(case: Case) -> Case:
    """Return a case of `SAMPLED` without the parameter under test."""
    kept = ("temperature",) if case.row == "logit_bias" else ("temperature", "logit_bias")
    return Case(case.row, f"without {case.name}", {name: case.sampling[name] for name in kept if name in case.sampling})


def begun(case: Case) -> list[int]:
    """Return the prompt of a case of `SAMPLED`: a question and the beginning of an answer."""
    question, answer = NUMBERS_BEGUN if case.row == "repetition_penalty" else STORY
    return chat(question) + token_ids(answer)


def path_with(folder: Path) -> dict[str, str]:
    """Return the variable PYTHONPATH with `folder`, which has a `sitecustomize.py`, and `after_loading` put first."""
    path = (str(folder), str(AFTER_LOADING), os.environ.get("PYTHONPATH"))
    return {"PYTHONPATH": os.pathsep.join(filter(None, path))}


REFERENCE_ENV = path_with(STAND_INS)
# Flags and variables of servers that are compared with `sampling_seed`.
SEEDED_FLAGS, SEEDED_ENV = ("--enable-deterministic-inference",), REFERENCE_ENV | {"TORCHDYNAMO_DISABLE": "1"}


class Sample(NamedTuple):
    token_ids: list[int]
    text: str
    meta: dict[str, Any]

    @property
    def outcome(self) -> tuple[Any, ...]:
        counts = (self.meta["prompt_tokens"], self.meta["completion_tokens"])
        return self.token_ids, self.text, self.meta["finish_reason"], counts


class Refusal(NamedTuple):
    status: int
    message: str


Reply = list[Sample] | Refusal


def ask(server: Server, prompt: Sequence[int], case: Case, **sampling: Any) -> Reply:
    """Send one request, greedy by default. `sampling` overrides the defaults, and the case overrides `sampling`."""
    defaults = {"temperature": 0.0, "max_new_tokens": MAX_NEW_TOKENS}
    body = {"input_ids": list(prompt), "sampling_params": defaults | sampling | dict(case.sampling), **case.fields}
    with httpx.Client(base_url=server.url, timeout=REQUEST_TIMEOUT_S, trust_env=False) as http:
        response = http.post("/generate", json=body)
    if response.status_code != 200:
        return Refusal(response.status_code, message_of(response))
    answers = streamed(response) if case.fields.get("stream") else response.json()
    answers = answers if isinstance(answers, list) else [answers]
    return [Sample(answer["output_ids"], answer["text"], answer["meta_info"]) for answer in answers]


def ask_all(
    server: Server, asked: Sequence[tuple[Sequence[int], Case]], *, concurrency: int = 8, **sampling: Any
) -> list[Reply]:
    """Call `ask` for every (prompt, case), at most `concurrency` in flight; return replies in order."""
    with ThreadPoolExecutor(concurrency) as pool:
        return list(pool.map(lambda pair: ask(server, *pair, **sampling), asked))


def answer_all(
    server: Server, cases: Sequence[Case], prompts: Sequence[Sequence[int]], seed: int
) -> dict[str, list[Reply]]:
    """Send every case with every prompt, in random order. Return the replies by the case's name, one per prompt."""
    pairs = [(i, case) for case in cases for i in range(len(prompts))]
    order = Random(seed).sample(pairs, len(pairs))
    replies = ask_all(server, [(prompts[i], case) for i, case in order])
    by_pair = {(i, case.name): reply for (i, case), reply in zip(order, replies, strict=True)}
    return {case.name: [by_pair[i, case.name] for i in range(len(prompts))] for case in cases}


def outcomes(reply: Reply) -> list[object]:
    return [reply] if isinstance(reply, Refusal) else [sample.outcome for sample in reply]


def draws(server: Server, case: Case, n: int, per_request: int = 100) -> list[distribution.Draw]:
    """Return the first tokens of `n` answers to a case of `SAMPLED`; raise ServerError if the server refuses it."""
    case = case._replace(sampling=case.sampling | {"n": per_request, "max_new_tokens": distribution.N_POSITIONS})
    found = list[distribution.Draw]()
    for reply in ask_all(server, [(begun(case), case)] * -(-n // per_request), concurrency=2):
        if isinstance(reply, Refusal):
            raise ServerError(f"{server.name}: {case} refused with {reply.status}: {reply.message}")
        found += [tuple(sample.token_ids) for sample in reply]
    return found[:n]


def message_of(response: httpx.Response) -> str:
    try:
        return str(response.json()["error"]["message"])
    except (json.JSONDecodeError, KeyError, TypeError):
        return response.text


def streamed(response: httpx.Response) -> dict[str, Any]:
    """Return the last event of a stream; raise ValueError if an event lacks tokens of the event before."""
    events = [json.loads(line.removeprefix("data: ")) for line in response.iter_lines() if line.startswith("data: {")]
    for before, after in pairwise(events):
        n = len(before["output_ids"])
        if after["output_ids"][:n] != before["output_ids"] or len(after["output_ids"]) < n:
            raise ValueError(f"an event takes tokens back: {before['output_ids']} became {after['output_ids']}")
    return events[-1] | {"n_events": len(events)}


def numbers_of(sample: Sample) -> dict[str, list[Any]]:
    """Return an answer's lists of log-probabilities, by SGLang's names, and the hidden states of its tokens."""
    numbers = {name: rows for name, rows in sample.meta.items() if name.endswith("logprobs") and rows}
    if "hidden_states" in sample.meta:
        numbers["hidden_states"] = chosen_from(sample.meta["hidden_states"])
    return numbers


def chosen_from(hidden_states: Sequence[Any]) -> list[list[float]]:
    """Return one row per answer token: the hidden state from which the token was chosen.

    SGLang returns the hidden states of a prefill as one list. The first token was chosen from the last of them.
    """
    return [rows[-1] if isinstance(rows[0], list) else rows for rows in hidden_states]


def furthest(a: Any, b: Any) -> float:
    """Return the largest difference between two answers' numbers; inf if a shape or a token differs.

    `a` and `b` are numbers, [logprob, token, text], or dictionaries or lists of them.
    """
    if isinstance(a, dict) and isinstance(b, dict):
        if a.keys() != b.keys():
            return float("inf")
        return max((furthest(a[name], b[name]) for name in a), default=0.0)
    if isinstance(a, list) and isinstance(b, list) and len(a) == len(b):
        if len(a) == 3 and isinstance(a[1], int):
            if a[1] != b[1] or (a[0] is None) != (b[0] is None):
                return float("inf")
            return abs(a[0] - b[0]) if a[0] is not None else 0.0
        return max((furthest(x, y) for x, y in zip(a, b, strict=True)), default=0.0)
    if isinstance(a, float) and isinstance(b, float):
        return abs(a - b)
    return 0.0 if a == b else float("inf")
