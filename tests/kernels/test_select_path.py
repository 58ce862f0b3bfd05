from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from sglang_dflash_kernels.select_path import select_path, select_path_ref, select_path_torch, select_path_triton

FP16, BF16, FP32 = torch.float16, torch.bfloat16, torch.float32
FORMS = pytest.mark.parametrize(
    "form", [select_path_ref, select_path_torch, select_path_triton], ids=["definition", "torch", "kernel"]
)


def inputs(B, D, K, R, V, *, dtype=FP32, whole=False, device="cpu") -> dict[str, torch.Tensor]:
    """Draw random inputs. With `whole`, values are -1, 0 or 1, so that every sum is exact and many scores tie."""

    def values(*size: int) -> torch.Tensor:
        return torch.randint(-1, 2, size, device=device).float() if whole else torch.randn(size, device=device)

    order_BDV = torch.rand(B, D, V, device=device).argsort(dim=2)  # a slot's candidates all differ
    return {
        "candidates_BDK": order_BDV[:, :, :K].contiguous(), "unary_BDK": values(B, D, K),
        "query_BDR": values(B, D, R).to(dtype), "anchor_B": torch.randint(V, (B,), device=device),
        "predecessor_VR": values(V, R).to(dtype), "successor_VR": values(V, R).to(dtype),
    }  # fmt: skip


def run(form, x: dict[str, torch.Tensor]) -> torch.Tensor:
    tables = {name: tensor for name, tensor in x.items() if name.endswith("_VR")}
    return form(*(tensor for name, tensor in x.items() if name not in tables), **tables)


def scores(x: dict[str, torch.Tensor], b: int, d: int, previous: int) -> torch.Tensor:
    """Return the scores of a slot's candidates after `previous`, one candidate at a time, in float64."""
    wanted = x["predecessor_VR"][previous].double() * x["query_BDR"][b, d].double()
    own_K, tokens_K = x["unary_BDK"][b, d].tolist(), x["candidates_BDK"][b, d].tolist()
    rows = (x["successor_VR"][token].double() for token in tokens_K)
    return torch.tensor([own + float((wanted * row).sum()) for own, row in zip(own_K, rows, strict=True)])


def sequential(x: dict[str, torch.Tensor]) -> list[list[int]]:
    """Return the path of each request, slot by slot. Of equal scores the first wins, so sums must be exact."""
    B, D, _ = x["candidates_BDK"].shape
    paths = []
    for b in range(B):
        path = [int(x["anchor_B"][b])]
        for d in range(D):
            score = scores(x, b, d, path[-1]).tolist()
            path.append(int(x["candidates_BDK"][b, d, score.index(max(score))]))
        paths.append(path[1:])
    return paths


def test_hand_worked_path():
    """The predecessor row of anchor 0 keeps only rank dimension 0 of the scores.

    The row of token 2 keeps only dimension 1, where the query of slot 2 is negative.
    """
    predecessor_VR = torch.tensor([[1.0, 0.0], [9.0, 9.0], [0.0, 1.0], [9.0, 9.0]])
    successor_VR = torch.tensor([[0.0, 0.0], [0.0, 4.0], [3.0, 0.0], [0.0, -5.0]])
    args: dict[str, Any] = {
        "candidates_BDK": torch.tensor([[[1, 2], [3, 1]]]),
        "unary_BDK": torch.tensor([[[1.0, -1.0], [0.0, 8.0]]]),
        "query_BDR": torch.tensor([[[1.0, 1.0], [1.0, -1.0]]]),
        "anchor_B": torch.tensor([0]),
    }
    tables = {"predecessor_VR": predecessor_VR, "successor_VR": successor_VR}
    # Slot 1: token 1 scores 1 + 0, token 2 scores -1 + 3. Slot 2: token 3 scores 0 + 5, token 1 scores 8 - 4.
    assert select_path(**args, **tables).tolist() == [[2, 3]]
    # Without the tables each slot takes its best unary score.
    assert select_path(**args, **{name: table * 0 for name, table in tables.items()}).tolist() == [[1, 1]]


@given(st.data())
@settings(max_examples=60, deadline=None)
def test_definition_is_the_sequential_one(data):
    sizes = [data.draw(st.integers(*bounds)) for bounds in ((0, 3), (0, 5), (1, 4), (1, 5))]
    x = inputs(*sizes, V=data.draw(st.integers(4, 9)), whole=True)
    assert run(select_path_ref, x).tolist() == sequential(x)


SIZES = [  # B, D, K, R, V
    (0, 7, 16, 8, 20), (2, 0, 3, 4, 5), (1, 1, 1, 1, 3), (3, 7, 1, 5, 9), (2, 15, 16, 256, 300), (5, 7, 16, 64, 40),
    (2, 4, 5, 24, 11), (37, 3, 2, 7, 6), (2, 3, 20, 33, 64),
]  # fmt: skip
DTYPES = pytest.mark.parametrize("dtype", [FP32, FP16, BF16], ids=str)


@pytest.mark.parametrize("form", [select_path_torch, select_path_triton], ids=["torch", "kernel"])
@DTYPES
@pytest.mark.parametrize("sizes", SIZES, ids=str)
def test_both_forms_are_the_definition_where_sums_are_exact(sizes, dtype, form, device):
    torch.manual_seed(sum(sizes))
    x = inputs(*sizes, dtype=dtype, whole=True, device=device)
    got_BD = run(form, x)
    assert got_BD.dtype == torch.int64
    assert got_BD.is_contiguous()
    assert torch.equal(got_BD, run(select_path_ref, x))
    assert got_BD.tolist() == sequential(x)


