"""Drafts from an fp8 copy of the head: the target's answers, and the PyTorch reference's steps with a rounded head."""

from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from sglang_dflash.engine.draft.head_copy import rounded_rows
from sglang_dflash.pairs.tiny.pairs import HYBRID, Pair
from sglang_dflash.reference.torch import generate
from tests.server.lib.oracle import Oracle
from tests.server.lib.rehearsals import FA3, GRAPHS, SM90
from tests.server.lib.talk import post
from tests.server.lib.variants import TRACK
from tests.server.test_weight_update import changed_copy

N_NEW = 64
ENV = dict(SM90) | {"SGLANG_DFLASH_DRAFT_HEAD": "fp8"}


def rounded(x: torch.Tensor) -> torch.Tensor:
    rows, scale = rounded_rows(x)
    return rows.float() * scale


def rounded_logits(hidden: torch.Tensor, target: torch.nn.Module) -> torch.Tensor:
    return rounded(hidden) @ rounded(target.get_output_embeddings().weight).T


@pytest.mark.full
def test_fp8_head_drafts_as_plain_torch_with_a_rounded_head(
    server: Callable, questions: Callable, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Captured graphs must read the fp8 copy, both at launch and after another target is loaded while serving."""
    ours = server(flags=(*FA3, *GRAPHS, *TRACK), env=ENV)
    prompts, new_target = questions(10, seed=21), changed_copy(HYBRID.target, tmp_path / "target")
    new, oracle = Pair(new_target, HYBRID.draft), Oracle(HYBRID, None, None)
    plain = oracle.expect(prompts, N_NEW)
    monkeypatch.setattr(generate, "draft_logits", rounded_logits)
    old_rounded, new_rounded = oracle.expect(prompts, N_NEW), Oracle(new, None, None).expect(prompts, N_NEW)
    assert old_rounded.token_ids == plain.token_ids
    assert old_rounded.steps != plain.steps, "rounding changes no step; this test cannot fail"

    def load(path: Path) -> None:
        assert post(ours, "/update_weights_from_disk", {"model_path": str(path)}).status_code == 200

    assert "an fp8 copy of 1024 rows takes 0.13 MiB" in ours.log_text()
    old_rounded.require_from(ours, concurrency=3)
    try:
        load(new_target)
        new_rounded.require_from(ours, concurrency=3)
    finally:
        load(HYBRID.target)
    old_rounded.require_from(ours, concurrency=3)
