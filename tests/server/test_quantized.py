"""Quantized targets: answers equal those without speculation, steps those of SGLang's own worker.

The draft uses the target's embedding and head. Its own weights are not quantized unless a flag asks for it. SGLang's
loader of text-only Qwen3.5 drops the scale of a quantized head, so a quantized head is tested on the dense target.
"""

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from sglang_dflash.pairs.servers.server import Generation, Server
from sglang_dflash.pairs.tiny.pairs import Arm
from tests.server.conftest import KIND_FLAGS, PAIRS
from tests.server.lib.quantized import quantized
from tests.server.lib.rehearsals import FA3, GRAPHS, SM90
from tests.server.lib.talk import post, steps, tokens_of
from tests.server.lib.variants import TWO_NODES
from tests.server.test_weight_update import changed_copy

N_PROMPTS, MAX_NEW_TOKENS = 6, 48
ARMS = (Arm.OFF, Arm.PLUGIN, Arm.STOCK)
FP8_DRAFT = ("--speculative-draft-model-quantization", "fp8")
TWO_RANKS = {"flags": ("--tp", "2"), "env": dict(TWO_NODES)}
REHEARSED = (*FA3, *GRAPHS)

pytestmark = pytest.mark.full


@pytest.fixture
def served(pool: Any, tmp_path: Path) -> Iterator[Callable]:
    """Return `served(arm, target, form)`: a server whose target is quantized in format `form`; None: not quantized."""
    started: list[Server] = []

    def get(arm: Arm, target: str, form: str | None = None, **kwargs: Any) -> Server:
        pair = PAIRS[target]
        if form is not None:
            pair = pair._replace(target=tmp_path / form) if started else quantized(pair, form, tmp_path)
        flags = (*KIND_FLAGS[target], *kwargs.pop("flags", ()))
        started.append(pool.get(arm, target=f"{target} {form}", pair=pair, flags=flags, **kwargs))
        return started[-1]

    yield get
    for one in started:
        pool.drop(one)


@pytest.mark.parametrize(
    ("target", "form", "how"),
    [
        ("hybrid", "fp8", {}),
        ("dense", "fp8", {}),
        ("hybrid", "int8", {}),
        ("dense", "int8-head", {}),
        ("dense", "awq", {}),
        # Each rank has its own int8 scale for its part of a token's activations. So answers differ from those of a
        # server with one rank.
        ("hybrid", "int8", TWO_RANKS),
    ],
)
def test_answers_are_the_targets_and_steps_the_built_in_workers(
    served: Callable, questions: Callable, target: str, form: str, how: dict[str, Any]
) -> None:
    off, ours, stock = (answers(served(arm, target, form, **how), questions(N_PROMPTS, target)) for arm in ARMS)
    assert tokens_of(ours) == tokens_of(off)
    assert [steps(answer) for answer in ours] == [steps(answer) for answer in stock]
    require_accepted(ours)


def test_quantized_head_on_two_ranks(served: Callable, questions: Callable) -> None:
    """Leave out SGLang's own worker, which crashes when ranks score drafts with parts of a quantized head."""
    off, ours = (
        answers(served(arm, "dense", "int8-head", **TWO_RANKS), questions(N_PROMPTS, "dense"))
        for arm in (Arm.OFF, Arm.PLUGIN)
    )
    assert tokens_of(ours) == tokens_of(off)
    require_accepted(ours)


def test_weight_update_of_a_target_in_fp8(served: Callable, questions: Callable, tmp_path: Path) -> None:
    """Only fp8 is tested: an update of int8 weights crashes SGLang's scheduler, also without speculation."""
    prompts, pair = questions(N_PROMPTS, "dense"), PAIRS["dense"]
    off, ours = (served(arm, "dense", "fp8") for arm in (Arm.OFF, Arm.PLUGIN))
    before = answers(ours, prompts)
    changed = pair._replace(target=changed_copy(pair.target, tmp_path / "changed"))
    new = {"model_path": str(quantized(changed, "fp8", tmp_path / "new").target)}
    assert [post(server, "/update_weights_from_disk", new).status_code for server in (off, ours)] == [200, 200]
    without, after = answers(off, prompts), answers(ours, prompts)
    assert tokens_of(after) == tokens_of(without)
    assert tokens_of(after) != tokens_of(before)
    require_accepted(after)


@pytest.mark.parametrize("target", ["hybrid", "dense"])
def test_fp8_draft_drafts_as_the_built_in_workers(
    served: Callable, questions: Callable, reference: Callable, target: str
) -> None:
    prompts = questions(N_PROMPTS, target)
    plain, ours, stock = (
        answers(served(arm, target, flags=flags), prompts)
        for arm, flags in ((Arm.PLUGIN, ()), (Arm.PLUGIN, FP8_DRAFT), (Arm.STOCK, FP8_DRAFT))
    )
    assert tokens_of(ours) == [reference(prompt, MAX_NEW_TOKENS, target) for prompt in prompts]
    assert [steps(answer) for answer in ours] == [steps(answer) for answer in stock]
    assert [steps(answer) for answer in ours] != [steps(answer) for answer in plain], "the draft was not quantized"
    require_accepted(ours)


@pytest.mark.parametrize(("target", "form"), [("hybrid", "fp8"), ("dense", "int8-head")])
def test_captured_graphs_take_the_steps_of_eager_forwards(
    served: Callable, questions: Callable, target: str, form: str
) -> None:
    prompts = questions(N_PROMPTS, target)
    eager = answers(served(Arm.PLUGIN, target, form, flags=FP8_DRAFT), prompts)
    graphs = answers(served(Arm.PLUGIN, target, form, flags=(*FP8_DRAFT, *REHEARSED), env=dict(SM90)), prompts)
    assert [(answer.token_ids, steps(answer)) for answer in graphs] == [
        (answer.token_ids, steps(answer)) for answer in eager
    ]


def answers(server: Server, prompts: list[list[int]]) -> list[Generation]:
    return server.generate_many(prompts, concurrency=3, max_new_tokens=MAX_NEW_TOKENS)


def require_accepted(answers: list[Generation]) -> None:
    n_steps = sum(sum(steps(answer).values()) for answer in answers)
    assert sum(len(answer.token_ids) for answer in answers) > 3 * n_steps, "hardly a draft was accepted"
