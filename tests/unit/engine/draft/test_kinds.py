"""Parts of drafts that other trainers publish: each must equal a definition written out in the test."""

from types import SimpleNamespace
from typing import Any, cast

import pytest
import torch
from sglang.srt.layers.quantization.unquant import UnquantizedLinearMethod
from sglang.srt.layers.rotary_embedding import get_rope
from sglang.srt.speculative.domino_utils import domino_greedy_rollout
from torch import nn

from sglang_dflash.engine.draft import domino as ours
from sglang_dflash.engine.draft.attention import gated, own_heads
from sglang_dflash.engine.draft.context import ContextProjection, FeatureNorms
from sglang_dflash.engine.draft.layout import Layout
from sglang_dflash.engine.draft.rotary import rotary_of
from sglang_dflash.engine.draft.target_ends import TargetEnds, likeliest, unscaled, with_copy
from sglang_dflash.engine.draft.tensors import apart, apart_shapes
from sglang_dflash.errors import NotSupported
from sglang_dflash.reference.torch import domino as plain
from tests.fixtures.thread_ranks import ThreadRanks
from tests.unit.engine.draft.test_head_copy import Head
from tests.unit.reference.torch.test_draft import make_config

B, N, H, VOCAB = 3, 5, 32, 50
ANCHOR = 100


# -- layout of a block ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("fields", "slots"),
    [
        ({"sample_from_anchor": False}, [1, 2, 3, 4]),
        ({"sample_from_anchor": True}, [0, 1, 2, 3, 4]),
        ({"sample_from_anchor": False, "shift_label": True}, [0, 1, 2, 3]),
    ],
    ids=str,
)
@pytest.mark.parametrize("width", [2, 4, 5, 6, 8])
@pytest.mark.parametrize("captured", [True, False])
def test_a_layout_puts_each_draft_after_the_anchor(
    fields: dict[str, bool], slots: list[int], width: int, captured: bool
) -> None:
    """A slot's hidden state is its index here, and a draft is the hidden state of the slot that predicts it."""
    layout, mask = Layout.of(**fields), -1
    hidden_BNH = torch.arange(N).expand(B, N)[..., None]
    drafts_BD = layout.predicting(hidden_BNH, None if captured else width)[..., 0]
    planned_BW = torch.full((B, width), mask)
    planned_BW[:, 0] = ANCHOR
    returned = layout.returned(planned_BW, drafts_BD)
    assert not captured or returned.shape[1] == N  # SGLang's graph runner returns a row per slot
    drafts = slots[: width - 1]
    expected = [ANCHOR, *drafts, *[mask] * (width - 1 - len(drafts))]
    assert layout.verified(returned, planned_BW).tolist() == [expected] * B
    assert layout.n_tokens(N) == 1 + len(slots)


# -- a reduced vocabulary ------------------------------------------------------------------------------------------


def offsets(tokens: list[int]) -> torch.Tensor:
    return torch.tensor(tokens) - torch.arange(len(tokens))


@pytest.mark.parametrize("n_ranks", [1, 2, 4])
def test_only_listed_tokens_are_drafted(n_ranks: int) -> None:
    torch.manual_seed(n_ranks)
    n_each, listed = 12, [1, 4, 5, 13, 17, 26, 30, 40, 41]
    weight_VH, hidden_TH = torch.randn(n_ranks * n_each, H), torch.randn(40, H)
    listed = [token for token in listed if token < len(weight_VH)]
    scores = hidden_TH @ weight_VH.T
    expected = [max(listed, key=lambda token, row=row: float(row[token])) for row in scores]
    group = ThreadRanks(n_ranks)

    def on_rank(rank: int) -> torch.Tensor:
        head = nn.Embedding.from_pretrained(weight_VH[rank * n_each : (rank + 1) * n_each])
        shared = cast(Any, group) if n_ranks > 1 else None
        ends = with_copy(TargetEnds(head, head, n_each, rank * n_each, shared), offsets(listed), fp8=False)
        return likeliest(hidden_TH, ends)

    for found in group.run(on_rank):
        assert found.tolist() == expected


