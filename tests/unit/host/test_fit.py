"""What a launch changes of a draft's own words: each change is one sentence for the log."""

from dataclasses import replace
from pathlib import Path
from types import ModuleType

import pytest

from sglang_dflash.draft import checkpoint
from sglang_dflash.draft.record import Checkpoint
from sglang_dflash.host import fit
from tests.unit.test_config import ARGUMENTS, TARGET


@pytest.fixture
def draft(checkpoints: ModuleType, tmp_path: Path) -> Checkpoint:
    return replace(checkpoint.read(str(checkpoints.write_draft(tmp_path))), path="draft")


def test_a_draft_as_it_is_needs_no_word(draft: Checkpoint) -> None:
    assert fit.notes(ARGUMENTS, replace(TARGET, context_length=512), draft) == ()


def test_fewer_positions(draft: Checkpoint) -> None:
    assert fit.notes(ARGUMENTS, replace(TARGET, context_length=513), draft) == (
        "draft was trained for 512 positions and serves 513 (beyond them answers stay exact, and fewer drafts may be "
        "accepted)",
    )
