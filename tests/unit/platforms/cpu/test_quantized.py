"""Products with quantized weights must equal scalar arithmetic."""

from itertools import product

import pytest
import torch

from sglang_dflash.platforms.cpu import quantized
from tests.server.lib import quantized as checkpoints

torch.manual_seed(0)


def test_fp8_products_apply_the_scale_of_each_block() -> None:
    """The weight has 6 rows and 5 columns, and blocks of 4 rows by 2 columns, so the last blocks are smaller."""
    a, b = torch.randn(3, 5).to(torch.float8_e4m3fn), torch.randn(6, 5).to(torch.float8_e4m3fn)
    scale_a, scale_b = torch.rand(3, 3), torch.rand(2, 3)
    want = torch.zeros(3, 6)
    for t, n, k in product(range(3), range(6), range(5)):
        want[t, n] += float(a[t, k]) * scale_a[t, k // 2] * float(b[n, k]) * scale_b[n // 4, k // 2]
    got = quantized.w8a8_block_fp8_matmul_triton(a, b, scale_a, scale_b, [4, 2], output_dtype=torch.float32)
    torch.testing.assert_close(got, want)


@pytest.mark.parametrize("size", [4, 8])
def test_the_largest_number_of_a_group_is_448(size: int) -> None:
    x = torch.randn(3, 8)
    numbers, scale = quantized.per_token_group_quant_fp8(x, size)
    assert numbers.float().unflatten(-1, (-1, size)).abs().amax(-1).eq(448).all()
    assert scale.shape == (3, 8 // size)
    torch.testing.assert_close(numbers.float() * scale.repeat_interleave(size, 1), x, rtol=2**-3, atol=1e-3)


def test_int8_is_rounded_and_multiplied_back() -> None:
    x, weight = torch.randn(3, 8), torch.randint(-127, 128, (8, 5), dtype=torch.int8)
    numbers, scale = quantized.per_token_quant_int8(x)
    assert numbers.abs().amax(-1).eq(127).all()
    torch.testing.assert_close(numbers * scale, x, rtol=0, atol=float(scale.max()) / 2)
    scale_n, bias = torch.rand(5, 1), torch.randn(5)
    columns = [(numbers.float() @ weight.float()[:, n]) * scale[:, 0] * scale_n[n] + bias[n] for n in range(5)]
    want = torch.stack(columns, 1)
    torch.testing.assert_close(quantized.int8_scaled_mm(numbers, weight, scale, scale_n, torch.float32, bias), want)


def test_awq_unpacks_packed_checkpoints() -> None:
    """AutoAWQ packs columns into an int32 in this order: 0, 2, 4, 6, 1, 3, 5, 7."""
    numbers = torch.arange(8)[None]
    word = sum(int(numbers[0, column]) << 4 * place for place, column in enumerate((0, 2, 4, 6, 1, 3, 5, 7)))
    word = torch.tensor([[word - 2**32 if word >= 2**31 else word]], dtype=torch.int32)
    assert quantized.unpacked(word).tolist() == numbers.tolist()
    assert checkpoints.packed(numbers).tolist() == word.tolist()
    weight = torch.randn(16, 256)  # 16 outputs, two groups of 128 inputs
    made = {name.split(".")[1]: tensor for name, tensor in checkpoints.awq_groups("layer", weight)}
    back = quantized.awq_dequantize(made["qweight"], made["scales"], made["qzeros"])
    torch.testing.assert_close(back, weight.T, rtol=0, atol=float(made["scales"].max()) * 0.51)
