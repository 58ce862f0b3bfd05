"""Convolve the slots of every block of a draft, channel by channel: mix each slot with up to S - 1 slots before it.

    out[t, h] = sum over taps s <= t mod N of (base[s, h] + change[t, s, h // (H / J)]) x[t - s, h]

Shapes: T packed rows, which are consecutive blocks of N slots; H hidden channels in J contiguous groups of H / J; S
taps.
Source: DFlash 2, grouped dynamic depthwise convolution around each sublayer of the draft (z-lab and Inco AI 2026,
SGLang 0.5.23's `models/dflash.py`).
Cost: one launch, launch-bound in a decode step. It reads TH values of x, TSJ of change and SH of base, and writes TH
values: 2.8 MB for 8 blocks of 16 slots with 5,120 channels in bf16.

Tap 0 weighs the slot itself. Taps that reach before the block are left out, so a block's result depends only on this
block. Padding consists of whole blocks, so it does not change the results of other blocks. Products and sums are
fp32, and the result is rounded once.
"""

import torch
import triton
import triton.language as tl
from sglang_dflash_kernels.checks import Shapes
from sglang_dflash_kernels.dispatch import Forms

BLOCK_H = 512  # channels per program; small enough that the programs of one block occupy most multiprocessors
MODEL_DTYPES = (torch.float32, torch.bfloat16, torch.float16)


def block_conv_ref(
    x_TH: torch.Tensor, change_TSJ: torch.Tensor, base_SH: torch.Tensor, *, block_size: int
) -> torch.Tensor:
    """Define `block_conv`, in PyTorch."""
    T, S, J = change_TSJ.shape
    group_size = x_TH.shape[1] // J
    out_TH = torch.zeros_like(x_TH, dtype=torch.float32)
    for t in range(T):
        for s in range(min(S, t % block_size + 1)):
            tap_H = base_SH[s].float() + change_TSJ[t, s].float().repeat_interleave(group_size)
            out_TH[t] += tap_H * x_TH[t - s].float()
    return out_TH.to(x_TH.dtype)


def block_conv_torch(
    x_TH: torch.Tensor, change_TSJ: torch.Tensor, base_SH: torch.Tensor, *, block_size: int
) -> torch.Tensor:
    """Compute `block_conv` for all blocks at once, tap by tap."""
    (T, H), N, (S, J) = x_TH.shape, block_size, change_TSJ.shape[1:]
    x_BNJG = x_TH.view(T // N, N, J, H // J).float()  # B blocks, G channels in a group
    change_BNSJ1 = change_TSJ.unflatten(0, (T // N, N)).float()[..., None]
    base_SJG = base_SH.view(S, J, H // J).float()
    out_BNJG = (change_BNSJ1[:, :, 0] + base_SJG[0]).mul_(x_BNJG)
    for s in range(1, min(S, N)):
        out_BNJG[:, s:] += (change_BNSJ1[:, s:, s] + base_SJG[s]).mul_(x_BNJG[:, :-s])
    return out_BNJG.view(T, H).to(x_TH.dtype)


@triton.jit(do_not_specialize=["N"], do_not_specialize_on_alignment=["change"])
def _block_conv_kernel(
    x, change, base, out, change_stride, N,
    H: tl.constexpr, S: tl.constexpr, J: tl.constexpr, BLOCK_H: tl.constexpr,
):  # fmt: skip
    t = tl.program_id(0)
    h = tl.program_id(1) * BLOCK_H + tl.arange(0, BLOCK_H)  # [H]
    group = h // (H // J)  # [H]
    row = t.to(tl.int64)
    total = tl.zeros([BLOCK_H], tl.float32)
    for s in tl.static_range(S):
        here = (h < H) & (s <= t % N)  # channel h exists, and row t - s is in the same block
        change_H = tl.load(change + row * change_stride + s * J + group, mask=here, other=0).to(tl.float32)
        tap_H = tl.load(base + s * H + h, mask=here, other=0).to(tl.float32) + change_H
        total += tap_H * tl.load(x + (row - s) * H + h, mask=here, other=0).to(tl.float32)
    tl.store(out + row * H + h, total.to(out.dtype.element_ty), mask=h < H)


def block_conv_triton(
    x_TH: torch.Tensor, change_TSJ: torch.Tensor, base_SH: torch.Tensor, *, block_size: int
) -> torch.Tensor:
    """Compute `block_conv` by its kernel: one program per packed row and BLOCK_H channels."""
    (T, H), (S, J) = x_TH.shape, change_TSJ.shape[1:]
    out_TH = torch.empty_like(x_TH)
    if T:
        _block_conv_kernel[(T, triton.cdiv(H, BLOCK_H))](
            *(x_TH, change_TSJ, base_SH, out_TH, change_TSJ.stride(0), block_size), *(H, S, J, BLOCK_H), num_warps=2
        )
    return out_TH


BLOCK_CONV = Forms(on_cpu=block_conv_torch, on_gpu=block_conv_triton)


def block_conv(x_TH: torch.Tensor, change_TSJ: torch.Tensor, base_SH: torch.Tensor, *, block_size: int) -> torch.Tensor:
    """Return `x_TH` convolved within blocks of `block_size` >= 2 rows, [T, H] in the dtype of `x_TH`. T may be 0.

    Args:
        x_TH, base_SH: contiguous, of any dtype in MODEL_DTYPES.
        change_TSJ: of any dtype in MODEL_DTYPES. Rows may be strided, as in one half of a projection [T, 2, S, J].
        block_size: N.
    Raises:
        ValueError: shapes, dtypes or layouts that do not fit.
    """
    shapes = Shapes()
    shapes.check(*MODEL_DTYPES, x_TH=x_TH)
    shapes.check_strided(*MODEL_DTYPES, change_TSJ=change_TSJ)
    shapes.check(*MODEL_DTYPES, base_SH=base_SH)
    T, H, S, J = (shapes[letter] for letter in "THSJ")
    if block_size < 2 or T % block_size:
        raise ValueError(f"{T} rows in blocks of {block_size}; pass whole blocks of at least 2 rows")
    if S < 1 or J < 1 or H % J:
        raise ValueError(f"{H} channels in {J} groups with {S} taps; groups must be of one size, and a tap is needed")
    if change_TSJ.stride()[1:] != (J, 1):
        raise ValueError(f"change_TSJ has strides {change_TSJ.stride()}; the S x J values of a row must be contiguous")
    return BLOCK_CONV.form_for(x_TH)(x_TH, change_TSJ, base_SH, block_size=block_size)
