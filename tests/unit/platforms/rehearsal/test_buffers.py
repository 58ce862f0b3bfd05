"""The GPU emulation must refuse verify widths whose attention backends have large buffers of their own."""

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from sglang.srt.layers.attention.verify_mask import VerifyMask
from sglang.srt.speculative.eagle_utils import TreeMaskMode

from sglang_dflash.platforms.rehearsal.buffers import NotShared, require_shared

LARGE = 64  # elements


def backend(**held: Any) -> SimpleNamespace:
    return SimpleNamespace(lengths=torch.zeros(8), max_context_len=32, **held)


def test_large_buffers_of_the_widest_are_allowed() -> None:
    slots, table = torch.zeros(2 * LARGE), torch.zeros(8, LARGE // 8)
    widest = backend(slots=[slots], tables={"page_table": table, 4: "metadata of graphs for four requests"})
    narrow = backend(slots=[slots], tables={"page_table": table})
    require_shared({16: widest, 4: narrow}, widest, LARGE)


@pytest.mark.parametrize(
    "held",
    [
        torch.zeros(LARGE),
        [torch.zeros(LARGE)],
        {"page_table": torch.zeros(8, LARGE // 8)},
        VerifyMask(torch.zeros(LARGE), TreeMaskMode.FULL_MASK, max_bs=4),
    ],
    ids=["tensor", "list", "dictionary", "mask"],
)
def test_a_large_buffer_of_a_narrower_width_is_refused(held: Any) -> None:
    widest = backend(slots=torch.zeros(LARGE))
    with pytest.raises(NotShared, match=r"width 4 has its own slots \(.*\); share it in stages/index_buffers\.py"):
        require_shared({4: backend(slots=held), 16: widest}, widest, LARGE)
