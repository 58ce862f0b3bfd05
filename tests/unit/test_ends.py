"""What of a target the draft borrows, and what it cannot."""

from types import SimpleNamespace

import pytest
import torch

from sglang_dflash.draft.target_ends import likeliest, target_ends
from sglang_dflash.errors import NotSupported


def test_a_target_that_scales_what_is_embedded_is_refused() -> None:
    """SGLang's own worker asks models for it; a draft would guess badly, and nobody would see why."""
    model = SimpleNamespace(get_dflash_noise_embedding_scale=lambda: 8.0)
    with pytest.raises(NotSupported, match="get_dflash_noise_embedding_scale is not applied to what the draft embeds"):
        target_ends(model)


def test_a_head_that_is_the_embedding_itself_is_borrowed_whole() -> None:
    """Gemma's: no vocabulary-parallel layer, so neither a quantization method nor shards, whatever the ranks."""
    embedding = torch.nn.Embedding(5, 4).requires_grad_(False)
    ends = target_ends(SimpleNamespace(lm_head=embedding, get_input_embeddings=lambda: embedding))
    assert (ends.embed, ends.head, ends.n_vocab, ends.tp_group) == (embedding, embedding, 5, None)
    hidden_1DH = torch.randn(1, 3, 4)
    scores = [[float(vector @ hidden) for vector in embedding.weight] for hidden in hidden_1DH[0]]
    assert likeliest(hidden_1DH, ends).tolist() == [[row.index(max(row)) for row in scores]]