def test_the_listed_rows_follow_updates_of_the_head_in_place() -> None:
    head, hidden_TH = Head(), torch.randn(3, H)
    ends = with_copy(TargetEnds(nn.Identity(), head, 40, 0, None), offsets([2, 3, 30]), fp8=False)
    assert ends.copy is not None
    address = ends.copy.rows_DH.data_ptr()
    head.change(1)
    head.quant_method.process_weights_after_loading(head)
    assert ends.copy.rows_DH.data_ptr() == address
    torch.testing.assert_close(ends.copy.logits(hidden_TH), hidden_TH @ head.weight[[2, 3, 30]].T)


def test_rows_of_a_quantized_head_are_computed_by_its_method() -> None:
    head = nn.Module()
    head.register_parameter("packed", nn.Parameter(torch.randn(H, 9), requires_grad=False))
    head.embedding_dim, head.params_dtype = H, torch.float32
    head.quant_method = SimpleNamespace(
        apply=lambda layer, x: x @ layer.packed, process_weights_after_loading=lambda layer: None
    )
    ends = with_copy(TargetEnds(nn.Identity(), head, 9, 0, None, by_method=True), offsets([0, 5, 8]), fp8=False)
    assert ends.copy is not None
    torch.testing.assert_close(ends.copy.rows_DH, head.packed.T[[0, 5, 8]])


def test_a_list_that_does_not_increase_or_that_a_rank_lacks_is_refused() -> None:
    head = nn.Embedding(10, H)
    for wrong in ([3, 3, 4], [5, 2]):
        with pytest.raises(ValueError, match="d2t gives no increasing token ids"):
            with_copy(TargetEnds(head, head, 10, 0, None), offsets(wrong), fp8=False)
    with pytest.raises(NotSupported, match=r"no token of the 10 whose head this rank has; lower --tp-size"):
        with_copy(TargetEnds(head, head, 10, 10, None), offsets([1, 2]), fp8=False)


def test_embeddings_are_unscaled_only_if_asked() -> None:
    """Gemma's embedding multiplies its rows. The trainer `speculators` trains on the rows, z-lab on the product."""

    class Scaled(nn.Embedding):
        embed_scale = 8.0

        def forward(self, input: torch.Tensor) -> torch.Tensor:
            return super().forward(input) * self.embed_scale

    embed, tokens = Scaled(10, H), torch.tensor([[1, 9]])
    torch.testing.assert_close(unscaled(embed)(tokens), embed.weight[tokens])
    assert not torch.equal(unscaled(embed)(tokens), embed(tokens))
    assert unscaled(nn.Embedding(10, H).eval()).__class__ is nn.Embedding


# -- attention and context -----------------------------------------------------------------------------------------


@pytest.mark.parametrize("per_head", [True, False])
def test_the_gate_multiplies_heads_by_softplus(per_head: bool) -> None:
    torch.manual_seed(0)
    attended, gate = torch.randn(4, 3, 8), torch.randn(4, 3, 1 if per_head else 8)
    found = gated(attended.flatten(1), gate.flatten(1))
    torch.testing.assert_close(found.view(4, 3, 8), attended * (1 + gate.exp()).log())


def test_a_rank_has_the_sinks_of_its_heads() -> None:
    of_all = torch.arange(6.0)
    for rank in range(3):
        sinks = nn.Parameter(torch.zeros(2), requires_grad=False)
        own_heads(rank)(sinks, of_all)
        assert sinks.tolist() == [2 * rank, 2 * rank + 1]


def test_each_captured_layer_has_its_own_norm() -> None:
    torch.manual_seed(0)
    norms = [nn.RMSNorm(H, eps=1e-6) for _ in range(3)]
    for norm in norms:
        nn.init.normal_(norm.weight)
    features = torch.randn(5, 3, H)
    expected = torch.cat([norm(features[:, i]) for i, norm in enumerate(norms)], dim=-1)
    torch.testing.assert_close(FeatureNorms(cast(Any, norms), 1e-6)(features.flatten(1)), expected)


