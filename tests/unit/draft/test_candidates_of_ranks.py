"""Best candidates where ranks share the head: equal to those of the whole vocabulary."""

from types import SimpleNamespace
from typing import Any

import pytest
import torch

from sglang_dflash.draft.target_ends import best_candidates

RANKS, SHARD, K = 3, 10, 4


class Group:
    """One rank's view of a group whose other ranks have contributed already."""

    def __init__(self, others: list[list[torch.Tensor]], rank: int) -> None:
        self.others, self.rank, self.n_gathered = others, rank, 0

    def all_gather(self, own: torch.Tensor, dim: int) -> torch.Tensor:
        parts = [gathered[self.n_gathered] for gathered in self.others]
        parts[self.rank] = own
        self.n_gathered += 1
        return torch.cat(parts, dim=dim)


def ends_of(rank: int, weight_VH: torch.Tensor, group: Any) -> Any:
    """Return the ends of a rank with its shard of the head."""
    shard = weight_VH[rank * SHARD : (rank + 1) * SHARD]
    return SimpleNamespace(
        head=SimpleNamespace(weight=shard), n_vocab=SHARD, first_token=rank * SHARD, tp_group=group, fp8_head=None,
        quantized=False, top_k=lambda logits, k: logits.topk(k, dim=-1),
    )  # fmt: skip


@pytest.mark.parametrize("rank", range(RANKS))
def test_candidates_equal_those_of_the_whole_vocabulary(rank: int) -> None:
    torch.manual_seed(0)
    weight_VH, hidden_TH = torch.randn(RANKS * SHARD, 8), torch.randn(5, 8)
    given = [
        [logits, tokens]
        for tokens, logits in (best_candidates(hidden_TH, ends_of(r, weight_VH, None), K) for r in range(RANKS))
    ]
    tokens_TK, logits_TK = best_candidates(hidden_TH, ends_of(rank, weight_VH, Group(given, rank)), K)
    best = (hidden_TH @ weight_VH.T).topk(K, dim=-1)
    assert torch.equal(tokens_TK, best.indices)
    torch.testing.assert_close(logits_TK, best.values)
