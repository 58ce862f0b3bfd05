"""Copies: n-gram copies from one token history, step by step."""

import torch

from sglang_dflash.model.copies import Copies, DecodedStep

TEXT = [*range(1, 21), *range(1, 16)]  # the last fifteen tokens occurred before, followed by 16, 17, ...
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
    """The copy's two drafts are accepted first and none of the block's, then none against one."""
    copies = Copies(TEXT)
    copies.copy(torch.tensor([16, 60, 61]))
    copies.weigh(DecodedStep([17, 18, 19], 2))
    assert copies.counts_1K2[0, LONGEST_CLASS].tolist() == [2, 1]
    copies.copy(torch.tensor([19, 60, 61]))
    copies.weigh(DecodedStep([60], 0))
    assert copies.counts_1K2[0, LONGEST_CLASS].tolist() == [1, 2]
    assert copies.totals_K2[LONGEST_CLASS].tolist() == [2, 2]  # blocks continued by a copy, drafts accepted
    assert not copies.totals_K2[:LONGEST_CLASS].any()
