"""DraftInput: the state that the scheduler carries between two steps, and the KV slots reserved for a step."""

from types import SimpleNamespace
from typing import Any

import pytest
import torch

from sglang_dflash.engine.host import draft_input
from sglang_dflash.engine.host.draft_input import DraftInput, row_headroom


def state(*anchors: int, relayed: bool = False) -> DraftInput:
    made = DraftInput(torch.tensor(anchors), torch.tensor(anchors) * 10)
    if relayed:
        made.future_indices = torch.tensor(anchors) + 100
    return made


def test_batches_are_filtered_and_merged_in_order():
    first, second = state(1, 2, 3), state(4)
    first.allocated_B_cpu = torch.ones(3)
    first.filter_batch(torch.tensor([2, 0]))
    first.merge_batch(second)
    assert first.bonus_tokens.tolist() == [3, 1, 4]
    assert first.new_seq_lens.tolist() == [30, 10, 40]
    assert first.allocated_B_cpu is None, "the reservation was another batch's"


def test_only_relay_indices_move_under_overlap():
    first, second = state(1, 2, 3, relayed=True), state(4, relayed=True)
    first.filter_batch(torch.tensor([2, 0]))
    first.merge_batch(second)
    assert first.future_indices.tolist() == [103, 101, 104]
    assert first.bonus_tokens.tolist() == [1, 2, 3]


def test_mixing_schedules_in_a_batch_is_refused():
    with pytest.raises(AssertionError, match="one schedule for both batches"):
        state(1, relayed=True).merge_batch(state(2))


def test_an_idle_step_has_no_rows():
    idle = DraftInput.idle(torch.device("cpu"))
    assert idle.bonus_tokens.shape == idle.new_seq_lens.shape == (0,)


def batch_of(committed: list[int], allocated: list[int], page_size: int, order: list[str] | None = None) -> Any:
    """Return a batch that appends to `order` when it frees KV slots outside its sliding windows."""
    order = [] if order is None else order
    held = [
        SimpleNamespace(kv_committed_len=n, kv_allocated_len=had) for n, had in zip(committed, allocated, strict=True)
    ]
    reqs = [SimpleNamespace(kv=kv, decode_batch_idx=0, req_pool_idx=i) for i, kv in enumerate(held)]
    return SimpleNamespace(
        reqs=reqs,
        batch_size=lambda: len(reqs),
        maybe_evict_swa=lambda: order.append("evicted"),
        token_to_kv_pool_allocator=SimpleNamespace(page_size=page_size),
        tree_cache="cache",
        req_to_token_pool="rows",
        req_pool_indices=torch.arange(len(reqs)),
        device="cpu",
    )


@pytest.mark.parametrize(("page_size", "mapped"), [(1, [5 + 16, 30 + 16]), (16, [32, 48])])
def test_two_blocks_are_reserved_past_the_committed_tokens(monkeypatch, page_size, mapped):
    taken, order = list[dict[str, Any]](), list[str]()

    def take(*pools: str, **asked: Any) -> None:
        order.append("taken")
        taken.append(asked)

    monkeypatch.setattr(draft_input, "get_alloc_reserve_per_decode", lambda: 16)
    monkeypatch.setattr(draft_input, "alloc_for_spec_decode", take)
    batch, made = batch_of([5, 30], [8, 30], page_size, order), state(1, 2)
    made.prepare_for_decode(batch)
    assert order == ["evicted", "taken"]
    assert made.allocated_B_cpu.tolist() == mapped
    (asked,) = taken
    assert asked["nxt_kv_lens"].tolist() == mapped
    assert asked["num_needed_tokens"] == sum(mapped) - sum(asked["cur_kv_lens"].tolist())
    assert batch.seq_lens_cpu.tolist() == [5, 30]
    assert batch.seq_lens_sum == 35
    assert [req.decode_batch_idx for req in batch.reqs] == [1, 1]


def test_no_slots_are_allocated_where_enough_are_mapped(monkeypatch):
    monkeypatch.setattr(draft_input, "get_alloc_reserve_per_decode", lambda: 16)
    monkeypatch.setattr(draft_input, "alloc_for_spec_decode", lambda *pools, **asked: pytest.fail("slots were taken"))
    made = state(1)
    made.prepare_for_decode(batch_of([5], [40], 1))
    assert made.allocated_B_cpu.tolist() == [40]


@pytest.mark.parametrize(
    ("allocated", "in_flight", "after"),
    [([14, 40], 1, [14, 40]), ([13, 40], 1, [21, 46]), ([17, 42], 4, [17, 42]), ([17, 41], 4, [21, 46])],
)
def test_slots_for_a_block_and_the_step_in_flight_are_enough(monkeypatch, allocated, in_flight, after):
    """Blocks of 8 past 5 and 30 committed tokens, after a step of 1 or 4 tokens."""
    monkeypatch.setattr(draft_input, "get_alloc_reserve_per_decode", lambda: 16)
    monkeypatch.setattr(draft_input, "alloc_for_spec_decode", lambda *pools, **asked: None)
    made, prompts = state(1), state(2)
    made.n_in_flight = in_flight
    made.merge_batch(prompts)
    made.prepare_for_decode(batch_of([5, 30], allocated, 1))
    assert made.allocated_B_cpu.tolist() == after


@pytest.mark.parametrize(("own", "others"), [(1, 4), (4, 1)])
def test_a_merged_batch_reserves_for_the_widest_step_in_flight(own, others):
    made, other = state(1), state(2)
    made.n_in_flight, other.n_in_flight = own, others
    made.merge_batch(other)
    assert made.n_in_flight == 4


@pytest.mark.parametrize("page_size", [1, 16, 64])
@pytest.mark.parametrize("block_size", [2, 8, 16])
def test_a_reservation_stays_in_its_row(monkeypatch, page_size, block_size):
    """The longest reservation is that of a request with one token less than the context length."""
    monkeypatch.setattr(draft_input, "get_alloc_reserve_per_decode", lambda: 2 * block_size)
    monkeypatch.setattr(draft_input, "get_alloc_page_size", lambda: page_size)
    sglangs = block_size + 4
    for context in range(100, 100 + page_size):
        end = -(-(context - 1 + 2 * block_size) // page_size) * page_size
        assert end <= context + row_headroom(sglangs)
    assert row_headroom(10_000) == 10_000, "SGLang's headroom is never lowered"
