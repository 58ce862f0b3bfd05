"""Write draft KV for context: normalise and rotate K, then scatter K and V of every draft layer to their KV slots.

Shapes: T packed rows, L draft layers, G KV heads of width E. A cache layer is [S, G, E], for S KV slots. The rotary
table is [P, R], for P positions and rotary width R <= E: R/2 cosines, then R/2 sines (neox style).
Cost: reads 2TLGE values, writes as many. Memory-bound when T is large, launch-bound in a decode step.

The draft model's attention computes the K of a block, and this op the K of the block's context. Attention uses both
together, so this op rounds as the model does: normalise in fp32, round to K's dtype, rotate in fp32, round to K's dtype
again. A cache of a narrower dtype rounds once more. fp8 caches have scale 1, and values beyond 448 saturate.

In a decode step each request has N = T / B rows. Only its first `n_kept_B` rows are read and written. In a prefill
(`n_kept_B` is None) every row is kept. Kept rows must have positions in 0..P-1 and KV slots in 0..S-1. This is not
checked, because a check would wait for the device. If rows share a KV slot, as padding rows do, any of them may remain.
"""

from typing import NamedTuple

import torch
import triton
import triton.language as tl
from sglang_dflash_kernels.checks import Shapes
from sglang_dflash_kernels.dispatch import Forms

MODEL_DTYPES = (torch.float32, torch.bfloat16, torch.float16)
FP8 = torch.float8_e4m3fn
FP8_MAX = torch.finfo(FP8).max  # 448; larger values saturate


class KeyTransform(NamedTuple):
    """Norm and rotation that the draft's attention applies to K between projection and cache."""

    cos_sin_PR: torch.Tensor  # rotary table, any dtype in MODEL_DTYPES
    k_norm_LE: torch.Tensor | None  # weights of the RMS norm, any dtype in MODEL_DTYPES; None: no norm
    eps: float  # added to the mean square in the norm


class ContextCaches(NamedTuple):
    """K and V caches of the draft, one of each per layer, and their device addresses. Created by `build`."""

    k_L: tuple[torch.Tensor, ...]  # L tensors [S, G, E]
    v_L: tuple[torch.Tensor, ...]  # L tensors [S, G, E]
    k_address_L: torch.Tensor  # int64, on the caches' device
    v_address_L: torch.Tensor  # int64, on the caches' device

    @classmethod
    def build(cls, k_L: list[torch.Tensor], v_L: list[torch.Tensor]) -> "ContextCaches":
        """Check the caches and store their addresses. Call `build` again if a cache is reallocated.

        Args:
            k_L, v_L: [S, G, E] per layer, of one dtype and equal strides, at 16-byte boundaries; each KV slot is
                contiguous. The dtype is in MODEL_DTYPES or fp8_e4m3. View SGLang's uint8 storage of fp8 as fp8_e4m3.
        Raises:
            ValueError: the caches do not meet these conditions.
        """
        if not k_L or len(k_L) != len(v_L):
            raise ValueError(f"{len(k_L)} K caches and {len(v_L)} V caches; pass one of each per draft layer")
        first, shapes = k_L[0], Shapes()
        for cache_SGE in (*k_L, *v_L):
            shapes.check_strided(*MODEL_DTYPES, FP8, cache_SGE=cache_SGE)
            if cache_SGE.stride() != first.stride() or cache_SGE.dtype != first.dtype:
                raise ValueError(
                    f"cache layers differ: {describe(cache_SGE)} and {describe(first)}; allocate them alike"
                )
        if first.stride()[1:] != (first.shape[2], 1):
            raise ValueError(f"a cache layer is {describe(first)}; a slot's heads must lie side by side (NHD layout)")
        if any(cache.data_ptr() % 16 for cache in (*k_L, *v_L)):
            raise ValueError(f"{describe(first)} starts at no 16-byte boundary; allocate each cache layer by itself")
        k_address_L, v_address_L = (
            torch.tensor([cache.data_ptr() for cache in caches], dtype=torch.int64, device=first.device)
            for caches in (k_L, v_L)
        )
        return cls(tuple(k_L), tuple(v_L), k_address_L, v_address_L)


