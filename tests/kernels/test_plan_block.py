import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from sglang_dflash_kernels.plan_block import (
    PlannedBlock,
    plan_block,
    plan_block_ref,
    plan_block_torch,
    plan_block_triton,
    plan_blocks_torch,
    plan_blocks_triton,
)

INT32, INT64, MASK = torch.int32, torch.int64, 99


def assert_same(got: PlannedBlock, want: PlannedBlock) -> None:
    for name, got_field, want_field in zip(PlannedBlock._fields, got, want, strict=True):
        assert got_field.dtype == want_field.dtype == torch.int64, name
        assert torch.equal(got_field, want_field), name


def test_hand_worked_block():
    req_to_token = torch.tensor([[10, 11, 12, 13, 14, 15], [20, 21, 22, 23, 24, 25]], dtype=torch.int32)
    got = plan_block(
        torch.tensor([7, 8]), torch.tensor([2, 4]), torch.tensor([1, 0]), req_to_token, mask_token_id=MASK, n_tokens=3
    )
    want = PlannedBlock(
        tokens_BN=torch.tensor([[7, MASK, MASK], [8, MASK, MASK]]),
        positions_BN=torch.tensor([[2, 3, 4], [4, 5, 6]]),
        slots_BN=torch.tensor([[22, 23, 24], [14, 15, 0]]),  # request 2 has positions 0..5; 6 gets KV slot 0
        end_B=torch.tensor([5, 7]),
    )
    assert_same(got, want)


@given(st.data())
@settings(max_examples=200, deadline=None)
def test_definition_is_the_sequential_one(data):
    n_rows, row_len, n_tokens = data.draw(st.integers(1, 4)), data.draw(st.integers(1, 9)), data.draw(st.integers(1, 6))
    req_to_token = torch.randperm(n_rows * row_len).view(n_rows, row_len).int() + 1
    requests = data.draw(st.lists(st.tuples(st.integers(0, n_rows - 1), st.integers(0, row_len + 2)), max_size=4))
    rows, prefix_lens = torch.tensor(requests, dtype=torch.int64).view(-1, 2).unbind(1)
    anchor_B = torch.arange(len(requests)) + 5
    got = plan_block_ref(anchor_B, prefix_lens, rows, req_to_token, mask_token_id=MASK, n_tokens=n_tokens)
    assert got.tokens_BN.shape == (len(requests), n_tokens)
    assert got.end_B.tolist() == [prefix_len + n_tokens for _, prefix_len in requests]
    for b, (row, prefix_len) in enumerate(requests):
        for slot in range(n_tokens):
            position = prefix_len + slot
            assert got.tokens_BN[b, slot] == (5 + b if slot == 0 else MASK)
            assert got.positions_BN[b, slot] == position
            assert got.slots_BN[b, slot] == (req_to_token[row, position] if position < row_len else 0)


@pytest.mark.parametrize(
    ("B", "N", "M", "row_dtype"),
    [
        (0, 4, 9, INT64), (1, 1, 1, INT64), (1, 16, 64, INT32), (3, 5, 7, INT64), (3, 5, 7, INT32),
        (37, 16, 100, INT64), (5, 33, 40, INT32),
    ],
)  # fmt: skip
def test_kernel_is_the_definition(B, N, M, row_dtype, device):
    torch.manual_seed(B * 100 + N)
    n_rows = B + 3
    anchor_B = torch.randint(0, 1 << 40, (B,), device=device)
    prefix_len_B = torch.randint(0, M + 2, (B,), device=device)  # some blocks extend past the end of their row
    rows_B = torch.randperm(n_rows, device=device)[:B].to(row_dtype)
    req_to_token = torch.randint(1, 1 << 30, (n_rows, M), device=device, dtype=torch.int32)
    args = anchor_B, prefix_len_B, rows_B, req_to_token
    got = plan_block_triton(*args, mask_token_id=MASK, n_tokens=N)
    want = plan_block_ref(*args, mask_token_id=MASK, n_tokens=N)
    assert_same(got, want)
    assert_same(plan_block_torch(*args, mask_token_id=MASK, n_tokens=N), want)
    for n_tokens in ((N, N + 3), (N + 3, N)):
        for form in (plan_blocks_triton, plan_blocks_torch):
            for got, n in zip(form(*args, mask_token_id=MASK, n_tokens=n_tokens), n_tokens, strict=True):
                assert_same(got, plan_block_ref(*args, mask_token_id=MASK, n_tokens=n))
                assert all(field.is_contiguous() for field in got)
