"""The texts that copies are taken from: written with prompts and steps, whoever had the row before."""

from array import array
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from sglang_dflash_kernels.accept import accept_ref

from sglang_dflash.flags import Copy
from sglang_dflash.stages.copier import NoCopies, RandomCopies, TextCopies, make_copier

VOCABULARY, M = 100, 60
TABLE = torch.zeros(4, M, dtype=torch.int32)
TEXT = [*range(1, 21), *range(1, 16)]  # its last fifteen tokens were there before, and then came 16, 17, ...


def batch_of(*texts: list[int], rows: list[int]) -> Any:
    reqs = [
        SimpleNamespace(kv=SimpleNamespace(req_pool_idx=row), get_fill_ids=lambda text=text: array("q", text))
        for row, text in zip(rows, texts, strict=True)
    ]
    return SimpleNamespace(reqs=reqs)


def plan_of(prefix_len: list[int], rows: list[int], width: int) -> Any:
    return SimpleNamespace(prefix_len_B=torch.tensor(prefix_len), rows_B=torch.tensor(rows), width=width)


def step(copies: TextCopies, prefix_len: int, row: int, block: list[int], said: list[int]) -> list[int]:
    """What was verified; the target says `said`."""
    plan = plan_of([prefix_len], [row], len(block))
    tokens_BN = copies.copy(plan, torch.tensor([block]))
    copies.weigh(accept_ref(tokens_BN, torch.tensor([said]), plan.prefix_len_B))
    return tokens_BN[0].tolist()


def test_a_prompt_and_its_steps_are_copied_from() -> None:
    copies = TextCopies(TABLE, VOCABULARY)
    copies.read(batch_of([50, 51], TEXT, rows=[1, 3]))
    assert step(copies, len(TEXT), 3, [16, 60, 61], [17, 18, 19]) == [16, 17, 18]
    # The next anchor is 19, behind what the step kept.
    assert copies.text_QM[3, : len(TEXT) + 3].tolist() == [*TEXT, 16, 17, 18]
    assert step(copies, len(TEXT) + 3, 3, [19, 60, 61], [20, 1, 2]) == [19, 20, 1]
    assert copies.text_QM[1, :2].tolist() == [50, 51]


def test_a_rejected_copy_is_not_text() -> None:
    copies = TextCopies(TABLE, VOCABULARY)
    copies.read(batch_of(TEXT, rows=[3]))
    step(copies, len(TEXT), 3, [16, 60, 61], [40, 0, 0])
    step(copies, len(TEXT) + 1, 3, [40, 62, 63], [41, 0, 0])
    assert copies.text_QM[3, : len(TEXT) + 4].tolist() == [*TEXT, 16, 40, 62, 63]


def test_a_step_that_drafts_nothing_is_text_too() -> None:
    copies = TextCopies(TABLE, VOCABULARY)
    copies.read(batch_of(TEXT[:-1], rows=[3]))
    assert step(copies, len(TEXT) - 1, 3, [15], [16]) == [15]
    assert not copies.counts_QK2.any()
    assert step(copies, len(TEXT), 3, [16, 60, 61], [17, 18, 19]) == [16, 17, 18]


def test_the_next_request_of_a_row_learns_anew() -> None:
    copies = TextCopies(TABLE, VOCABULARY)
    copies.read(batch_of(TEXT, rows=[2]))
    for _ in range(3):  # copies fail, the block does not
        step(copies, len(TEXT), 2, [16, 60, 61], [60, 61, 62])
    assert step(copies, len(TEXT), 2, [16, 60, 61], [60, 61, 62]) == [16, 60, 61]
    other = copies.counts_QK2.clone()
    copies.read(batch_of([9, 8, 7], rows=[1]))
    assert torch.equal(copies.counts_QK2, other)
    copies.read(batch_of(TEXT, rows=[2]))
    assert step(copies, len(TEXT), 2, [16, 60, 61], [60, 61, 62]) == [16, 17, 18]


def test_a_shorter_text_in_the_row_ends_where_it_ends() -> None:
    """Behind it stands the one before."""
    copies = TextCopies(TABLE, VOCABULARY)
    copies.read(batch_of(TEXT, rows=[3]))
    copies.read(batch_of(TEXT[-15:], rows=[3]))
    assert step(copies, 15, 3, [16, 60, 61], [17, 18, 19]) == [16, 60, 61]


def test_a_picture_is_no_text() -> None:
    copies = TextCopies(TABLE, VOCABULARY)
    copies.read(batch_of([1, VOCABULARY - 1, VOCABULARY, 1 << 40, 2], rows=[0]))
    assert copies.text_QM[0, :5].tolist() == [1, VOCABULARY - 1, -1, -1, 2]


def test_totals_say_what_was_copied_and_kept() -> None:
    copies = TextCopies(TABLE, VOCABULARY)
    copies.read(batch_of(TEXT, rows=[3]))
    step(copies, len(TEXT), 3, [16, 60, 61], [17, 18, 19])
    assert copies.totals_K2.tolist() == [[0, 0], [0, 0], [0, 0], [0, 0], [1, 2]]


@pytest.mark.parametrize(("copy", "kind"), [(Copy.OFF, NoCopies), (Copy.AUTO, TextCopies), (Copy.RANDOM, RandomCopies)])
def test_which_servers_copy(copy: Copy, kind: type) -> None:
    assert type(make_copier(copy, "null", TABLE, VOCABULARY)) is kind


def test_random_copies_are_sometimes_taken_and_the_same_on_every_rank() -> None:
    ranks = [RandomCopies(TABLE, VOCABULARY) for _ in range(2)]
    said = []
    for copies in ranks:
        copies.read(batch_of(TEXT, rows=[3]))
        said.append([step(copies, len(TEXT), 3, [16, 60, 61], [60, 61, 62]) for _ in range(20)])
    assert said[0] == said[1]
    assert [16, 60, 61] in said[0]
    assert [16, 17, 18] in said[0]


def test_without_copies_a_block_stays_as_it_is() -> None:
    tokens_BN = torch.tensor([[16, 60, 61]])
    assert NoCopies().copy(plan_of([7], [3], 3), tokens_BN) is tokens_BN
