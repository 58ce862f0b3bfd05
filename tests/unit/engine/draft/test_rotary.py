"""A draft's rotary table must equal the PyTorch reference's, also at positions past the training length."""

from typing import Any

import pytest
import torch
from sglang.srt.layers.rotary_embedding import get_rope

from sglang_dflash.engine.draft.record import FULL, Checkpoint
from sglang_dflash.engine.draft.rotary import reach, rotary_of
from sglang_dflash.reference.torch.rope import rope_frequencies, rotation_at

TRAINED, SERVED, HEAD_DIM = 64, 1000, 16
LLAMA3 = {"factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0, "original_max_position_embeddings": 32}
ROPES = {
    "default": {},
    "linear": {"factor": 4.0},
    "linear with a factor below 1": {"rope_type": "linear", "factor": 0.5},
    "yarn": {"factor": 4.0, "original_max_position_embeddings": 16},
    "llama3": LLAMA3,
}


def draft(rope: dict[str, Any]) -> Checkpoint:
    return Checkpoint(
        hidden_size=64, num_hidden_layers=1, num_attention_heads=4, num_key_value_heads=2, head_dim=HEAD_DIM,
        intermediate_size=96, vocab_size=None, rope_parameters=rope, layer_types=(FULL,), num_target_layers=None,
        block_size=8, mask_token_id=3, target_layer_ids=(0,), max_position_embeddings=TRAINED,
    )  # fmt: skip


@pytest.mark.parametrize("kind", ROPES)
def test_every_row_equals_plain_torch(kind: str) -> None:
    rope = {"rope_type": kind, "rope_theta": 10_000.0} | ROPES[kind]
    rotary = get_rope(HEAD_DIM, HEAD_DIM, TRAINED, 10_000, rope_scaling=rope, dtype=torch.float32)
    reach(rotary, SERVED)
    assert len(rotary.cos_sin_cache) >= SERVED
    cos, sin = rotation_at(torch.arange(SERVED), *rope_frequencies(draft(rope)), torch.float32)
    half = HEAD_DIM // 2
    expected = torch.cat([cos[:, :half], sin[:, :half]], dim=-1)
    torch.testing.assert_close(rotary.cos_sin_cache[:SERVED].float(), expected, atol=2e-4, rtol=0)


def test_a_part_of_the_pairs_is_rotated() -> None:
    fields = draft({"rope_type": "default", "rope_theta": 10_000.0, "rope_dim": 4})
    rotary = rotary_of(fields, 10_000.0, None)
    reach(rotary, SERVED)
    cos, sin = rotation_at(torch.arange(SERVED), *rope_frequencies(fields), torch.float32)
    rest = torch.ones(SERVED, 6)
    expected = torch.cat([cos[:, :2], rest, sin[:, :2], 0 * rest], dim=-1)
    torch.testing.assert_close(rotary.cos_sin_cache[:SERVED].float(), expected, atol=2e-4, rtol=0)


def test_a_table_that_is_long_enough_stays() -> None:
    rope = {"rope_type": "linear", "rope_theta": 5_000.0, "factor": 2.0}
    rotary = get_rope(HEAD_DIM, HEAD_DIM, SERVED, 5_000, rope_scaling=rope, dtype=torch.float32)
    table = rotary.cos_sin_cache
    reach(rotary, SERVED)
    assert rotary.cos_sin_cache is table
