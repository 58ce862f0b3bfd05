"""Launch notes: one log sentence for each difference between a draft's files and how the draft is served."""

from copy import copy
from dataclasses import replace
from pathlib import Path
from types import ModuleType

import pytest

from sglang_dflash.engine.draft import checkpoint
from sglang_dflash.engine.draft.lilicorr_fields import LiLiCorrSizes
from sglang_dflash.engine.draft.record import FULL, SLIDING, Checkpoint
from sglang_dflash.engine.host import fit
from sglang_dflash.errors import NotSupported
from tests.unit.test_config import ARGUMENTS, TARGET


@pytest.fixture
def draft(checkpoints: ModuleType, tmp_path: Path) -> Checkpoint:
    return replace(checkpoint.read(str(checkpoints.write_draft(tmp_path))), path="draft")


def test_an_unchanged_draft_needs_no_note(draft: Checkpoint) -> None:
    assert fit.notes(ARGUMENTS, replace(TARGET, context_length=512), draft) == ()


def test_a_longer_context_than_trained_is_noted(draft: Checkpoint) -> None:
    assert fit.notes(ARGUMENTS, replace(TARGET, context_length=513), draft) == (
        "draft was trained for 512 positions and serves 513 (beyond them answers stay exact, but fewer drafts may be "
        "accepted)",
    )


@pytest.mark.parametrize("label", ["float32", "float16"])
def test_a_different_dtype_is_noted(label: str, draft: Checkpoint) -> None:
    assert fit.notes(ARGUMENTS, TARGET, replace(draft, dtype=label)) == (
        f"draft has dtype {label} and is loaded in bfloat16, the target's dtype",
    )


def test_a_draft_keeps_its_weights_with_a_dummy_target(draft: Checkpoint) -> None:
    dummy = replace(ARGUMENTS, load_format="dummy")
    for name, wanted in (
        ("auto", "auto"),
        ("gguf", "auto"),
        ("flash_rl", "auto"),
        ("fastsafetensors", None),
        ("runai_streamer", None),
    ):
        assert fit.load_format(replace(ARGUMENTS, load_format=name)) == wanted
    assert fit.load_format(dummy) == "auto"
    (note,) = fit.notes(dummy, TARGET, draft)
    assert note == "--load-format dummy applies only to the target: the draft is loaded from draft"
    asked = replace(dummy, draft_load_format="safetensors")
    assert fit.load_format(asked) == "safetensors"


def test_flash_rl_would_leave_the_heads_copy_unchanged(draft: Checkpoint) -> None:
    flash = replace(ARGUMENTS, load_format="flash_rl")
    fit.check_flash_rl(flash, draft)
    reduced = copy(draft)
    vars(reduced)["draft_vocab_size"] = 32
    fit.check_flash_rl(ARGUMENTS, reduced)
    with pytest.raises(NotSupported, match=r"flash_rl is not supported for a draft with a reduced vocabulary .*"):
        fit.check_flash_rl(flash, reduced)


def test_a_draft_without_weights_is_refused() -> None:
    with pytest.raises(NotSupported, match="--speculative-draft-load-format dummy is not supported"):
        fit.load_format(replace(ARGUMENTS, draft_load_format="dummy"))


@pytest.mark.parametrize(
    ("n_heads", "n_kv_heads", "n_ranks"), [(28, 4, [1, 2, 4, 28]), (32, 8, [1, 2, 4, 8, 16, 32]), (6, 6, [1, 2, 3, 6])]
)
def test_the_refusal_lists_all_numbers_of_ranks_that_split_the_heads(
    n_heads: int, n_kv_heads: int, n_ranks: list[int], draft: Checkpoint
) -> None:
    draft = replace(draft, num_attention_heads=n_heads, num_key_value_heads=n_kv_heads)
    for n in n_ranks:
        fit.check_heads(replace(ARGUMENTS, tp_size=n), draft)
        fit.check_heads(replace(ARGUMENTS, tp_size=8 * n, attention_dp=True, attention_dp_size=8), draft)
    with pytest.raises(ValueError, match=rf"; set --tp-size to {' or '.join(map(str, n_ranks))}$"):
        fit.check_heads(replace(ARGUMENTS, tp_size=5), draft)


@pytest.mark.parametrize(
    ("changes", "asked", "most"), [({}, 16, 32), ({"sliding_window": 12, "layer_types": (SLIDING, FULL)}, 10, 12)]
)
def test_a_block_longer_than_trained_is_noted(draft: Checkpoint, changes: dict, asked: int, most: int) -> None:
    longer, given = replace(draft, **changes), replace(ARGUMENTS, block_size=asked)
    assert fit.block_size(given, longer) == asked
    assert fit.notes(given, TARGET, longer) == (
        f"draft was trained for blocks of 8 tokens and drafts blocks of {asked} (answers stay exact, but few of the "
        "further drafts may be accepted)",
    )
    with pytest.raises(ValueError, match=rf"block size {most + 1} is not within 2\.\.{most}: draft was trained for"):
        fit.block_size(replace(ARGUMENTS, block_size=most + 1), longer)


def test_an_anchor_first_block_has_a_draft_for_every_slot(draft: Checkpoint) -> None:
    first = replace(draft, sample_from_anchor=True)
    assert fit.block_size(ARGUMENTS, first) == 9
    assert fit.notes(replace(ARGUMENTS, block_size=9), TARGET, first) == ()


def test_a_missing_mask_row_is_noted(draft: Checkpoint) -> None:
    """Only the file's absence shows that it was not fetched: no field of MiMo's config names it."""
    mimo = replace(draft, attention_value_scale=0.612)
    (note,) = fit.notes(ARGUMENTS, TARGET, mimo)
    assert note.startswith("draft has no mask_embedding.pt, which MiMo's drafts have: ")
    assert fit.notes(ARGUMENTS, TARGET, replace(mimo, has_mask_embedding=True)) == ()


def test_padding_and_target_tensors_are_noted(draft: Checkpoint) -> None:
    padded = replace(draft, vocab_size=120, borrowed={"lm_head.weight": (128, 64), "embed_tokens.weight": (128, 64)})
    assert fit.notes(ARGUMENTS, TARGET, padded) == (
        "draft has vocab_size 120 and uses the target's embedding and head of 128 rows",
        "draft: unused tensors: embed_tokens.weight, lm_head.weight (DFlash lacks them, or uses the target's)",
    )


def test_a_lilicorr_draft_has_no_longer_blocks_and_is_not_disaggregated(draft: Checkpoint) -> None:
    sizes = LiLiCorrSizes(4, 0, 1, 2, 2.0, 8, 1e-6, 1.0)
    draft = replace(draft, lilicorr=sizes)
    trained = draft.n_drafts + 1
    assert fit.block_size(replace(ARGUMENTS, block_size=trained - 1), draft) == trained - 1
    with pytest.raises(ValueError, match=f"block size {trained + 1} is not within 2..{trained}: "):
        fit.block_size(replace(ARGUMENTS, block_size=trained + 1), draft)
    fit.check_disaggregation(ARGUMENTS, draft)
    with pytest.raises(NotSupported, match="--disaggregation-mode decode is not supported with a LiLiCorr draft"):
        fit.check_disaggregation(replace(ARGUMENTS, disaggregation="decode"), draft)
