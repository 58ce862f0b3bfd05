"""`--forward-hooks`: hooks run in prompts and in steps without a graph, and captured graphs do not contain them."""

import json
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tests.server.lib.rehearsals import FA3, GRAPHS, RANDOM_WIDTHS, SM90
from tests.server.lib.talk import tokens_of

ROOT = Path(__file__).parents[2]
N_PROMPTS, MAX_NEW_TOKENS = 4, 32


@pytest.mark.full
@pytest.mark.parametrize("is_captured", [False, True], ids=["cpu", "fa3-graphs"])
def test_hooks_see_prompts_and_steps_without_a_graph(
    is_captured: bool, pool: Any, questions: Callable, reference: Callable, tmp_path: Path
) -> None:
    seen, prompts = tmp_path / "seen", questions(N_PROMPTS, "dense")
    hook = {
        "target_modules": ["model.layers.0.mlp"], "hook_factory": "tests.server.lib.forward_hook:counting",
        "config": {"path": str(seen)},
    }  # fmt: skip
    flags = ("--forward-hooks", json.dumps([hook]), *((*FA3, *GRAPHS) if is_captured else ()))
    path = {"PYTHONPATH": os.pathsep.join(filter(None, (str(ROOT), os.environ.get("PYTHONPATH"))))}
    env = path | dict(RANDOM_WIDTHS) | (dict(SM90) if is_captured else {})
    server = pool.get(target="dense", flags=flags, env=env)
    seen.write_text("")
    answers = server.generate_many(prompts, concurrency=1, max_new_tokens=MAX_NEW_TOKENS)
    assert tokens_of(answers) == [reference(prompt, MAX_NEW_TOKENS, "dense") for prompt in prompts]
    n_tokens = [int(line) for line in seen.read_text().split()]
    n_of_prompts = [len(prompt) - answer.meta["cached_tokens"] for prompt, answer in zip(prompts, answers, strict=True)]
    if is_captured:
        assert n_tokens == n_of_prompts
    else:
        # With the overlap schedule a step may run past the end of an answer.
        n_forwards = N_PROMPTS + sum(answer.meta["spec_verify_ct"] for answer in answers)
        assert n_forwards <= len(n_tokens) <= n_forwards + N_PROMPTS
    pool.drop(server)
