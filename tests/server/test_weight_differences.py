"""Updates by differences, through a trainer's own loader (`--custom-weight-loader`), for target and draft."""

import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from sglang_dflash.pairs.tiny.pairs import HYBRID
from tests.server.lib import weight_differences
from tests.server.lib.oracle import Oracle
from tests.server.lib.rehearsals import REHEARSALS
from tests.server.lib.talk import push, steps, tokens_of
from tests.server.lib.variants import VARIANTS

ROOT = Path(__file__).parents[2]
N_PROMPTS, MAX_NEW_TOKENS = 4, 48


@pytest.mark.full
@pytest.mark.parametrize("row", ["cpu", "fa3-graphs"])
@pytest.mark.parametrize("model", ["target", "draft"])
def test_differences_are_added_by_a_trainers_loader(model: str, row: str, pool: Any, questions: Callable) -> None:
    """A first push changes the model that the selector names. A second one takes the change back."""
    kind = VARIANTS["hybrid"] if row == "cpu" else REHEARSALS[row]
    path = os.pathsep.join(filter(None, (str(ROOT), os.environ.get("PYTHONPATH"))))
    flags = (*kind.flags, "--custom-weight-loader", weight_differences.NAME)
    server = pool.get(flags=flags, env={"PYTHONPATH": path} | dict(kind.env))
    prompts, expert = questions(N_PROMPTS, seed=17), Oracle(HYBRID, None, None)
    stored = load_file(HYBRID._asdict()[model] / "model.safetensors")
    torch.manual_seed(2)
    change = {
        name: 0.2 * weight.float().std() * torch.randn(weight.shape)
        for name, weight in stored.items()
        if name.endswith("mlp.down_proj.weight")
    }
    assert change
    before = expert.expect(prompts, MAX_NEW_TOKENS)
    for sign in (1, -1):
        pushed = {name: sign * difference for name, difference in change.items()}
        answer = push(server, pushed, selector=model, load_format=weight_differences.NAME)
        assert answer.status_code == 200, answer.text
        weight_differences.add(expert.target if model == "target" else expert.draft, pushed.items())
        expected = expert.expect(prompts, MAX_NEW_TOKENS)
        answers = expected.require_from(server, N_PROMPTS)
        assert ([*map(steps, answers)] != before.steps) == (sign == 1), "the change is too small to see"
        assert (tokens_of(answers) != before.token_ids) == (sign == 1 and model == "target")
        server.flush_cache()
    pool.drop(server)
