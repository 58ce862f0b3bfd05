"""DFlash 2's convolution and candidate selector in SGLang's form must equal those of the PyTorch reference."""

from types import SimpleNamespace
from typing import Any, cast

import pytest
import torch
from sglang_dflash_kernels.block_conv import block_conv
from sglang_dflash_kernels.select_path import select_path
from torch.utils._python_dispatch import TorchDispatchMode

from sglang_dflash.engine.draft.fill import Blocks, Filling, filled
from sglang_dflash.engine.draft.layout import Layout
from sglang_dflash.engine.draft.second import SGLangBlockConv, SGLangCandidateSelector, convolved
from sglang_dflash.engine.draft.target_ends import TargetEnds
from sglang_dflash.reference.torch import second as plain
from tests.unit.reference.torch.test_draft import make_config
from tests.unit.reference.torch.test_second import SECOND

B, N, H, VOCAB = 3, 4, 32, 50
LAYOUT = Layout.of(sample_from_anchor=False)


config_of = make_config


def same_weights(ours: torch.nn.Module, theirs: torch.nn.Module) -> None:
    torch.manual_seed(0)
    for parameter in theirs.parameters():
        torch.nn.init.normal_(parameter, std=0.5)
    ours.load_state_dict(theirs.state_dict())


def test_a_draft_of_dflash_1_has_neither_part() -> None:
    assert SGLangBlockConv.of(config_of()) is None
    assert SGLangCandidateSelector.of(config_of()) is None
    assert torch.equal(convolved(None, lambda x: 2 * x, torch.ones(4, H), N), torch.full((4, H), 2.0))


def test_the_convolution_equals_plain_torch() -> None:
    ours, theirs = SGLangBlockConv.of(config_of(**SECOND)), plain.BlockConv(make_config(**SECOND))
    same_weights(ours, theirs)
    ours.convolve = block_conv  # also checks that its input has the memory layout that the kernel needs
    hidden = torch.randn(B, N, H)
    got = convolved(ours, torch.tanh, hidden.flatten(0, 1), N)
    torch.testing.assert_close(got.view(B, N, H), plain.convolved(theirs, torch.tanh, hidden))


@pytest.mark.parametrize(
    "fields",
    [
        {},
        {"output_multiplier": 0.3, "final_logit_softcapping": 2.0},
    ],
    ids=str,
)
def test_the_path_equals_plain_torch(fields: dict[str, float | None]) -> None:
    ours = SGLangCandidateSelector.of(config_of(**SECOND, **fields))
    theirs = plain.CandidateSelector(make_config(**SECOND, **fields))
    same_weights(ours, theirs)
    ours.walk = select_path  # also checks that its input has the memory layout that the kernel needs
    head = torch.randn(VOCAB, H)
    ends = TargetEnds(torch.nn.Identity(), SimpleNamespace(weight=head), VOCAB, 0, cast(Any, None))
    # Both tensors are slices, as in the draft: hidden states of all slots but 0, and the anchors in slot 0.
    hidden_BDH, anchor_B = torch.randn(B, N, H)[:, 1:], torch.randint(0, VOCAB, (B, N))[:, 0]
    got = ours.path(hidden_BDH.flatten(0, 1), anchor_B, ends)
    assert torch.equal(got, theirs.walk(hidden_BDH, hidden_BDH @ head.T, anchor_B))


# -- the head is by far the draft's largest weight ---------------------------------------------------------------------


class Products(TorchDispatchMode):
    """Recorder of the matrix products that run inside the context."""

    def __init__(self) -> None:
        super().__init__()
        self.seen: list[tuple[str, list[tuple[int, ...]]]] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: tuple = (), kwargs: dict | None = None) -> Any:
        if func._schema.name in ("aten::mm", "aten::bmm", "aten::addmm", "aten::baddbmm"):
            self.seen.append((func._schema.name, [tuple(x.shape) for x in args if isinstance(x, torch.Tensor)]))
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize("second", [False, True], ids=["dflash", "dflash2"])
def test_head_is_read_once_for_all_requests(second: bool) -> None:
    selector = SGLangCandidateSelector.of(config_of(**SECOND)) if second else None
    ends = TargetEnds(torch.nn.Identity(), SimpleNamespace(weight=torch.randn(VOCAB, H)), VOCAB, 0, cast(Any, None))
    with Products() as products:
        tokens_BN = filled(
            torch.randn(B * N, H),
            Blocks(torch.zeros(B, N, dtype=torch.int64), torch.arange(B)),
            Filling(LAYOUT, selector and selector.path),
            ends,
        )
    assert tokens_BN.shape == (B, N)
    rows = B * (N - 1)
    projection = [("aten::mm", [(rows, H), (H, SECOND["selector_rank"])])] if second else []
    assert products.seen == [("aten::mm", [(rows, H), (H, VOCAB)]), *projection]


@pytest.mark.parametrize("second", [False, True], ids=["dflash", "dflash2"])
def test_head_reads_only_the_slots_to_fill(second: bool) -> None:
    """Filling only some slots gives the same drafts as filling the whole block."""
    selector = SGLangCandidateSelector.of(config_of(**SECOND)) if second else None
    ends = TargetEnds(torch.nn.Identity(), SimpleNamespace(weight=torch.randn(VOCAB, H)), VOCAB, 0, cast(Any, None))
    hidden_TH, blocks = torch.randn(B * N, H), Blocks(torch.zeros(B, N, dtype=torch.int64), torch.arange(B))
    whole_BN = filled(hidden_TH, blocks, Filling(LAYOUT, selector and selector.path), ends)
    for n_filled in (2, N - 1, N, N + 4):
        with Products() as products:
            tokens_BN = filled(hidden_TH, blocks, Filling(LAYOUT, selector and selector.path), ends, n_filled)
        assert torch.equal(tokens_BN, whole_BN[:, :n_filled])
        assert products.seen[0] == ("aten::mm", [(B * (min(n_filled, N) - 1), H), (H, VOCAB)])