@FORMS
@DTYPES
@pytest.mark.parametrize("sizes", SIZES, ids=str)
def test_every_choice_is_the_best_but_for_rounding(sizes, dtype, form, device):
    torch.manual_seed(sum(sizes))
    x = inputs(*sizes, dtype=dtype, device=device)
    for b, path in enumerate(run(form, x).tolist()):
        for d, (previous, token) in enumerate(zip([int(x["anchor_B"][b]), *path], path, strict=False)):
            score_K, at = scores(x, b, d, previous), x["candidates_BDK"][b, d].tolist().index(token)
            assert score_K.max() - score_K[at] <= 2e-6 * sizes[3], (b, d)


@FORMS
def test_the_first_of_equal_candidates_wins(form, device):
    """Candidates with equal scores must stay equal after the kernel's sums.

    In slot 1 all candidates tie. In slot 2 the last two tie for the best score. In slot 3 all are at -inf. In slot 4
    the first five are at -inf, and the others tie.
    """
    x = inputs(1, 4, 16, 100, 50, device=device)
    x["successor_VR"][:] = x["successor_VR"][0].clone()
    x["unary_BDK"][:] = 0
    x["unary_BDK"][0, 1, 14:] = 1
    x["unary_BDK"][0, 2] = -torch.inf
    x["unary_BDK"][0, 3, :5] = -torch.inf
    first_D = [x["candidates_BDK"][0, d, c].item() for d, c in enumerate((0, 14, 0, 5))]
    assert run(form, x).tolist() == [first_D]


@FORMS
@pytest.mark.parametrize("K", [1, 5])
def test_scores_may_all_be_negative(form, K, device):
    """Lanes that pad the K candidates must score less than any of them."""
    x = inputs(3, 4, K, 6, 9, device=device)
    x["unary_BDK"] -= 100
    assert torch.equal(run(form, x), run(select_path_ref, x))


@FORMS
def test_path_follows_the_chosen_tokens(form, device):
    """The tables make v + 1 the best successor of token v; unary scores are too small to change this."""
    V, D = 12, 7
    x = inputs(4, D, V, V, V, device=device)
    x["unary_BDK"] *= 0.01
    x["query_BDR"][:] = 1
    x["predecessor_VR"], x["successor_VR"] = torch.eye(V, device=device), torch.eye(V, device=device).roll(1, dims=0)
    x["anchor_B"] = torch.tensor([0, 5, 11, 5], device=device)
    want = [[(anchor + 1 + d) % V for d in range(D)] for anchor in (0, 5, 11, 5)]
    assert run(form, x).tolist() == want


@pytest.mark.parametrize(
    "form",
    [select_path_torch, pytest.param(select_path_triton, marks=pytest.mark.gpu)],  # on NaN, interpreted argmax raises
    ids=["torch", "kernel"],
)
def test_nan_scores_choose_a_token_of_the_table(form, device):
    """Padding requests may hold NaN. A chosen token must still be a row of the tables: the next slot reads this row."""
    x = inputs(3, 5, 5, 6, 8, device=device)
    x["unary_BDK"][1] = torch.nan
    x["query_BDR"][2] = torch.nan
    got_BD = run(form, x)
    assert ((got_BD >= 0) & (got_BD < 8)).all()
    assert torch.equal(got_BD[0], run(select_path_ref, x)[0])


def call(**changes) -> None:
    """Call `select_path` on two requests, three slots, four candidates, rank 5 and seven tokens.

    `changes` replace arguments.
    """
    select_path(**(inputs(2, 3, 4, 5, 7) | changes))


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"candidates_BDK": torch.zeros(2, 3, 4).int()}, "candidates_BDK is torch.int32; pass torch.int64"),
        ({"candidates_BDK": torch.zeros(2, 4, 4).long()}, r"candidates_BDK has shape \(2, 4, 4\)"),
        ({"candidates_BDK": torch.zeros(2, 3, 8).long()[:, :, ::2]}, "pass candidates_BDK.contiguous"),
        ({"unary_BDK": torch.zeros(2, 3, 4).half()}, "unary_BDK is torch.float16; pass torch.float32"),
        ({"unary_BDK": torch.zeros(2, 3, 5)}, r"unary_BDK has shape \(2, 3, 5\)"),
        ({"query_BDR": torch.zeros(2, 3, 5).half()}, "query_BDR is torch.float16; pass torch.float32"),
        ({"query_BDR": torch.zeros(2, 3, 6)}, r"query_BDR has shape \(2, 3, 6\)"),
        ({"anchor_B": torch.zeros(3).long()}, r"anchor_B has shape \(3,\)"),
        ({"anchor_B": torch.zeros(2).int()}, "anchor_B is torch.int32"),
        ({"predecessor_VR": torch.zeros(7, 5).double()}, "predecessor_VR is torch.float64"),
        ({"successor_VR": torch.zeros(7, 5).half()}, "successor_VR is torch.float16; pass torch.float32"),
        ({"successor_VR": torch.zeros(8, 5)}, r"successor_VR has shape \(8, 5\)"),
        ({"successor_VR": torch.zeros(5, 7).t()}, "successor_VR has strides"),
        ({"candidates_BDK": torch.zeros(2, 3, 0).long(), "unary_BDK": torch.zeros(2, 3, 0)}, "0 candidates and tables"),
    ],
)
def test_wrong_arguments_are_refused_by_name(changes, message):
    call()
    with pytest.raises(ValueError, match=message):
        call(**changes)
