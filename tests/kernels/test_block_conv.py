import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from sglang_dflash_kernels.block_conv import block_conv, block_conv_ref, block_conv_torch, block_conv_triton

FP16, BF16, FP32 = torch.float16, torch.bfloat16, torch.float32
ALL_FORMS = pytest.mark.parametrize(
    "form", [block_conv_ref, block_conv_torch, block_conv_triton], ids=["definition", "torch", "kernel"]
)


def inputs(B, N, S, J, G, *, dtype=FP32, side=0, device="cpu") -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Return `x_TH`, `change_TSJ` and `base_SH` for S taps and J groups of G channels, so H = J * G.

    `change_TSJ` and `base_SH` belong to the convolution before a sublayer (`side` 0) or to the one after it (1).
    """
    change_T2SJ = torch.randn(B * N, 2, S, J, device=device).to(dtype)
    base_2SH = torch.randn(2, S, J * G, device=device).to(dtype)
    return torch.randn(B * N, J * G, device=device).to(dtype), change_T2SJ[:, side], base_2SH[side]


def sequential(x_TH: torch.Tensor, change_TSJ: torch.Tensor, base_SH: torch.Tensor, block_size: int) -> torch.Tensor:
    """Compute one channel of one row at a time, in float64."""
    (T, H), (S, J) = x_TH.shape, change_TSJ.shape[1:]
    x, change, base = (tensor.double().tolist() for tensor in (x_TH, change_TSJ, base_SH))

    def cell(t: int, h: int) -> float:
        taps = [s for s in range(S) if t % block_size >= s]
        return sum((base[s][h] + change[t][s][h // (H // J)]) * x[t - s][h] for s in taps)

    return torch.tensor([[cell(t, h) for h in range(H)] for t in range(T)], dtype=torch.float64).view(T, H)


def test_hand_worked_blocks():
    """Two blocks of two slots. Each of two channels is a group of its own. A slot has two taps."""
    x_TH = torch.tensor([[1.0, 2.0], [3.0, 4.0], [5.0, 6.0], [7.0, 8.0]])
    base_SH = torch.tensor([[1.0, 1.0], [0.0, 10.0]])
    change_TSJ = torch.zeros(4, 2, 2)
    change_TSJ[1, 1] = torch.tensor([2.0, -10.0])  # slot 1 of block 0: its tap on slot 0
    # Slot 0 of block 1: its second tap would read the block before, and must be ignored.
    change_TSJ[2] = torch.tensor([[0.5, 0.0], [100.0, 100.0]])
    want_TH = [[1.0, 2.0], [3 + 2 * 1.0, 4.0], [5 * 1.5, 6.0], [7.0, 8 + 10 * 6.0]]
    assert block_conv(x_TH, change_TSJ, base_SH, block_size=2).tolist() == want_TH


@given(st.data())
@settings(max_examples=60, deadline=None)
def test_definition_is_the_sequential_one(data):
    sizes = [data.draw(st.integers(*bounds)) for bounds in ((0, 3), (2, 6), (1, 4), (1, 3), (1, 3))]
    args = inputs(*sizes, side=data.draw(st.integers(0, 1)))
    got_TH = block_conv_ref(*args, block_size=sizes[1])
    torch.testing.assert_close(got_TH.double(), sequential(*args, sizes[1]), rtol=1e-5, atol=1e-5)


# B, N, S, J, G. (1, 2, 4, 1, 5) has more taps than slots. The last two have more channels than one program handles.
SIZES = [
    (0, 4, 2, 3, 2), (1, 2, 1, 1, 1), (1, 2, 4, 1, 5), (3, 5, 2, 3, 7), (2, 3, 3, 5, 1), (2, 16, 2, 4, 16),
    (5, 7, 4, 1, 24), (1, 8, 2, 37, 16), (2, 2, 2, 1, 1030),
]  # fmt: skip


@pytest.mark.parametrize("side", [0, 1], ids=["before", "after"])
@pytest.mark.parametrize("dtype", [FP32, FP16, BF16], ids=str)
@pytest.mark.parametrize("form", [block_conv_torch, block_conv_triton], ids=["torch", "kernel"])
@pytest.mark.parametrize("sizes", SIZES, ids=str)
def test_both_forms_are_the_definition(sizes, form, dtype, side, device):
    if form is block_conv_triton and dtype == BF16 and device == "cpu":
        pytest.skip("the interpreter truncates to bf16")
    torch.manual_seed(sum(sizes))
    args, N = inputs(*sizes, dtype=dtype, side=side, device=device), sizes[1]
    got_TH, want_TH = form(*args, block_size=N), block_conv_ref(*args, block_size=N)
    assert got_TH.dtype == dtype
    assert got_TH.is_contiguous()
    # A product and its sum are rounded once (fused) or twice in fp32, which can change the rounding to half precision.
    torch.testing.assert_close(got_TH, want_TH, rtol=torch.finfo(dtype).eps * 2, atol=1e-6)
    if dtype != FP32:
        assert (got_TH != want_TH).sum() <= 1 + got_TH.numel() // 100


@ALL_FORMS
def test_taps_are_summed_in_fp32(form, device):
    """In fp16, numbers above 2048 are multiples of 2. So 2048 + 1 - 2048 is 1 only if summed in fp32."""
    x_TH = torch.ones(2, 1, dtype=FP16, device=device)
    base_SH = torch.tensor([[2048.0], [0.0]], dtype=FP16, device=device)
    change_TSJ = torch.tensor([[[0.0], [0.0]], [[1.0], [-2048.0]]], dtype=FP16, device=device)
    assert form(x_TH, change_TSJ, base_SH, block_size=2).tolist() == [[2048.0], [1.0]]


@ALL_FORMS
@pytest.mark.parametrize("N", [2, 3, 8, 11])
def test_block_ignores_its_neighbours(form, N, device):
    """A block's result must not depend on other blocks, even if these hold NaN, as padding may."""
    x_TH, change_TSJ, base_SH = inputs(3, N, 4, 2, 3, device=device)
    alone_TH = form(x_TH[N : 2 * N], change_TSJ[N : 2 * N], base_SH, block_size=N)
    for others in (0, 2):
        x_TH[others * N : (others + 1) * N] = torch.nan
        change_TSJ[others * N : (others + 1) * N] = torch.nan
    assert torch.equal(form(x_TH, change_TSJ, base_SH, block_size=N)[N : 2 * N], alone_TH)


