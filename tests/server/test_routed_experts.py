"""Routed experts of every token equal those without speculation, with verifies of more tokens than a prompt's chunk."""

from base64 import b64decode
from typing import Any, NamedTuple

import numpy as np
import pytest

from sglang_dflash.pairs.servers.server import Generation
from tests.server.lib.families import BLOCK_SIZE, FAMILIES, N_LAYERS, NO_WARMUP, write_pair
from tests.server.lib.talk import tokens_of

pytestmark = pytest.mark.full

NAME, N_PROMPTS, N_TOKENS, CHUNK = "qwen3-moe", 8, 40, 32
assert max(CHUNK, N_PROMPTS) < N_PROMPTS * BLOCK_SIZE  # tokens of a verify
FLAGS = (
    *NO_WARMUP, "--enable-return-routed-experts", "--chunked-prefill-size", str(CHUNK),
    "--max-running-requests", str(N_PROMPTS),
)  # fmt: skip


class Answers(NamedTuple):
    prompts: list[list[int]]
    of: dict[str, list[Generation]]  # by arm


@pytest.fixture(scope="module")
def answers(pool: Any, tmp_path_factory: pytest.TempPathFactory) -> Answers:
    pair, prompts = write_pair(FAMILIES[NAME], tmp_path_factory.mktemp(NAME))
    found = {}
    for arm in ("off", "plugin"):
        server = pool.get(arm, target=NAME, pair=pair, flags=FLAGS)
        asked = {"return_routed_experts": True}
        options = {"concurrency": N_PROMPTS, "max_new_tokens": N_TOKENS, "ignore_eos": True}
        found[arm] = server.generate_many(prompts[:N_PROMPTS], fields=asked, **options)
        pool.drop(server)
    return Answers(prompts[:N_PROMPTS], found)


def experts(answer: Generation) -> np.ndarray:
    """Return the experts of an answer's tokens, prompt first, int32 [tokens, layers, experts per token]."""
    values = np.frombuffer(b64decode(answer.meta["routed_experts"]), dtype=np.int32)
    return values.reshape(-1, N_LAYERS, FAMILIES[NAME].fields["num_experts_per_tok"])


def test_experts_equal_those_without_speculation(answers: Answers) -> None:
    assert tokens_of(answers.of["plugin"]) == tokens_of(answers.of["off"])
    for prompt, ours, off in zip(answers.prompts, answers.of["plugin"], answers.of["off"], strict=True):
        assert len(experts(off)) == len(prompt) + N_TOKENS - 1
        assert len(np.unique(experts(off))) > 2, "the routing is trivial"
        np.testing.assert_array_equal(experts(ours), experts(off))


def test_drafts_were_accepted(answers: Answers) -> None:
    n_steps = sum(answer.meta["spec_verify_ct"] for answer in answers.of["plugin"])
    assert N_PROMPTS * (N_TOKENS - 1) / n_steps > 2.0
