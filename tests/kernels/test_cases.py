"""Cases of `kernels/cases`: each kernel must agree with its definition, on a GPU or in Triton's interpreter."""

from collections.abc import Iterator

import pytest
import torch
from sglang_dflash_kernels.cases import make
from sglang_dflash_kernels.cases.sizes import SMALL, Case, Sizes
from sglang_dflash_kernels.dispatch import Forms
from sglang_dflash_kernels.specialisations import KERNELS

SHAPES = [(B, N) for N in SMALL.blocks for B in SMALL.batches]


@pytest.fixture
def kernels(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Forms, "form_for", lambda forms, tensor: forms.on_gpu)


@pytest.fixture(scope="module")
def cases() -> list[Case]:
    return make.make_cases(SMALL, "cuda" if torch.cuda.is_available() else "cpu")


@pytest.mark.parametrize("op", KERNELS)
def test_kernel_agrees_with_its_definition(op: str, cases: list[Case], kernels: None) -> None:
    mine = [case for case in cases if case.op == op]
    assert len(mine) >= len(SHAPES)
    for case in mine:
        case.check()
        case.launch()


def each_in_and_out(sizes: Sizes) -> Iterator[tuple[str, int]]:
    """Yield (op, least bytes for B=3 and N=16) for ops that read each input once and write each output once."""
    B, N, V = 3, 16, sizes.n_vocab
    yield "penalise", B * N * V * 8 + B * V * 4  # logits read and written, counts read
    yield "plan_block", B * (8 + 8 + 8 + 8) + B * N * (4 + 8 + 8 + 8)
    yield "accept", B * (8 + 8 + 4 + 4 + 8 + 8 + 8) + B * N * (8 + 8 + 8)


def test_bytes_are_those_of_inputs_and_outputs(cases: list[Case]) -> None:
    counted = {case.op: case.n_bytes for case in cases if case.shape == "B=3 N=16"}
    assert [(op, counted[op]) for op, _ in each_in_and_out(SMALL)] == list(each_in_and_out(SMALL))


def test_wrong_kernel_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    def wrong(state: torch.Tensor, *rest: object, n_key_heads: int) -> None:
        state += 1

    L, H, _, V, K = SMALL.recurrent
    _, fold = make.gdn_cases(3, 8, torch.randn(L, 4, H, V, K), SMALL)
    monkeypatch.setattr(make, "gdn_fold", wrong)
    with pytest.raises(AssertionError, match="off from the definition"):
        fold.check()