def describe(tensor: torch.Tensor) -> str:
    """Return dtype, shape and strides as text for messages."""
    return f"{tensor.dtype} {tuple(tensor.shape)} with strides {tensor.stride()}"


def append_context_ref(
    k_TLGE: torch.Tensor,
    v_TLGE: torch.Tensor,
    positions_T: torch.Tensor,
    slots_T: torch.Tensor,
    *,
    caches: ContextCaches,
    key: KeyTransform,
    n_kept_B: torch.Tensor | None = None,
) -> None:
    """Define `append_context`, in PyTorch."""
    if n_kept_B is not None:
        slot_N = torch.arange(len(k_TLGE) // max(len(n_kept_B), 1), device=n_kept_B.device)
        kept_T = (slot_N < n_kept_B[:, None]).flatten().nonzero()[:, 0]
        rows = (k_TLGE, v_TLGE, positions_T, slots_T)
        k_TLGE, v_TLGE, positions_T, slots_T = (x.index_select(0, kept_T) for x in rows)
    if key.k_norm_LE is not None:
        k_TLGE = normalised(k_TLGE, key.k_norm_LE, key.eps)
    k_TLGE = rotated(k_TLGE, key.cos_sin_PR.index_select(0, positions_T))
    for layer, (k_cache, v_cache) in enumerate(zip(caches.k_L, caches.v_L, strict=True)):
        scatter(k_cache, slots_T, k_TLGE[:, layer])
        scatter(v_cache, slots_T, v_TLGE[:, layer])


def normalised(k_TLGE: torch.Tensor, weight_LE: torch.Tensor, eps: float) -> torch.Tensor:
    """Return the RMS norm over each head, computed in fp32."""
    k = k_TLGE.float()
    k = k * torch.rsqrt(k.pow(2).mean(dim=-1, keepdim=True) + eps)
    return (k * weight_LE[:, None]).to(k_TLGE.dtype)


def rotated(k_TLGE: torch.Tensor, cos_sin_TR: torch.Tensor) -> torch.Tensor:
    """Return K with the first R values of each head rotated in fp32, as R/2 planes (i, i + R/2)."""
    width = cos_sin_TR.shape[1]
    cos, sin = cos_sin_TR[:, None, None].float().chunk(2, dim=-1)
    first, second = k_TLGE[..., :width].float().chunk(2, dim=-1)
    turned = (x.to(k_TLGE.dtype) for x in (first * cos - second * sin, second * cos + first * sin))
    return torch.cat((*turned, k_TLGE[..., width:]), dim=-1)


def scatter(cache_SGE: torch.Tensor, slots_T: torch.Tensor, values_TGE: torch.Tensor) -> None:
    """Write values [T, G, E] to their KV slots, int64 [T], in the cache's dtype."""
    if cache_SGE.dtype == FP8:  # clamped, because some torch versions give NaN instead of saturating
        values_TGE = values_TGE.float().clamp(-FP8_MAX, FP8_MAX)
    cache_SGE[slots_T] = values_TGE.to(cache_SGE.dtype)


@triton.jit
def _for_cache(x, dtype: tl.constexpr, CLAMP: tl.constexpr):
    if CLAMP is not None:  # fp8 cache; a NaN stays NaN
        x = tl.clamp(x.to(tl.float32), -CLAMP, CLAMP, propagate_nan=tl.PropagateNan.ALL)
    return x.to(dtype)


@triton.jit(do_not_specialize=["N"], do_not_specialize_on_alignment=["positions", "slots", "n_kept"])
def _append_context_kernel(
    k,
    v,
    positions,
    slots,
    n_kept,  # None: every row is kept
    k_norm,  # None: no norm
    cos_sin,
    k_address,
    v_address,
    cache,  # the first cache layer; only its dtype is used
    row_stride,
    layer_stride,
    slot_stride,
    eps,
    N,  # number of rows per request; only read if n_kept is given
    G: tl.constexpr,
    E: tl.constexpr,
    R: tl.constexpr,
    CLAMP: tl.constexpr,
    BLOCK_G: tl.constexpr,
    BLOCK_E: tl.constexpr,
    BLOCK_HALF: tl.constexpr,
    BLOCK_REST: tl.constexpr,
):
    t = tl.program_id(0).to(tl.int64)
    layer = tl.program_id(1).to(tl.int64)
    if n_kept is not None and t % N >= tl.load(n_kept + t // N):
        return
    dtype: tl.constexpr = k.dtype.element_ty
    cache_dtype: tl.constexpr = cache.dtype.element_ty
    row = t * row_stride + layer * layer_stride
    slot = tl.load(slots + t) * slot_stride
    # Without this hint the compiler stores single values, not vectors. `ContextCaches.build` has checked the alignment.
    k_cache = tl.multiple_of(tl.load(k_address + layer).to(cache.dtype), 16) + slot
    v_cache = tl.multiple_of(tl.load(v_address + layer).to(cache.dtype), 16) + slot
    g = tl.arange(0, BLOCK_G)[:, None]  # [G, 1]

    e = tl.arange(0, BLOCK_E)[None, :]  # [1, E]
    in_head = (g < G) & (e < E)
    value = tl.load(v + row + g * E + e, mask=in_head, other=0)  # [G, E]
    tl.store(v_cache + g * E + e, _for_cache(value, cache_dtype, CLAMP), mask=in_head)

    HALF: tl.constexpr = R // 2
    i = tl.arange(0, BLOCK_HALF)[None, :]  # [1, HALF]; values i and i + HALF of a head are rotated together
    in_half = (g < G) & (i < HALF)
    k_head = k + row + g * E  # [G, 1]
    first = tl.load(k_head + i, mask=in_half, other=0)  # [G, HALF]
    second = tl.load(k_head + HALF + i, mask=in_half, other=0)  # [G, HALF]
    rest = tl.zeros([BLOCK_G, BLOCK_REST], dtype)
    r = R + tl.arange(0, BLOCK_REST)[None, :]  # [1, REST]
    if R < E:
        rest = tl.load(k_head + r, mask=(g < G) & (r < E), other=0)  # [G, REST]
    if k_norm is not None:
        x = first.to(tl.float32)
        y = second.to(tl.float32)
        z = rest.to(tl.float32)
        squares = tl.sum(x * x, axis=1) + tl.sum(y * y, axis=1) + tl.sum(z * z, axis=1)  # [G]
        scale = tl.rsqrt(squares / E + eps)[:, None]  # [G, 1]
        weight = k_norm + layer * E
        first = (x * scale * tl.load(weight + i, mask=i < HALF, other=0).to(tl.float32)).to(dtype)
        second = (y * scale * tl.load(weight + HALF + i, mask=i < HALF, other=0).to(tl.float32)).to(dtype)
        rest = (z * scale * tl.load(weight + r, mask=r < E, other=0).to(tl.float32)).to(dtype)

    angle = cos_sin + tl.load(positions + t) * R
    cos = tl.load(angle + i, mask=i < HALF, other=0).to(tl.float32)  # [1, HALF]
    sin = tl.load(angle + HALF + i, mask=i < HALF, other=0).to(tl.float32)  # [1, HALF]
    x = first.to(tl.float32)
    y = second.to(tl.float32)
    first = (x * cos - y * sin).to(dtype)
    second = (y * cos + x * sin).to(dtype)
    k_out = k_cache + g * E  # [G, 1]
    tl.store(k_out + i, _for_cache(first, cache_dtype, CLAMP), mask=in_half)
    tl.store(k_out + HALF + i, _for_cache(second, cache_dtype, CLAMP), mask=in_half)
    if R < E:
        tl.store(k_out + r, _for_cache(rest, cache_dtype, CLAMP), mask=(g < G) & (r < E))


def append_context_triton(
    k_TLGE: torch.Tensor,
    v_TLGE: torch.Tensor,
    positions_T: torch.Tensor,
    slots_T: torch.Tensor,
    *,
    caches: ContextCaches,
    key: KeyTransform,
    n_kept_B: torch.Tensor | None = None,
) -> None:
    """Compute `append_context` by its kernel: one program per packed row and draft layer."""
    T, L, G, E = k_TLGE.shape
    if T == 0:
        return
    R = key.cos_sin_PR.shape[1]
    cache = caches.k_L[0]
    _append_context_kernel[(T, L)](
        k_TLGE,
        v_TLGE,
        positions_T,
        slots_T,
        n_kept_B,
        key.k_norm_LE,
        key.cos_sin_PR,
        caches.k_address_L,
        caches.v_address_L,
        cache,
        k_TLGE.stride(0),
        k_TLGE.stride(1),
        cache.stride(0),
        key.eps,
        T if n_kept_B is None else T // len(n_kept_B),
        G=G,
        E=E,
        R=R,
        CLAMP=FP8_MAX if cache.dtype == FP8 else None,
        BLOCK_G=triton.next_power_of_2(G),
        BLOCK_E=triton.next_power_of_2(E),
        BLOCK_HALF=triton.next_power_of_2(R // 2),
        BLOCK_REST=triton.next_power_of_2(max(E - R, 1)),
        num_warps=4,
    )


APPEND_CONTEXT = Forms(on_cpu=append_context_ref, on_gpu=append_context_triton)


def append_context(
    k_TLGE: torch.Tensor,
    v_TLGE: torch.Tensor,
    positions_T: torch.Tensor,
    slots_T: torch.Tensor,
    *,
    caches: ContextCaches,
    key: KeyTransform,
    n_kept_B: torch.Tensor | None = None,
) -> None:
    """Write K and V of T packed rows to `caches`. T may be 0.

    Args:
        k_TLGE, v_TLGE: of one dtype in MODEL_DTYPES and equal strides, G x E contiguous, e.g. views of one projection.
        positions_T, slots_T: int64, position and KV slot of each row.
        n_kept_B: int32, number of leading rows of each request to write; None: all rows.
    Raises:
        ValueError: shapes, dtypes or layouts that do not fit.
    """
    shapes = Shapes()
    shapes.check_strided(*MODEL_DTYPES, k_TLGE=k_TLGE)
    shapes.check_strided(k_TLGE.dtype, v_TLGE=v_TLGE)
    shapes.check(torch.int64, positions_T=positions_T, slots_T=slots_T)
    shapes.check(*MODEL_DTYPES, cos_sin_PR=key.cos_sin_PR)
    shapes.check_strided(caches.k_L[0].dtype, cache_SGE=caches.k_L[0])
    shapes.check(torch.int64, k_address_L=caches.k_address_L)
    if key.k_norm_LE is not None:
        shapes.check(*MODEL_DTYPES, k_norm_LE=key.k_norm_LE)
    if k_TLGE.stride() != v_TLGE.stride() or k_TLGE.stride()[2:] != (shapes["E"], 1):
        raise ValueError(
            f"k_TLGE is {describe(k_TLGE)}, v_TLGE {describe(v_TLGE)}; lay out both alike, heads side by side"
        )
    if shapes["R"] % 2 or not 0 < shapes["R"] <= shapes["E"]:
        raise ValueError(f"rotary width {shapes['R']} with heads of {shapes['E']}; it must be even and fit in a head")
    if n_kept_B is not None:
        shapes.check(torch.int32, n_kept_B=n_kept_B)
        if shapes["T"] != 0 and (shapes["B"] == 0 or shapes["T"] % shapes["B"]):
            raise ValueError(f"{shapes['T']} rows cannot be shared by {shapes['B']} requests; pass N rows each")
    append = APPEND_CONTEXT.form_for(k_TLGE)
    append(k_TLGE, v_TLGE, positions_T, slots_T, caches=caches, key=key, n_kept_B=n_kept_B)