@ALL_FORMS
def test_slot_reads_its_taps_only(form, device):
    x_TH, change_TSJ, base_SH = inputs(1, 8, 3, 2, 2, device=device)
    before_TH = form(x_TH, change_TSJ, base_SH, block_size=8)
    x_TH[4] += 1
    moved_T = (form(x_TH, change_TSJ, base_SH, block_size=8) != before_TH).any(dim=1)
    assert moved_T.tolist() == [False] * 4 + [True] * 3 + [False]


def test_dtypes_may_differ(device):
    x_TH, change_TSJ, base_SH = inputs(2, 4, 2, 3, 4, dtype=FP16, device=device)
    for form in (block_conv, block_conv_triton):
        got_TH = form(x_TH, change_TSJ.float(), base_SH.float(), block_size=4)
        torch.testing.assert_close(got_TH, block_conv_ref(x_TH, change_TSJ, base_SH, block_size=4))


def convolve(**changes) -> None:
    """Call `block_conv` on two blocks of four, two groups of three channels, and two taps.

    `changes` replace arguments.
    """
    x_TH, change_TSJ, base_SH = inputs(2, 4, 2, 2, 3)
    block_conv(**({"x_TH": x_TH, "change_TSJ": change_TSJ, "base_SH": base_SH, "block_size": 4} | changes))


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"block_size": 3}, "8 rows in blocks of 3; pass whole blocks"),
        ({"block_size": 1}, "8 rows in blocks of 1"),
        ({"x_TH": torch.zeros(8, 6).double()}, "x_TH is torch.float64; pass torch.float32"),
        ({"x_TH": torch.zeros(6, 8).t()}, r"x_TH has strides \(1, 8\)"),
        ({"x_TH": torch.zeros(8, 7)}, r"base_SH has shape \(2, 6\)"),
        ({"x_TH": torch.zeros(8, 7), "base_SH": torch.zeros(2, 7)}, "7 channels in 2 groups with 2 taps"),
        ({"change_TSJ": torch.zeros(8, 2, 0)}, "6 channels in 0 groups"),
        ({"change_TSJ": torch.zeros(8, 0, 2), "base_SH": torch.zeros(0, 6)}, "in 2 groups with 0 taps"),
        ({"change_TSJ": torch.zeros(7, 2, 2)}, r"change_TSJ has shape \(7, 2, 2\)"),
        ({"change_TSJ": torch.zeros(8, 2, 2).long()}, "change_TSJ is torch.int64"),
        ({"change_TSJ": torch.zeros(8, 2, 2).mT}, r"change_TSJ has strides \(4, 1, 2\); the S x J values"),
        ({"change_TSJ": torch.zeros(8, 2, 4)[:, :, ::2]}, r"change_TSJ has strides \(8, 4, 2\)"),
        ({"change_TSJ": torch.zeros(8, 2, 2, 2)[:, :, 0]}, r"change_TSJ has strides \(8, 4, 1\)"),
        ({"base_SH": torch.zeros(3, 6)}, r"base_SH has shape \(3, 6\)"),
        ({"base_SH": torch.zeros(6, 2).t()}, "base_SH has strides"),
    ],
)
def test_wrong_arguments_are_refused_by_name(changes, message):
    convolve()
    with pytest.raises(ValueError, match=message):
        convolve(**changes)
