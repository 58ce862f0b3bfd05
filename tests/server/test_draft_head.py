"""An fp8 copy of the head drafts: answers stay the target's, steps are plain torch's with the head rounded alike."""

from collections.abc import Callable, Sequence
from pathlib import Path

import pytest
import torch

from sglang_dflash.draft.fp8_head import rounded_rows
from sglang_dflash.model import generate
from sglang_dflash.tiny.pairs import HYBRID, Pair
from tests.server.lib.oracle import Oracle
from tests.server.lib.rehearsals import GRAPHS, SM90, attention
from tests.server.lib.talk import post, steps
from tests.server.lib.variants import TRACK
from tests.server.test_weight_update import changed_copy

N_NEW = 64
ENV = dict(SM90) | {"SGLANG_DFLASH_DRAFT_HEAD": "fp8"}


def rounded(x: torch.Tensor) -> torch.Tensor:
    rows, scale = rounded_rows(x)
    return rows.float() * scale


def rounded_logits(hidden: torch.Tensor, target: torch.nn.Module) -> torch.Tensor:
    return rounded(hidden) @ rounded(target.get_output_embeddings().weight).T


def said(pair: Pair, prompts: Sequence[list[int]]) -> tuple[list[list[int]], list[dict[int, int]]]:
    expert = Oracle(pair, None, None)
    return [expert.continuation(prompt, N_NEW) for prompt in prompts], [
        expert.accepted_histogram(prompt, N_NEW) for prompt in prompts
    ]


def test_an_fp8_head_drafts_as_plain_torch_with_it_rounded(
    server: Callable, questions: Callable, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Captured graphs read the copy, of the target's head at launch and of a target loaded while serving."""
    ours = server(flags=(*attention("fa3"), *GRAPHS, *TRACK), env=ENV)
    prompts, new_target = questions(10, seed=21), changed_copy(HYBRID.target, tmp_path / "target")
    new = Pair(new_target, HYBRID.draft)
    plain = said(HYBRID, prompts)
    monkeypatch.setattr(generate, "draft_logits", rounded_logits)
    old_rounded, new_rounded = said(HYBRID, prompts), said(new, prompts)
    assert old_rounded[0] == plain[0]
    assert old_rounded[1] != plain[1], "rounding changes no step; this test could not fail"

    def served() -> tuple[list[list[int]], list[dict[int, int]]]:
        answers = ours.generate_many(prompts, concurrency=3, max_new_tokens=N_NEW)
        return [answer.token_ids for answer in answers], list(map(steps, answers))

    def load(path: Path) -> None:
        assert post(ours, "/update_weights_from_disk", {"model_path": str(path)}).status_code == 200

    assert "an fp8 copy of 1024 rows takes 0.13 MiB" in ours.log_text()
    assert served() == old_rounded
    try:
        load(new_target)
        assert served() == new_rounded
    finally:
        load(HYBRID.target)
    assert served() == old_rounded
