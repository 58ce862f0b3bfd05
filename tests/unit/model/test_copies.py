"""Copies from one text, step by step, by hand."""

import torch

from sglang_dflash.model.copies import Copies, DecodedStep

TEXT = [*range(1, 21), *range(1, 16)]  # its last fifteen tokens were there before, and then came 16, 17, ...
LONGEST_CLASS = -1


def test_a_text_goes_on_with_what_each_step_kept() -> None:
    copies = Copies(TEXT)
    assert copies.copy(torch.tensor([16, 60, 61])).tolist() == [16, 17, 18]
    copies.weigh(DecodedStep([17, 18, 19], 2))
    assert copies.text == [*TEXT, 16, 17, 18]  # and 19 is the next anchor
    assert copies.copy(torch.tensor([19, 60, 61])).tolist() == [19, 20, 1]
    copies.weigh(DecodedStep([40], 0))
    assert copies.text == [*TEXT, 16, 17, 18, 19]
    assert copies.copy(torch.tensor([40, 60, 61])).tolist() == [40, 60, 61]


def test_copies_are_worth_what_they_commit_more_than_the_block() -> None:
    """Of two drafts both against the block's none; then none against the block's one."""
    copies = Copies(TEXT)
    copies.copy(torch.tensor([16, 60, 61]))
    copies.weigh(DecodedStep([17, 18, 19], 2))
    assert copies.counts_1K2[0, LONGEST_CLASS].tolist() == [2, 1]
    copies.copy(torch.tensor([19, 60, 61]))
    copies.weigh(DecodedStep([60], 0))
    assert copies.counts_1K2[0, LONGEST_CLASS].tolist() == [1, 2]
    assert copies.totals_K2[LONGEST_CLASS].tolist() == [2, 2]  # blocks that a copy continued, its drafts accepted
    assert not copies.totals_K2[:LONGEST_CLASS].any()
