"""Every family of targets (architecture): answers with DFLASH equal those without, in fp32.

Each family has a target of random weights, and a draft trained on the target's answers (`lib/families.py`).
Transformers, the server without speculation and this plugin must give the same answers. For each answer, as
many decode steps must accept n drafts as in the PyTorch reference, for every n. Families that SGLang serves only on
GPUs run under GPU emulation (`sglang_dflash.platforms.rehearsal`), with a GPU's attention backend and captured graphs.
"""

from collections import Counter
from collections.abc import Iterator
from typing import Any, NamedTuple

import pytest
import torch
import transformers

from sglang_dflash.pairs.servers.server import Generation, Server
from sglang_dflash.pairs.tiny.pairs import Pair
from sglang_dflash.reference.torch import DraftModel
from sglang_dflash.reference.torch.generate import DecodedStep, Options, spec_steps
from tests.server.lib.families import FAMILIES, NO_WARMUP, REHEARSED, Family, write_pair
from tests.server.lib.talk import steps, tokens_of

pytestmark = pytest.mark.full

ALL = FAMILIES | REHEARSED
N_PROMPTS, N_TOKENS = 8, 48
N_AGAIN = 20  # answer tokens appended to the prompt in a second request; the prefix cache has prompt and answer
COMMITTED_PER_STEP = 2.0  # least acceptance length
DIFFERENT_TOKENS = 8.0  # least number of different tokens in an answer, on average


class Served(NamedTuple):
    """A family and its prompts; `expected` has the reference's steps for each prompt, the prefill first."""

    family: Family
    pair: Pair
    prompts: list[list[int]]
    expected: list[list[DecodedStep]]
    name: str


@pytest.fixture(scope="module", params=ALL)
def served(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Served:
    family = ALL[request.param]
    pair, prompts = write_pair(family, tmp_path_factory.mktemp(request.param))
    target = getattr(transformers, family.model).from_pretrained(pair.target, dtype=torch.float32).eval()
    draft = DraftModel.from_pretrained(pair.draft, dtype=torch.float32)
    options = Options(max_new_tokens=N_TOKENS)
    expected = [list(spec_steps(draft, target, torch.tensor([p]), options)) for p in prompts[:N_PROMPTS]]
    return Served(family, pair, prompts[:N_PROMPTS], expected, request.param)


@pytest.fixture(scope="module", params=["off", "plugin"])
def server(request: pytest.FixtureRequest, pool: Any, served: Served) -> Iterator[Server]:
    family = served.family
    flags = (*family.flags, *NO_WARMUP, "--decode-log-interval", "1")
    running = pool.get(request.param, target=served.name, pair=served.pair, flags=flags, env=dict(family.env))
    yield running
    pool.drop(running)


def ask(server: Server, prompts: list[list[int]], n_tokens: int) -> list[Generation]:
    return server.generate_many(prompts, concurrency=N_PROMPTS, max_new_tokens=n_tokens, ignore_eos=True)


def texts(served: Served) -> list[list[int]]:
    return [[token for step in generation for token in step.committed] for generation in served.expected]


def test_same_tokens(server: Server, served: Served) -> None:
    assert tokens_of(ask(server, served.prompts, N_TOKENS)) == texts(served)


def test_same_tokens_after_a_cached_prefix(server: Server, served: Served) -> None:
    ask(server, served.prompts, N_TOKENS)
    longer = [prompt + text[:N_AGAIN] for prompt, text in zip(served.prompts, texts(served), strict=True)]
    assert tokens_of(ask(server, longer, N_TOKENS - N_AGAIN)) == [text[N_AGAIN:] for text in texts(served)]


@pytest.mark.parametrize("server", ["plugin"], indirect=True)
def test_steps_are_those_of_plain_torch(server: Server, served: Served) -> None:
    server.flush_cache()
    answers = ask(server, served.prompts, N_TOKENS)
    expected = [dict(Counter(step.n_accepted for step in generation[1:])) for generation in served.expected]
    assert [steps(answer) for answer in answers] == expected
    n_steps = sum(len(generation) - 1 for generation in served.expected)
    assert N_PROMPTS * (N_TOKENS - 1) / n_steps > COMMITTED_PER_STEP, "hardly a draft was accepted: little was tested"
    assert sum(len(set(text)) for text in texts(served)) / N_PROMPTS > DIFFERENT_TOKENS, "the texts are monotonous"


def test_graphs_are_captured_under_emulation_only(server: Server, served: Served) -> None:
    """SGLang's log line for each decode batch shows whether a captured graph ran."""
    ask(server, served.prompts, N_TOKENS)
    decoded = [line for line in server.log_text().splitlines() if "Decode batch" in line]
    assert decoded
    assert all(f"cpu graph: {served.name in REHEARSED}" in line for line in decoded)
