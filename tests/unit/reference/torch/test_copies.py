"""Copies: n-gram copies from one token history, step by step."""

import torch

from sglang_dflash.reference.torch.copies import Copies, DecodedStep

TEXT = [*range(1, 21), *range(1, 16)]  # the last 15 tokens also begin the text, where 16, 17, ... follow
LONGEST_CLASS = -1


def test_the_history_grows_by_the_kept_tokens() -> None:
    copies = Copies(TEXT)
    assert copies.copy(torch.tensor([16, 60, 61])).tolist() == [16, 17, 18]
    copies.weigh(DecodedStep([17, 18, 19], 2))
    assert copies.text == [*TEXT, 16, 17, 18]  # the next anchor is 19
    assert copies.copy(torch.tensor([19, 60, 61])).tolist() == [19, 20, 1]
    copies.weigh(DecodedStep([40], 0))
    assert copies.text == [*TEXT, 16, 17, 18, 19]
    assert copies.copy(torch.tensor([40, 60, 61])).tolist() == [40, 60, 61]


def test_counts_compare_copies_with_the_block() -> None:
    """`counts_1K2` has the number of drafts gained by copies, and the number of blocks with a copy.

    In the first step the copy gains two drafts: both are accepted, and no guess of the block would be. In the second
    step the copy loses one: no copied draft is accepted, and one guess of the block would be.
    """
    copies = Copies(TEXT)
    copies.copy(torch.tensor([16, 60, 61]))
    copies.weigh(DecodedStep([17, 18, 19], 2))
    assert copies.counts_1K2[0, LONGEST_CLASS].tolist() == [2, 1]
    copies.copy(torch.tensor([19, 60, 61]))
    copies.weigh(DecodedStep([60], 0))
    assert copies.counts_1K2[0, LONGEST_CLASS].tolist() == [1, 2]
    assert copies.totals_K2[LONGEST_CLASS].tolist() == [2, 2]  # blocks with a copy, accepted copied drafts
    assert not copies.totals_K2[:LONGEST_CLASS].any()
