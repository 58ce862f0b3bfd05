"""Matrix products with quantized weights: fp8 in blocks, int8 by channel, 4-bit AWQ.

These definitions are slow, because they dequantize weights in every product and sum in fp32. As in the kernels,
activations are quantized row by row, so a token's result does not depend on other tokens.

Dimension key: T tokens, K inputs, N outputs, G groups of inputs.
"""

import torch

from sglang_dflash.platforms.cpu.refuse import refuse

FP8, FP8_MAX, INT8_MAX = torch.float8_e4m3fn, 448.0, 127.0
# Position in AWQ's int32 of each of eight consecutive outputs, in units of 4 bits.
AWQ_ORDER = (0, 4, 1, 5, 2, 6, 3, 7)


class AnyDtype:
    """Replacement for methods of SGLang that list activation dtypes of GPU kernels. It is called without `self`."""

    def __call__(self, **_: object) -> list[torch.dtype]:
        return [torch.float32, torch.bfloat16, torch.float16]


def any_device(self: object, min_capability: int, error: bool = True) -> bool:
    """Return True, because torch needs no compute capability."""
    return True


def per_token_group_quant_fp8(
    x: torch.Tensor, group_size: int, eps: float = 1e-10, **layout: object
) -> tuple[torch.Tensor, torch.Tensor]:
    """Quantize [..., K] to fp8 with scales, fp32 [..., G]: the largest magnitude of a group maps to 448."""
    refuse("per_token_group_quant_fp8", layout)
    groups = x.unflatten(-1, (-1, group_size)).float()
    scale = groups.abs().amax(-1).clamp(min=eps) / FP8_MAX
    return (groups / scale[..., None]).clamp(-FP8_MAX, FP8_MAX).flatten(-2).to(FP8), scale


def w8a8_block_fp8_matmul_triton(
    A: torch.Tensor,
    B: torch.Tensor,
    As: torch.Tensor,
    Bs: torch.Tensor,
    block_size: list[int],
    output_dtype: torch.dtype = torch.float16,
) -> torch.Tensor:
    """Multiply A [T, K] by B [N, K], both fp8, to [T, N], with a scale per group in As and per block in Bs."""
    n, k = block_size
    weight_NK = B.float() * spread(spread(Bs, 0, n, B.shape[0]), 1, k, B.shape[1])
    inputs_TK = A.float() * spread(As, 1, k, A.shape[1])
    return (inputs_TK @ weight_NK.T).to(output_dtype)


def spread(scale: torch.Tensor, dim: int, size: int, total: int) -> torch.Tensor:
    """Expand one scale per block of `size` elements to one scale per element; the last block may be shorter."""
    return scale.repeat_interleave(size, dim).narrow(dim, 0, total)


def per_token_quant_int8(x: torch.Tensor, **more: object) -> tuple[torch.Tensor, torch.Tensor]:
    """Quantize [..., K] to int8 with scales, fp32 [..., 1]: the largest magnitude of a token maps to 127."""
    refuse("per_token_quant_int8", more)
    scale = x.float().abs().amax(-1, keepdim=True).clamp(min=1e-10) / INT8_MAX
    return (x.float() / scale).round().to(torch.int8), scale


def int8_scaled_mm(
    a_TK: torch.Tensor,
    b_KN: torch.Tensor,
    scale_T1: torch.Tensor,
    scale_N1: torch.Tensor,
    out_dtype: torch.dtype,
    bias: torch.Tensor | None = None,
) -> torch.Tensor:
    """Return [T, N]: the matrix product (exact in fp32 up to 1,040 inputs) times both scales, plus the bias."""
    out_TN = (a_TK.float() @ b_KN.float()) * scale_T1 * scale_N1.view(1, -1)
    return (out_TN if bias is None else out_TN + bias).to(out_dtype)


def awq_dequantize(qweight: torch.Tensor, scales: torch.Tensor, qzeros: torch.Tensor) -> torch.Tensor:
    """Return weights [K, N]: each 4-bit value minus its group's zero, times its group's scale [G, N].

    `qweight` int32 [K, N / 8] and `qzeros` int32 [G, N / 8] have eight 4-bit values per int32.
    """
    weight, zeros = unpacked(qweight), unpacked(qzeros)
    size = weight.shape[0] // scales.shape[0]
    return (weight - spread(zeros, 0, size, len(weight))) * spread(scales, 0, size, len(weight))


def unpacked(packed: torch.Tensor) -> torch.Tensor:
    """Unpack int32 [..., N / 8] to [..., N], integers within 0..15."""
    places = torch.tensor(AWQ_ORDER, device=packed.device) * 4
    return (packed[..., None] >> places & 15).flatten(-2)
