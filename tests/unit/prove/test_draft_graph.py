"""The draft forward that `prove` times: what it reads, and the verdict on its times."""

import pytest
import torch

from sglang_dflash.prove import draft_graph
from sglang_dflash.prove.draft_graph import Shapes, forward, judge, make
from tests.unit.draft.test_head_cost import Products

SMALL = Shapes(n_layers=2, hidden=8, heads=2, kv_heads=1, head_dim=4, intermediate=12, n_vocab=20, block=4)


def test_forward_multiplies_by_each_weight_once() -> None:
    weights = make(SMALL, "cpu", torch.float32)
    with Products() as products:
        tokens_BN = forward(weights, 3, SMALL.block)()
    assert tokens_BN.shape == (3, SMALL.block)
    assert [name for name, _ in products.seen] == ["aten::mm"] * (4 * SMALL.n_layers + 1)
    assert products.seen[-1][1] == [(3 * (SMALL.block - 1), SMALL.hidden), (SMALL.hidden, SMALL.n_vocab)]


def test_default_shapes_have_the_bytes_of_the_27b_draft() -> None:
    """3.2 GB of layers in bf16, and a head of 2.5 GB."""
    *layers, head = [2 * n * m for n, m in Shapes().weights]
    assert sum(layers) == pytest.approx(3.2e9, rel=0.01)
    assert head == pytest.approx(2.5e9, rel=0.02)


def test_head_read_once_per_request_fails() -> None:
    good, bad = judge({1: 1.4, 8: 1.5, 32: 4.5}), judge({1: 1.4, 8: 5.7, 32: 22.0})
    assert (good.text, good.holds) == ("1.40 / 1.50 / 4.50 ms for 1, 8, 32 requests", True)
    assert not bad.holds
    assert draft_graph.BATCHES == (1, 8, 32)