@pytest.mark.parametrize("has_norms", [False, True])
def test_the_context_passes_each_layers_input_norm_if_it_has_one(has_norms: bool) -> None:
    torch.manual_seed(0)
    layers = [torch.randn(8 + 2 * 2 * 8, H) for _ in range(3)]  # one query head, two KV heads
    attentions: list[Any] = [
        SimpleNamespace(
            qkv_proj=SimpleNamespace(
                weight=nn.Parameter(weight.clone(), requires_grad=False), bias=None,
                quant_method=UnquantizedLinearMethod(),
            ),
            q_size=8, n_kv_heads=2, head_dim=8,
        )
        for weight in layers
    ]  # fmt: skip
    norms: list[Any] = [nn.RMSNorm(H, eps=1e-6).requires_grad_(False) for _ in layers]
    for norm in norms:
        norm.weight.normal_()
        norm.variance_epsilon = 1e-6
    context_TH = torch.randn(4, H)
    project = ContextProjection(lambda features: features + 1, attentions, norms if has_norms else None)
    k_TLGE, v_TLGE = project.kv(project.fuse(context_TH))
    for i, (weight, norm) in enumerate(zip(layers, norms, strict=True)):
        source = norm(context_TH + 1) if has_norms else context_TH + 1
        expected = (source @ weight[8:].T).view(4, 2, 2, 8)
        torch.testing.assert_close(torch.stack([k_TLGE[:, i], v_TLGE[:, i]], dim=1), expected)


# -- tensors in another form ---------------------------------------------------------------------------------------


def test_fused_projections_are_taken_apart() -> None:
    config, fused = make_config(), torch.randn(4 * 8 + 2 * 2 * 8, 32)
    parts = dict(apart(config, [("layers.0.self_attn.qkv_proj.weight", fused)]))
    assert [tensor.shape[0] for tensor in parts.values()] == [32, 16, 16]
    assert torch.equal(torch.cat(list(parts.values())), fused)
    name = "layers.0.self_attn.{}_proj.weight"
    shapes = {name.format(part): (rows, 32) for part, rows in zip("qkv", (32, 16, 16), strict=True)}
    assert apart_shapes(config, {name.format("qkv"): (64, 32)}) == shapes
    with pytest.raises(ValueError, match=r"qkv_proj.weight has shape \[48, 32\], config.json implies 64 rows"):
        apart_shapes(config, {name.format("qkv"): (48, 32)})


def test_scaled_values_are_a_scaled_output_projection() -> None:
    """The output of attention is linear in the values, so their factor can be one of the output projection."""
    torch.manual_seed(0)
    config = make_config(attention_value_scale=0.612)
    shares, values, weight = torch.randn(5, 7).softmax(-1), torch.randn(7, 32), torch.randn(32, 32)
    ((name, stored),) = apart(config, [("layers.1.self_attn.o_proj.weight", weight)])
    assert name == "layers.1.self_attn.o_proj.weight"
    torch.testing.assert_close(shares @ values @ stored.T, shares @ (0.612 * values) @ weight.T)
    assert all(tensor is weight for _, tensor in apart(config, [("layers.1.self_attn.v_proj.weight", weight)]))


def test_scores_of_neighbouring_pairs_are_those_of_converted_heads() -> None:
    """SGLang's rope in both styles: converted weights, rotated in halves, give the scores of the stored ones."""
    torch.manual_seed(0)
    config, x, positions = make_config(rope_is_neox_style=False), torch.randn(6, 32), torch.arange(6)
    stored = {f"layers.0.self_attn.{part}_proj.weight": torch.randn(rows, 32) for part, rows in (("q", 32), ("k", 16))}

    def scores(weights: dict[str, torch.Tensor], *, neox: bool) -> torch.Tensor:
        rope = get_rope(8, rotary_dim=8, max_position=64, base=100, is_neox_style=neox, dtype=torch.float32)
        q, k = rope.forward_native(positions, *(x @ weight.T for weight in weights.values()))
        return torch.einsum("tghe,sge->tghs", q.view(6, 2, 2, 8), k.view(6, 2, 8))

    converted = dict(apart(config, stored.items()))
    torch.testing.assert_close(scores(converted, neox=True), scores(stored, neox=False))
    assert not torch.allclose(scores(stored, neox=True), scores(stored, neox=False), atol=1e-2)


def test_a_norm_without_its_one_is_completed() -> None:
    config = make_config(use_gemma_norm=True)
    names = ("norm.weight", "layers.1.self_attn.k_norm.weight", "layers.0.input_layernorm.weight", "fc.weight")
    assert [float(tensor) for _, tensor in apart(config, [(name, torch.tensor(0.5)) for name in names])] == [
        1.5, 1.5, 1.5, 0.5,
    ]  # fmt: skip


