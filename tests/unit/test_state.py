import torch
from hypothesis import given
from hypothesis import strategies as st

from sglang_dflash.state import crossing_step


@given(st.lists(st.tuples(st.integers(0, 500), st.integers(1, 16)), min_size=1, max_size=5), st.integers(16, 96))
def test_crossing_step_is_the_last_slot_that_completes_an_interval(requests, interval):
    """The definition, token by token: after slot i, prefix + i + 1 tokens are committed."""
    want = [max((i for i in range(n) if (prefix + i + 1) % interval == 0), default=-1) for prefix, n in requests]
    prefix_len_B = torch.tensor([prefix for prefix, _ in requests])
    n_committed_B = torch.tensor([n for _, n in requests], dtype=torch.int32)
    assert crossing_step(prefix_len_B, n_committed_B, interval).tolist() == want
