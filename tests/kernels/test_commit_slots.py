"""The CPU replacement of SGLang's kernel `fused_commit_track_indices` must return the same as the kernel."""

import torch
from sglang.kernels.ops.mamba.mamba_state_scatter_triton import fused_commit_track_indices

from sglang_dflash.platforms.cpu import mamba_state


def test_commit_slots_equal_sglangs_kernel(device):
    """Cover prefix lengths on both sides of two multiples of the interval, and all numbers of committed tokens."""
    interval = 8
    for width in (2, 5, 12):
        cases = [(prefix, n) for prefix in range(20) for n in range(1, width + 1)]
        prefix_B = torch.tensor([prefix for prefix, _ in cases], device=device)
        n_B = torch.tensor([n for _, n in cases], dtype=torch.int32, device=device)
        rows = torch.arange(len(cases) * width, device=device).view(-1, width)
        want = fused_commit_track_indices(rows, n_B, prefix_B, width, interval)
        got = mamba_state.fused_commit_track_indices(rows.cpu(), n_B.cpu(), prefix_B.cpu(), width, interval)
        assert [x.tolist() for x in got] == [x.tolist() for x in want]
        alone, nothing = fused_commit_track_indices(rows, n_B, None, width, 0)
        assert nothing is None
        assert torch.equal(alone, want[0])
