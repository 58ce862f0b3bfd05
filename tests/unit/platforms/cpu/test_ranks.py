"""Exchange of token rows between ranks: rows at an offset, and this rank's rows of a sum."""

from types import SimpleNamespace
from typing import Any

import pytest
import torch

from sglang_dflash.platforms.cpu.ranks import memcpy, reduce_scatter_tensor

ROWS_T2 = torch.arange(1, 11).view(5, 2)


@pytest.mark.parametrize(("offset", "n"), [(0, 2), (2, 3), (3, 0), (4, 1)])
def test_rows_are_copied_to_an_offset_and_back(offset: int, n: int) -> None:
    gathered_T2, own_T2 = torch.zeros(5, 2, dtype=torch.int64), torch.zeros(3, 2, dtype=torch.int64)
    where: tuple[Any, ...] = 0, torch.tensor(offset), torch.tensor(n)
    memcpy(gathered_T2, ROWS_T2[:3], *where, offset_src=False)
    assert gathered_T2[offset : offset + n].tolist() == ROWS_T2[:n].tolist()
    assert gathered_T2.count_nonzero() == 2 * n, "other rows stay"
    memcpy(own_T2, ROWS_T2, *where, offset_src=True)
    assert own_T2[:n].tolist() == ROWS_T2[offset : offset + n].tolist()
    assert own_T2.count_nonzero() == 2 * n


@pytest.mark.parametrize("rank", [0, 1])
def test_each_rank_gets_its_own_rows_of_the_sum(rank: int) -> None:
    """The other rank has the same rows, so sums are twice as large."""
    group: Any = SimpleNamespace(rank_in_group=rank, all_reduce=lambda rows: rows.mul_(2))
    rows_T2, out_T2 = ROWS_T2[:4].clone(), torch.zeros(2, 2, dtype=torch.int64)
    assert reduce_scatter_tensor(group, out_T2, rows_T2) is out_T2
    assert torch.equal(out_T2, 2 * ROWS_T2[2 * rank : 2 * rank + 2])
    assert torch.equal(rows_T2, ROWS_T2[:4]), "the input stays"
