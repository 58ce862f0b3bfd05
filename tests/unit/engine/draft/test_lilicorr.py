"""LiLiCorr's head: equal drafts in the PyTorch reference, in SGLang's form, and in SGLang's own model class."""

from types import SimpleNamespace
from typing import Any, cast

import pytest
import torch
from sglang.srt.models.lilicorr import LiLiCorrHead
from sglang.srt.speculative.lilicorr_utils import LiLiCorrConfig
from torch import nn

from sglang_dflash.engine.draft import lilicorr as ours
from sglang_dflash.engine.draft.fill import Blocks, Filling, filled
from sglang_dflash.engine.draft.layout import Layout
from sglang_dflash.engine.draft.lilicorr_fields import LiLiCorrSizes
from sglang_dflash.engine.draft.target_ends import TargetEnds, most_probable
from sglang_dflash.engine.draft.tensors import expected_shapes
from sglang_dflash.reference.torch import lilicorr as plain
from tests.fixtures.thread_ranks import ThreadRanks
from tests.unit.reference.torch.test_draft import make_config

B, H, VOCAB = 3, 32, 50
SIZES = LiLiCorrSizes(4, 24, 2, 4, 2.0, 8, 1e-6, 5.0)
AS_WIDE = SIZES._replace(hidden_size=0)  # as wide as the draft: no projection of tokens


class Heads:
    """The head in both forms with equal weights, a target's ends, and the inputs of B blocks."""

    def __init__(self, sizes: LiLiCorrSizes) -> None:
        torch.manual_seed(0)
        self.config = config = make_config(lilicorr=sizes)
        self.here, self.there = ours.LiLiCorr(config), plain.LiLiCorr(config)
        for parameter in self.there.parameters():
            nn.init.normal_(parameter, std=0.5)
        self.here.load_state_dict(self.there.state_dict())
        self.here.make_room(7)
        self.rows, self.context_BH = torch.tensor([5, 1, 3]), torch.randn(B, H)
        self.here.last.keep(ours.Last(self.rows, torch.tensor([4, 0, 2])), self.context_BH.repeat_interleave(2, 0))
        self.context_BH = self.context_BH[[2, 0, 1]]
        self.head, self.embed = torch.randn(VOCAB, H), nn.Embedding(VOCAB, H)
        self.hidden_BNH = torch.randn(B, config.block_size, H)
        self.ends = TargetEnds(self.embed, SimpleNamespace(weight=self.head), VOCAB, 0, None)

    def block(self, n_drafts: int) -> plain.Block:
        hidden_BDH = self.hidden_BNH[:, 1 : n_drafts + 1]
        tokens, log_p = self.there.candidates(hidden_BDH @ self.head.T)
        return plain.Block(tokens, log_p, self.embed(tokens), hidden_BDH, self.context_BH)


@pytest.fixture(params=[SIZES, AS_WIDE], ids=["narrow", "as wide as the draft"])
def heads(request: pytest.FixtureRequest) -> Heads:
    return Heads(request.param)


@pytest.mark.parametrize("n_drafts", [1, 2, None])
@torch.no_grad()
def test_drafts_equal_plain_torch(heads: Heads, n_drafts: int | None) -> None:
    n = n_drafts or heads.config.n_drafts
    found = heads.here.path(heads.hidden_BNH[:, 1 : n + 1].flatten(0, 1), heads.rows, heads.ends)
    assert torch.equal(found, heads.there.walk(heads.block(n)))
    if n_drafts is None:
        argmax = (heads.hidden_BNH[:, 1:] @ heads.head.T).argmax(-1)
        assert not torch.equal(found, argmax), "the head changes no draft"


@torch.no_grad()
def test_drafts_equal_sglangs(heads: Heads) -> None:
    config, block = heads.config, heads.block(heads.config.n_drafts)
    theirs = LiLiCorrHead(
        model_hidden_size=H, block_size=config.block_size, rms_norm_eps=config.rms_norm_eps,
        config=LiLiCorrConfig(*config.lilicorr),
    )  # fmt: skip
    theirs.load_state_dict(heads.there.state_dict())
    theirs.materialize_inference_buffers(torch.device("cpu"), torch.float32)
    selected, _ = theirs.select_with_proposal(
        token_embeddings=block.embedding_XDKH, candidate_tokens=block.token_XDK, candidate_log_probs=block.log_p_XDK,
        pass_hidden=block.hidden_XDH, anchor_hidden=block.context_XH, anchor_valid=torch.ones(B, dtype=torch.bool),
        uniforms=torch.zeros(B, config.n_drafts), temperatures=torch.ones(B),
        greedy_mask=torch.ones(B, dtype=torch.bool),
    )  # fmt: skip
    assert torch.equal(selected, heads.there.walk(block))


@torch.no_grad()
def test_drafts_depend_on_the_context_and_on_every_slot(heads: Heads) -> None:
    """So a block is filled whole, although only its first tokens are returned."""
    blocks = Blocks(torch.zeros(B, heads.config.block_size, dtype=torch.int64), heads.rows)
    filling = Filling(Layout.of(sample_from_anchor=False), heads.here.path, by_row=True)
    whole = filled(heads.hidden_BNH.flatten(0, 1), blocks, filling, heads.ends)
    part = filled(heads.hidden_BNH.flatten(0, 1), blocks, filling, heads.ends, 3)
    assert torch.equal(part, whole[:, :3])
    other = filled(heads.hidden_BNH.flatten(0, 1), blocks._replace(rows_B=torch.tensor([1, 3, 5])), filling, heads.ends)
    assert not torch.equal(other, whole), "the context changes no draft"


def test_the_files_tensors_are_the_heads(heads: Heads) -> None:
    found = {f"lilicorr.{name}": tuple(tensor.shape) for name, tensor in heads.there.state_dict().items()}
    assert found == {name: s for name, s in expected_shapes(heads.config).items() if name.startswith("lilicorr.")}


def test_ranks_sum_the_probabilities_of_their_shards(heads: Heads) -> None:
    hidden_TH = heads.hidden_BNH[:, 1:].flatten(0, 1)
    wanted, group, half = most_probable(hidden_TH, heads.ends, 4), ThreadRanks(2), VOCAB // 2

    def on_rank(rank: int) -> tuple[torch.Tensor, torch.Tensor]:
        shard = SimpleNamespace(weight=heads.head[rank * half : (rank + 1) * half])
        return most_probable(hidden_TH, TargetEnds(heads.embed, shard, half, rank * half, cast(Any, group)), 4)

    for found in group.run(on_rank):
        assert torch.equal(found[0], wanted[0])
        torch.testing.assert_close(found[1], wanted[1])