def test_a_norm_of_neighbouring_pairs_is_made_whole_and_reordered() -> None:
    config, stored = make_config(rope_is_neox_style=False, use_gemma_norm=True), torch.arange(8.0)
    ((_, norm),) = apart(config, [("layers.0.self_attn.k_norm.weight", stored)])
    assert norm.tolist() == [1, 3, 5, 7, 2, 4, 6, 8]
    ((_, norm),) = apart(config, [("norm.weight", stored)])
    assert norm.tolist() == [1, 2, 3, 4, 5, 6, 7, 8]


def test_scores_of_partly_rotated_heads_are_those_of_converted_heads() -> None:
    """SGLang's rope for the first dimensions of a head, and this package's for whole heads, on converted weights."""
    torch.manual_seed(0)
    rope = {"rope_type": "default", "rope_theta": 100.0, "rope_dim": 4}
    config, x, positions = make_config(rope_parameters=rope), torch.randn(6, 32), torch.arange(6)
    stored = {f"self_attn.{part}_proj.weight": torch.randn(rows, 32) for part, rows in (("q", 32), ("k", 16))}
    turned = dict(apart(config, stored.items()))
    scores = []
    for weights, rotary in (
        (stored, get_rope(8, rotary_dim=4, max_position=64, base=100, dtype=torch.float32)),
        (turned, rotary_of(config, 100.0, None)),
    ):
        q, k = (x @ weight.T for weight in weights.values())
        q, k = rotary.forward_native(positions, q, k)
        scores.append(q.view(6, 2, 2, 8).transpose(0, 1).flatten(1, 2) @ k.view(6, 2, 8).movedim(0, 2))
    torch.testing.assert_close(*scores)


# -- Domino --------------------------------------------------------------------------------------------------------


def rollouts() -> tuple[ours.Domino, plain.Domino, nn.Embedding, torch.Tensor]:
    """Return Domino in both forms with equal weights, an embedding, and a head [V, H]."""
    torch.manual_seed(1)
    config = make_config(gru_hidden_dim=16, emb_dim=8)
    here, there = ours.Domino(config), plain.Domino(config)
    for parameter in there.parameters():
        nn.init.normal_(parameter, std=0.5)
    here.load_state_dict(there.state_dict())
    return here, there, nn.Embedding(VOCAB, H), torch.randn(VOCAB, H)


@pytest.mark.parametrize("n_candidates", [4, VOCAB, 64])
@torch.no_grad()
def test_dominos_rollout_equals_plain_torch(n_candidates: int, monkeypatch: pytest.MonkeyPatch) -> None:
    here, there, embed, head = rollouts()
    for module in (ours, plain):
        monkeypatch.setattr(module, "CANDIDATES", n_candidates)
    hidden_BDH, anchor_B = torch.randn(B, N - 1, H), torch.randint(0, VOCAB, (B, N))[:, 0]
    ends = TargetEnds(embed, SimpleNamespace(weight=head), VOCAB, 0, None)
    found = here.path(hidden_BDH.flatten(0, 1), anchor_B, ends)
    assert torch.equal(found, there.walk(hidden_BDH, hidden_BDH @ head.T, anchor_B, embed))
    assert not torch.equal(found, (hidden_BDH @ head.T).argmax(-1)), "the corrections change no draft"


@pytest.mark.parametrize("shift_label", [True, False])
@torch.no_grad()
def test_dominos_rollout_equals_sglangs(shift_label: bool) -> None:
    """SGLang's function, with corrections for the whole vocabulary, as ours has with at most 64 tokens."""
    here, _, embed, head = rollouts()
    hidden_BNH, anchor_B = torch.randn(B, N, H), torch.randint(0, VOCAB, (B,))
    expected = domino_greedy_rollout(
        draft_hidden=hidden_BNH, bonus_tokens=anchor_B, target_embedding=embed, lm_head_weight=head,
        prefix_gru=here.prefix_gru, embed_proj=here.embed_proj, vocab_size=VOCAB, shift_label=shift_label,
        candidate_pool_size=0, in_cuda_graph=False,
    )  # fmt: skip
    layout = Layout.of(sample_from_anchor=False, shift_label=shift_label)
    ends = TargetEnds(embed, SimpleNamespace(weight=head), VOCAB, 0, None)
    assert torch.equal(here.path(layout.predicting(hidden_BNH, None).flatten(0, 1), anchor_B, ends), expected)
