import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from sglang_dflash_kernels.accept import Accepted, accept, accept_ref, accept_torch, accept_triton


def assert_same(got: Accepted, want: Accepted) -> None:
    for name, got_field, want_field in zip(Accepted._fields, got, want, strict=True):
        if want_field is None:
            assert got_field is None, name
            continue
        assert got_field.dtype == want_field.dtype, name
        assert torch.equal(got_field, want_field), name


def test_hand_worked_step():
    tokens_BN = torch.tensor([[9, 1, 2, 3], [9, 5, 5, 5], [9, 4, 6, 8]])  # an anchor, then three drafts
    target_BN = torch.tensor([[1, 2, 7, 8], [4, 5, 5, 5], [4, 6, 8, 2]])  # the target's token after each slot
    want = Accepted(
        n_accepted_B=torch.tensor([2, 0, 3], dtype=torch.int32),
        anchor_B=torch.tensor([7, 4, 2]),
        committed_BN=torch.tensor([[1, 2, 7, 0], [4, 0, 0, 0], [4, 6, 8, 2]]),
        n_committed_B=torch.tensor([3, 1, 4], dtype=torch.int32),
        next_prefix_len_B=torch.tensor([13, 21, 34]),
        last_B=torch.tensor([2, 0, 3]),
        tracked_B=torch.tensor([1, -1, 1]),  # after 12 and 32 tokens
    )
    prefix_len_B = torch.tensor([10, 20, 30])
    assert_same(accept(tokens_BN, target_BN, prefix_len_B, 4), want)
    assert accept(tokens_BN, target_BN, prefix_len_B).tracked_B is None


@given(st.data())
@settings(max_examples=200, deadline=None)
def test_definition_is_the_sequential_one(data):
    """Emit the target's token of each slot, and stop after the first that differs from the next slot's draft."""
    n_tokens = data.draw(st.integers(1, 9))
    row = st.lists(st.integers(0, 2), min_size=n_tokens, max_size=n_tokens)
    tokens, target, prefix_len = data.draw(row), data.draw(row), data.draw(st.integers(0, 20))
    interval = data.draw(st.integers(1, 12))
    emitted = []
    for slot in range(n_tokens):
        emitted.append(target[slot])
        if tokens[slot + 1 : slot + 2] != [target[slot]]:
            break
    got = accept_ref(torch.tensor([tokens]), torch.tensor([target]), torch.tensor([prefix_len]), interval)
    assert got.committed_BN[0].tolist() == emitted + [0] * (n_tokens - len(emitted))
    assert got.anchor_B.tolist() == emitted[-1:]
    assert got.n_accepted_B.tolist() == [len(emitted) - 1]
    assert got.n_committed_B.tolist() == [len(emitted)]
    assert got.next_prefix_len_B.tolist() == [prefix_len + len(emitted)]
    assert got.last_B.tolist() == [len(emitted) - 1]
    ends = [slot for slot in range(len(emitted)) if (prefix_len + slot + 1) % interval == 0]
    assert got.tracked_B.tolist() == [max(ends, default=-1)]


@pytest.mark.parametrize(("B", "N"), [(0, 4), (1, 1), (1, 16), (3, 5), (37, 16), (64, 8), (5, 33), (2, 2)])
def test_both_forms_are_the_definition(B, N, device):
    torch.manual_seed(B * 100 + N)
    tokens_BN = torch.randint(0, 3, (B, N), device=device)
    target_BN = torch.randint(0, 3, (B, N), device=device)
    target_BN[: B // 2, :-1] = tokens_BN[: B // 2, 1:]  # half of the requests accept every draft
    prefix_len_B = torch.randint(0, 1 << 40, (B,), device=device)
    for interval in (0, 4, 7):
        args = tokens_BN, target_BN, prefix_len_B, interval
        assert_same(accept_torch(*args), accept_ref(*args))
        assert_same(accept_triton(*args), accept_ref(*args))


def test_last_slot_is_not_compared_with_the_next_row(device):
    """Blocks are contiguous in memory: the next request's anchor follows a block's last slot, and is not a draft."""
    tokens_BN = torch.tensor([[9, 1], [2, 5]], device=device)
    target_BN = torch.tensor([[1, 2], [5, 7]], device=device)
    got = accept_triton(tokens_BN, target_BN, torch.tensor([0, 0], device=device))
    assert got.n_accepted_B.tolist() == [1, 1]
