"""Planner: the tokens and KV slots of a block, and the upper bounds of lengths from which the host plans attention."""

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from sglang_dflash.engine.stages.planner import Planner
from sglang_dflash.engine.step import Plan

N = 8  # tokens of a whole block
WIDEST = 12  # tokens of the widest verify
MASK = 99


def planner() -> Planner:
    rows = torch.arange(4 * 64, dtype=torch.int32).view(4, 64)  # row r, position p: KV slot 64 r + p
    runner: Any = SimpleNamespace(
        req_to_token_pool=SimpleNamespace(req_to_token=rows),
        kv_index_translator=SimpleNamespace(plan=lambda **asked: asked),
    )
    return Planner(runner, N, WIDEST, MASK)


def plan(width: int, *, prefix: list[int], on_host: list[int] | None, allocated: list[int] | None) -> Plan:
    n_requests = len(prefix)
    batch: Any = SimpleNamespace(
        spec_info=SimpleNamespace(
            bonus_tokens=torch.arange(n_requests) + 10,
            allocated_B_cpu=None if allocated is None else torch.tensor(allocated, dtype=torch.int32),
        ),
        seq_lens=torch.tensor(prefix),
        seq_lens_cpu=None if on_host is None else torch.tensor(on_host),
        req_pool_indices=torch.arange(n_requests) + 1,
        req_pool_indices_cpu=torch.arange(n_requests) + 1,
    )
    return planner().plan(batch, width)


def test_a_block_is_the_anchor_and_masks_after_the_prefix() -> None:
    made = plan(N, prefix=[5, 20], on_host=[5, 20], allocated=None)
    assert made.drafted is made.verified, "one block, planned once"
    assert made.verified.tokens_BN.tolist() == [[10] + [MASK] * (N - 1), [11] + [MASK] * (N - 1)]
    assert made.verified.positions_BN.tolist() == [list(range(5, 5 + N)), list(range(20, 20 + N))]
    assert made.verified.slots_BN.tolist() == [list(range(64 + 5, 64 + 5 + N)), list(range(128 + 20, 128 + 20 + N))]


@pytest.mark.parametrize(("width", "n_drafted"), [(1, None), (3, N), (N, N), (WIDEST, N)])
def test_a_step_of_any_width_drafts_the_whole_block_and_width_one_nothing(width: int, n_drafted: int | None) -> None:
    made = plan(width, prefix=[5], on_host=[5], allocated=None)
    assert made.verified.tokens_BN.shape == (1, width)
    assert (made.drafted and made.drafted.tokens_BN.shape[1]) == n_drafted


@given(
    width=st.integers(1, WIDEST),
    requests=st.lists(st.tuples(st.integers(1, 40), st.integers(0, WIDEST)), min_size=1, max_size=3),
    exact=st.booleans(),
)
def test_no_block_ends_past_its_bound(width: int, requests: list[tuple[int, int]], exact: bool) -> None:
    """Under the overlap schedule the host has the lengths before the step in flight, which commits up to `WIDEST`.

    The host has reserved KV slots for 2 * `WIDEST` tokens past these lengths.
    """
    known = [n for n, _ in requests]
    prefix = [n + more for n, more in requests]
    reserved = [n + 2 * WIDEST for n in known]
    made = plan(width, prefix=prefix, on_host=prefix if exact else None, allocated=reserved)
    for block in (made.verified, made.drafted or made.verified):
        n_tokens = block.tokens_BN.shape[1]
        ends = [n + n_tokens for n in prefix]
        bounds = block.bound_B_cpu.tolist()
        assert all(end <= bound for end, bound in zip(ends, bounds, strict=True))
        assert bounds == (ends if exact else [n + WIDEST + n_tokens for n in known])
        assert block.bound_sum == sum(bounds)
        assert block.kv["read_extent"] == n_tokens
