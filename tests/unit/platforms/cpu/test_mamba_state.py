"""Moves of recurrent states between state slots must equal plain assignments."""

import pytest
import torch

from sglang_dflash.platforms.cpu import mamba_state

L, SLOTS, ROWS, STEPS = 2, 6, 4, 3


def test_tracked_requests_are_copied_in_every_layer():
    conv, ssm = torch.randn(L, SLOTS, 5), torch.randn(L, SLOTS, 2, 3)
    want_conv, want_ssm = conv.clone(), ssm.clone()
    for want in (want_conv, want_ssm):
        want[:, 4] = want[:, 1]
    sources, targets = torch.tensor([0, 1, 2], dtype=torch.int32), torch.tensor([3, 4, 5])
    # The mask may be longer than the batch of 3. Its other entries are old values and must be ignored.
    mask = torch.tensor([False, True, False, True])
    mamba_state.track_mamba_states_all_layers(conv, ssm, sources, mask, targets, 3)
    assert torch.equal(conv, want_conv)
    assert torch.equal(ssm, want_ssm)


def test_tracking_one_layer_skips_freed_slots():
    conv, ssm = torch.randn(SLOTS, 5), torch.randn(SLOTS, 2, 3)
    want_conv, want_ssm = conv.clone(), ssm.clone()
    want_conv[5], want_ssm[5] = conv[2], ssm[2]
    sources, targets, mask = torch.tensor([0, -1, 2]), torch.tensor([-1, 4, 5]), torch.ones(3, dtype=torch.bool)
    mamba_state.track_mamba_states_if_needed(conv, ssm, sources, mask, targets, 3, check_freed_slots=True)
    assert torch.equal(conv, want_conv)
    assert torch.equal(ssm, want_ssm)


@pytest.mark.parametrize("source_rows", [None, [3, 0, 2, 1]], ids=["rows in order", "rows given"])
def test_the_accepted_step_is_committed(source_rows: list[int] | None):
    states, scratch = torch.randn(L, SLOTS, 2, 3), torch.randn(L, ROWS, STEPS, 2, 3)
    steps, slots = [2, -1, 0, 1], [4, 1, 0, 5]
    want = states.clone()
    for b, (step, slot) in enumerate(zip(steps, slots, strict=True)):
        if step >= 0:
            want[:, slot] = scratch[:, b if source_rows is None else source_rows[b], step]
    rows = None if source_rows is None else torch.tensor(source_rows)
    mamba_state.scatter_states_with_mask(states, scratch, torch.tensor(slots), torch.tensor(steps), rows)
    assert torch.equal(states, want)


@pytest.mark.parametrize(("step", "slot", "row"), [(-1, 0, 0), (STEPS, 0, 0), (0, -1, 0), (0, SLOTS, 0), (0, 0, ROWS)])
def test_indices_out_of_range_are_skipped(step: int, slot: int, row: int):
    states, scratch = torch.randn(L, SLOTS, 3), torch.randn(L, ROWS, STEPS, 3)
    before = states.clone()
    mamba_state.scatter_states_with_mask(states, scratch, *(torch.tensor([i]) for i in (slot, step, row)))
    assert torch.equal(states, before)


def test_overlapping_windows_are_copied():
    strip = torch.arange(2.0 * ROWS * 5).view(2, ROWS, 1, 5)
    windows = strip.as_strided((2, ROWS, STEPS, 1, 3), (ROWS * 5, 5, 1, 5, 1))
    pool = torch.zeros(2, SLOTS, 1, 3, dtype=torch.bfloat16)
    mamba_state.scatter_states_with_mask(pool, windows, torch.tensor([4]), torch.tensor([1]))
    assert pool[0, 4, 0].tolist() == [1, 2, 3]
    assert pool[1, 4, 0].tolist() == [21, 22, 23]
    assert pool[:, :4].abs().sum() == 0
