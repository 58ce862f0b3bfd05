"""The target's head is by far the draft's largest weight: a block of any number of requests reads it once."""

from types import SimpleNamespace
from typing import Any, cast

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from sglang_dflash.draft.fill import filled
from sglang_dflash.draft.second import SGLangCandidateSelector
from sglang_dflash.draft.target_ends import TargetEnds
from tests.unit.draft.test_second import as_sglang_says
from tests.unit.model.test_second import SECOND

B, N, H, VOCAB = 3, 4, 32, 50


class Products(TorchDispatchMode):
    """Lists the matrix products that run while it is entered."""

    def __init__(self) -> None:
        super().__init__()
        self.seen: list[tuple[str, list[tuple[int, ...]]]] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: tuple = (), kwargs: dict | None = None) -> Any:
        if func._schema.name in ("aten::mm", "aten::bmm", "aten::addmm", "aten::baddbmm"):
            self.seen.append((func._schema.name, [tuple(x.shape) for x in args if isinstance(x, torch.Tensor)]))
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize("second", [False, True], ids=["dflash", "dflash2"])
def test_head_is_read_once_for_all_requests(second: bool) -> None:
    selector = SGLangCandidateSelector.of(as_sglang_says(**SECOND)) if second else None
    ends = TargetEnds(torch.nn.Identity(), SimpleNamespace(weight=torch.randn(VOCAB, H)), VOCAB, 0, cast(Any, None))
    with Products() as products:
        tokens_BN = filled(torch.randn(B * N, H), torch.zeros(B, N, dtype=torch.int64), selector, ends)
    assert tokens_BN.shape == (B, N)
    rows = B * (N - 1)
    projection = [("aten::mm", [(rows, H), (H, SECOND["selector_rank"])])] if second else []
    assert products.seen == [("aten::mm", [(rows, H), (H, VOCAB)]), *projection]
