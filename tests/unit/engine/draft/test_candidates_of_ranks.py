"""Ranks that each have a shard of the head must find the best candidates of the whole vocabulary."""

from types import SimpleNamespace
from typing import Any

import torch

from sglang_dflash.engine.draft.target_ends import best_candidates
from tests.fixtures.thread_ranks import ThreadRanks

RANKS, SHARD, K = 3, 10, 4


def test_candidates_equal_those_of_the_whole_vocabulary() -> None:
    torch.manual_seed(0)
    weight_VH, hidden_TH = torch.randn(RANKS * SHARD, 8), torch.randn(5, 8)
    group = ThreadRanks(RANKS)

    def on_rank(rank: int) -> tuple[torch.Tensor, torch.Tensor]:
        shard = weight_VH[rank * SHARD : (rank + 1) * SHARD]
        ends: Any = SimpleNamespace(
            head=SimpleNamespace(weight=shard), n_vocab=SHARD, first_token=rank * SHARD, tp_group=group, copy=None,
            by_method=False, top_k=lambda logits, k: logits.topk(k, dim=-1),
        )  # fmt: skip
        return best_candidates(hidden_TH, ends, K)

    best = (hidden_TH @ weight_VH.T).topk(K, dim=-1)
    for tokens_TK, logits_TK in group.run(on_rank):
        assert torch.equal(tokens_TK, best.indices)
        torch.testing.assert_close(logits_TK, best.values)
