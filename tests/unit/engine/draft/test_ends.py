"""Target ends: the target's embedding and head, which the draft uses, and targets that are refused."""

from types import SimpleNamespace
from typing import Any, cast

import pytest
import torch
from sglang.srt.lora.layers import BaseLayerWithLoRA

from sglang_dflash.engine.draft.target_ends import TargetEnds, head_logits, likeliest, target_ends
from sglang_dflash.errors import NotSupported
from tests.fixtures.thread_ranks import ThreadRanks


def test_a_target_that_scales_embeddings_is_refused() -> None:
    """SGLang's worker scales the block's embeddings. This plugin does not, so drafts would be bad without an error."""
    model = SimpleNamespace(get_dflash_noise_embedding_scale=lambda: 8.0)
    with pytest.raises(NotSupported, match="get_dflash_noise_embedding_scale is not applied to what the draft embeds"):
        target_ends(model)


def test_a_head_that_is_the_embedding_itself_is_borrowed_whole() -> None:
    """Gemma's head is its embedding. Unlike SGLang's other heads it has no quantization method and no shards."""
    embedding = torch.nn.Embedding(5, 4).requires_grad_(False)
    ends = target_ends(SimpleNamespace(lm_head=embedding, get_input_embeddings=lambda: embedding))
    assert (ends.embed, ends.head, ends.n_vocab, ends.tp_group) == (embedding, embedding, 5, None)
    hidden_TH = torch.randn(3, 4)
    scores = [[float(vector @ hidden) for vector in embedding.weight] for hidden in hidden_TH]
    assert likeliest(hidden_TH, ends).tolist() == [row.index(max(row)) for row in scores]


def test_ends_with_adapters_are_borrowed_without_them() -> None:
    """SGLang wraps embedding and head in LoRA layers, which need the batch's adapters. The draft has no adapters."""
    layers = [torch.nn.Embedding(5, 4).requires_grad_(False) for _ in range(2)]
    head, embed = (BaseLayerWithLoRA(layer, lora_backend=None) for layer in layers)
    ends = target_ends(SimpleNamespace(lm_head=head, get_input_embeddings=lambda: embed))
    assert [ends.head, ends.embed] == layers


@pytest.mark.parametrize("n_ranks", [2, 4])
def test_ranks_with_a_shard_of_the_head_each_find_the_same_token(n_ranks: int) -> None:
    """The result is the argmax over the whole head. The lowest id wins a tie. Padding rows score higher but lose."""
    torch.manual_seed(n_ranks)
    n_each, group = 5, ThreadRanks(n_ranks)
    weight_VH = torch.randn(n_ranks * n_each, 4)
    weight_VH[2] *= 10
    weight_VH[7] = weight_VH[2]
    hidden_TH = torch.randn(18, 4)
    hidden_TH[0] = weight_VH[2]

    def on_rank(rank: int) -> torch.Tensor:
        padded = torch.cat([weight_VH[rank * n_each : (rank + 1) * n_each], hidden_TH * 1e3])
        ends = TargetEnds(torch.nn.Identity(), SimpleNamespace(weight=padded), n_each, rank * n_each, cast(Any, group))
        return likeliest(hidden_TH, ends)

    found = group.run(on_rank)
    whole_T = (hidden_TH @ weight_VH.T).argmax(dim=-1)
    assert all(torch.equal(token_T, whole_T) for token_T in found)
    assert whole_T[0] == 2


class Doubles:
    """A quantization method whose product is twice the plain one."""

    def apply(self, layer: Any, x: torch.Tensor, bias: None = None) -> torch.Tensor:
        return 2 * x @ layer.packed.T


def test_a_quantized_head_uses_its_own_method(monkeypatch: pytest.MonkeyPatch) -> None:
    """The head's last row is padding. Its score is the highest, but it is never chosen."""
    head = torch.nn.Module()
    head.register_parameter("packed", torch.nn.Parameter(torch.tensor([[1.0, 0], [0, 1], [9, 9]])))
    head.quant_method, head.tp_size, head.org_vocab_size = Doubles(), 1, 2
    head.shard_indices = SimpleNamespace(num_org_elements=2, org_vocab_start_index=0)
    embed = torch.nn.Embedding(3, 2)
    monkeypatch.setattr(f"{target_ends.__module__}.get_parallel", lambda: SimpleNamespace(attn_dp_enabled=False))
    ends = target_ends(SimpleNamespace(lm_head=head, get_input_embeddings=lambda: embed))
    assert ends.by_method
    hidden = torch.tensor([[3.0, 1], [1, 3]])
    assert head_logits(hidden, ends).tolist() == [[6, 2], [2, 6]]
    assert likeliest(hidden, ends).tolist() == [0, 1]
