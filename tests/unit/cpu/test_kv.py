"""Slot tables and row copies, against loops over requests and positions."""

import pytest
import torch

from sglang_dflash.cpu import kv


def test_slots_of_a_block():
    table = torch.randint(0, 99, (5, 20), dtype=torch.int32)
    got = kv.block_cache_locs(
        req_pool_indices=torch.tensor([3, 1]),
        req_to_token=table,
        start_offset=torch.tensor([0, 7], dtype=torch.int32),
        end_offset=torch.tensor([4, 11], dtype=torch.int32),
        batch_size=2,
        draft_token_num=4,
        device=torch.device("cpu"),
    )
    assert got.dtype == torch.int64
    assert got.tolist() == [*table[3, 0:4].tolist(), *table[1, 7:11].tolist()]


@pytest.mark.parametrize("ranges", [[(3, 5)], [(0, 4), (2, 2), (7, 8)], [(1, 1)]], ids=str)
def test_new_slots_are_written_into_the_rows(ranges: list[tuple[int, int]]):
    table = torch.full((5, 10), -1, dtype=torch.int32)
    want, rows, next_slot = table.clone(), [4, 0, 2][: len(ranges)], 50
    for row, (start, end) in zip(rows, ranges, strict=True):
        for position in range(start, end):
            want[row, position] = next_slot
            next_slot += 1
    starts, ends = torch.tensor(ranges, dtype=torch.int32).unbind(1)
    kv.assign_req_to_token_pool_func(torch.tensor(rows), table, starts, ends, torch.arange(50, 60), len(ranges))
    assert torch.equal(table, want)


def test_rows_move_in_every_buffer_even_onto_each_other():
    wide, narrow = torch.randn(6, 2, 4), torch.randn(6, 3).bfloat16()
    want_wide, want_narrow = wide.clone(), narrow.clone()
    for want in (want_wide, want_narrow):
        want[[1, 2]] = want[[0, 1]]
    strides = torch.tensor([wide[0].nbytes, narrow[0].nbytes])
    pointers = torch.tensor([wide.data_ptr(), narrow.data_ptr()], dtype=torch.uint64)
    kv.copy_all_layer_kv_cache_func(pointers, strides, torch.tensor([1, 2, 5]), torch.tensor([0, 1, 3]), 2, 128, {})
    assert torch.equal(wide, want_wide)
    assert torch.equal(narrow, want_narrow)
