"""Drafts in quantized files: answers are the target's, and steps those of the PyTorch reference with these files.

`tests/unit/engine/draft/test_packed.py` compares the converted weights with the definition of each format.
"""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from sglang_dflash.pairs.servers.server import Generation, Server
from sglang_dflash.pairs.tiny.pairs import DENSE, DENSE_2, Pair
from tests.fixtures.packing import quantized_draft
from tests.server.lib.oracle import Expected, Oracle
from tests.server.lib.rehearsals import REHEARSALS, Rehearsal
from tests.server.lib.talk import post, steps, tokens_of
from tests.server.lib.variants import TWO_NODES, VARIANTS, Variant

N_PROMPTS, MAX_NEW_TOKENS = 5, 48
CPU, GRAPHS = VARIANTS["dense"], REHEARSALS["fa3-graphs-dense"]
TWO_RANKS = CPU._replace(flags=("--tp", "2"), env=TWO_NODES)
# The published int4 draft keeps the convolutions' projections plain.
CONVOLUTIONS = ("kernel_projection",)


@pytest.fixture
def drafts(tmp_path: Path) -> Callable[..., Pair]:
    """Return `drafts(pair, form, plain)`: the pair with a quantized copy of its draft."""

    def write(pair: Pair, form: str, plain: tuple[str, ...] = ()) -> Pair:
        return pair._replace(draft=quantized_draft(pair.draft, tmp_path / form, form, plain))

    return write


def expect(pair: Pair, questions: Callable) -> Expected:
    return Oracle(pair, None, None).expect(questions(N_PROMPTS, "dense"), MAX_NEW_TOKENS)


def serve(pool: Any, pair: Pair, row: Variant | Rehearsal, *flags: str) -> Server:
    return pool.get(target=f"packed {pair.draft.name}", pair=pair, flags=(*row.flags, *flags), env=dict(row.env))


def require_accepted(answers: list[Generation]) -> None:
    n_steps = sum(sum(steps(answer).values()) for answer in answers)
    assert sum(len(answer.token_ids) for answer in answers) > 3 * n_steps, "hardly a draft was accepted"


@pytest.mark.parametrize(
    ("pair", "form", "plain", "row"),
    [
        (DENSE_2, "int4", CONVOLUTIONS, CPU),
        pytest.param(DENSE_2, "nvfp4", (), CPU, marks=pytest.mark.full),
        pytest.param(DENSE, "fp8-block", (), CPU, marks=pytest.mark.full),
        pytest.param(DENSE, "fp8-inverse", (), TWO_RANKS, marks=pytest.mark.full),
        # SGLang itself would find the file that describes this format, and build quantized layers.
        pytest.param(DENSE, "modelopt-nvfp4-file", (), CPU, marks=pytest.mark.full),
        pytest.param(DENSE_2, "int4", (), GRAPHS, marks=pytest.mark.full),
    ],
    ids=["int4", "nvfp4", "fp8", "fp8-two-ranks", "modelopt-nvfp4", "int4-graphs"],
)
def test_steps_are_those_of_the_converted_draft(
    pool: Any, questions: Callable, drafts: Callable, pair: Pair, form: str, plain: tuple[str, ...], row: Any
) -> None:
    packed = drafts(pair, form, plain)
    expected, server = expect(packed, questions), serve(pool, packed, row)
    for concurrency in (1, 3):
        require_accepted(expected.require_from(server, concurrency))
    assert "and is unpacked while it loads" in server.log_text()
    pool.drop(server)


@pytest.mark.full
def test_quantized_files_update_a_served_draft(pool: Any, questions: Callable, drafts: Callable) -> None:
    server = serve(pool, DENSE, CPU)
    before = expect(DENSE, questions)
    before.require_from(server, concurrency=1)
    for form in ("int4", "modelopt-nvfp4-file", "int8"):
        new = drafts(DENSE, form)
        answer = post(server, "/update_weights_from_disk", {"model_path": str(new.draft)})
        assert answer.status_code == 200, answer.text
        expected = expect(new, questions)
        assert expected.steps != before.steps or form != "int4", "the update has no effect"
        expected.require_from(server, concurrency=1)
    answer = post(server, "/update_weights_from_disk", {"model_path": str(DENSE.draft)})
    assert answer.status_code == 200, answer.text
    before.require_from(server, concurrency=1)
    pool.drop(server)


@pytest.mark.full
def test_a_converted_draft_may_be_quantized_to_fp8(
    pool: Any, questions: Callable, drafts: Callable, reference: Callable
) -> None:
    server = serve(pool, drafts(DENSE, "int4"), CPU, "--speculative-draft-model-quantization", "fp8")
    prompts = questions(N_PROMPTS, "dense")
    answers = server.generate_many(prompts, concurrency=1, max_new_tokens=MAX_NEW_TOKENS)
    assert tokens_of(answers) == [reference(prompt, MAX_NEW_TOKENS, "dense") for prompt in prompts]
    require_accepted(answers)
    pool.drop(server)
