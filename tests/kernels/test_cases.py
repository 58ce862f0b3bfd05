"""The kernel benchmark's cases at small sizes, where the op runs its definition: they build, agree, and count bytes."""

import dataclasses

import pytest
import torch
from sglang_dflash_kernels.cases import make as kernel_cases
from sglang_dflash_kernels.cases.make import block_conv_case, copy_cases, gdn_cases, penalise_case, select_path_case
from sglang_dflash_kernels.cases.sizes import SMALL as SMALL_SIZES
from sglang_dflash_kernels.cases.sizes import Recurrent

SMALL = Recurrent(L=2, H=4, G=2, V=8, K=16)
SIZES = dataclasses.replace(SMALL_SIZES, recurrent=SMALL, dtype=torch.bfloat16)


def test_recurrent_cases_agree_with_the_definition_and_count_their_bytes() -> None:
    torch.manual_seed(0)
    states = torch.randn(SMALL.L, 4, SMALL.H, SMALL.V, SMALL.K)
    verify, fold = gdn_cases(3, 8, states, SIZES)
    for case in (verify, fold):
        case.check()
        case.launch()
    values = SMALL.H * SMALL.V + SMALL.G * SMALL.K + SMALL.H  # of a record
    inputs_and_outputs = 2 * 24 * (2 * SMALL.G * SMALL.K + 2 * SMALL.H * SMALL.V + 2 * SMALL.H)
    assert verify.n_bytes == 3 * 4 * SMALL.H * SMALL.V * SMALL.K + 24 * 4 * values + inputs_and_outputs
    n_kept = int(fold.shape.split("kept=")[1])
    assert fold.n_bytes == SMALL.L * (3 * 8 * SMALL.H * SMALL.V * SMALL.K + n_kept * 4 * values)


def test_the_penalty_case_agrees_with_the_definition_and_counts_its_bytes() -> None:
    torch.manual_seed(0)
    case = penalise_case(3, 8, 50, "cpu")
    case.check()
    case.launch()
    assert case.n_bytes == 3 * 50 * (8 * 8 + 4)


def test_the_cases_of_a_second_draft_agree_with_the_definition_and_count_their_bytes() -> None:
    torch.manual_seed(0)
    S, H, J, K, R = SIZES.second
    conv, select = block_conv_case(3, 5, SIZES, "cpu"), select_path_case(3, 5, SIZES, "cpu")
    for case in (conv, select):
        case.check()
        case.launch()
    assert conv.n_bytes == 2 * (2 * 15 * H + 15 * S * J + S * H)
    rows, tokens = 12 * (K + 1) * R + 12 * R, 12 * K + 12 + 3  # of tables and queries; candidates, drafts and anchors
    assert select.n_bytes == 2 * rows + 8 * tokens + 4 * 12 * K


def test_the_cases_of_copies_agree_with_the_definition_and_count_their_bytes() -> None:
    torch.manual_seed(0)
    copy, weigh = copy_cases(3, 5, SIZES, "cpu")
    for case in (copy, weigh):
        case.check()
        case.launch()
    # The text, the block in and out and into the text, matches, counts; prefix lengths, rows and places.
    assert copy.n_bytes == 3 * (4 * 102 + 5 * (8 + 8 + 4) + 4 * 8 + 5 * 8 + 20)
    # Guesses and what was committed, matches and a token behind each, counts in and out; lengths, rows and a total.
    assert weigh.n_bytes == 3 * (5 * 16 + 4 * 12 + 5 * 16 + 24 + 16)


def test_a_wrong_kernel_is_not_timed(monkeypatch: pytest.MonkeyPatch) -> None:
    def wrong(state: torch.Tensor, *rest: object, n_key_heads: int) -> None:
        state += 1

    _, fold = gdn_cases(3, 8, torch.randn(SMALL.L, 4, SMALL.H, SMALL.V, SMALL.K), SIZES)
    monkeypatch.setattr(kernel_cases, "gdn_fold", wrong)
    with pytest.raises(AssertionError, match="off from the definition"):
        fold.check()
