"""Penalise the target's logits at every slot for tokens that occur in the output or in the drafts up to the slot.

Shapes: B requests, N tokens per block (slot 0 is the anchor), V vocabulary. P of the requests have a penalty, each
with at most E stop tokens. The table of counts has R rows.
Cost: reads and writes the logits of P * N slots, and reads the counts of P rows once per slot: 12 PNV bytes in fp32.
For 8 requests of 16 slots this is less than a hundredth of the bytes that a 27B target in bf16 reads to verify them.

`counts_RV` counts each token in a request's output, anchor included. At slot i the drafts 1..i are counted in addition,
because the token chosen at slot i is committed only if these drafts are accepted. The order is SGLang's: first additive
penalties (frequency, presence, and minus infinity for stop tokens before `min_new_tokens`), then scaling (repetition).
"""

from typing import NamedTuple

import torch
import triton
import triton.language as tl
from sglang_dflash_kernels.checks import Shapes
from sglang_dflash_kernels.dispatch import Forms

BLOCK_V = 1024  # number of token ids per program
INF = tl.constexpr(float("inf"))


class Asked(NamedTuple):
    """The P requests of a batch that have a penalty, and their parameters."""

    index_P: torch.Tensor  # int64, index of each request in the batch
    row_P: torch.Tensor  # int64, row of each request in `counts_RV`
    frequency_P: torch.Tensor  # float32, subtracted from a token's logit once per occurrence
    presence_P: torch.Tensor  # float32, subtracted once from the logit of each token that occurred
    # float32; for each token that occurred, divides its logit if positive, and multiplies its logit if negative
    repetition_P: torch.Tensor
    min_new_P: torch.Tensor  # int64, number of output tokens before a stop token may be chosen
    stop_PE: torch.Tensor  # int64, stop tokens, padded with -1


def additive(counts_PNV: torch.Tensor, n_output_PN: torch.Tensor, asked: Asked) -> torch.Tensor:
    """Return the values to add to logits, float32 [P, N, V].

    Args:
        counts_PNV: int32 or int64, number of occurrences of each token, up to and including each slot.
        n_output_PN: int64, number of output tokens up to and including each slot.
        asked: parameters.
    """
    added_PNV = -(asked.frequency_P[:, None, None] * counts_PNV)
    added_PNV -= asked.presence_P[:, None, None] * (counts_PNV > 0)
    token_V = torch.arange(counts_PNV.shape[2], device=counts_PNV.device)
    stops_PV = (asked.stop_PE[:, :, None] == token_V).any(dim=1)
    early_PN = n_output_PN < asked.min_new_P[:, None]
    return added_PNV.masked_fill_(early_PN[:, :, None] & stops_PV[:, None], float("-inf"))


def scaling(counts_PNV: torch.Tensor, asked: Asked) -> torch.Tensor:
    """Return scales, float32 [P, N, V]: a negative logit is multiplied by its scale, any other is divided by it."""
    return torch.where(counts_PNV > 0, asked.repetition_P[:, None, None], 1.0)


def penalise_ref(
    logits_BNV: torch.Tensor, tokens_BN: torch.Tensor, n_output_P: torch.Tensor, counts_RV: torch.Tensor, asked: Asked
) -> None:
    """Define `penalise`, in PyTorch."""
    drafts_PD = tokens_BN[asked.index_P, 1:]
    P, N, V = len(asked.index_P), *logits_BNV.shape[1:]
    counts_PNV = counts_RV.new_zeros(P, N, V)
    counts_PNV[:, 1:].scatter_(2, drafts_PD[:, :, None], 1)
    counts_PNV = counts_PNV.cumsum(dim=1) + counts_RV[asked.row_P, None]
    n_output_PN = n_output_P[:, None] + torch.arange(N, device=n_output_P.device)
    logits_PNV = logits_BNV[asked.index_P] + additive(counts_PNV, n_output_PN, asked)
    scale_PNV = scaling(counts_PNV, asked)
    logits_PNV = torch.where(logits_PNV < 0, logits_PNV * scale_PNV, logits_PNV / scale_PNV)
    logits_BNV[asked.index_P] = logits_PNV.to(logits_BNV.dtype)


@triton.jit(
    do_not_specialize=["N", "E"],
    do_not_specialize_on_alignment=[
        *("tokens", "n_output", "index", "row", "frequency", "presence", "repetition", "min_new", "stop")
    ],
)
def _penalise_kernel(
    logits,
    tokens,
    n_output,
    counts,
    index,
    row,
    frequency,
    presence,
    repetition,
    min_new,
    stop,
    stride_b,
    stride_n,
    N,
    V,
    E,
    BLOCK_V: tl.constexpr,
):
    p = tl.program_id(0)
    slot = tl.program_id(1)
    v = tl.program_id(2) * BLOCK_V + tl.arange(0, BLOCK_V)  # [V]
    b = tl.load(index + p)
    here = logits + b * stride_b + slot * stride_n + v  # [V]
    x = tl.load(here, mask=v < V, other=0).to(tl.float32)  # [V]
    count = tl.load(counts + tl.load(row + p) * V + v, mask=v < V, other=0)  # [V]
    for i in range(slot):  # tokens are compared as int32, because int64 takes twice the registers
        count += (v == tl.load(tokens + b * N + 1 + i).to(tl.int32)).to(tl.int32)
    occurred = count > 0  # [V]
    x += -(tl.load(frequency + p) * count.to(tl.float32)) - tl.where(occurred, tl.load(presence + p), 0.0)
    is_stop = v < 0  # [V]
    for e in range(E):
        is_stop |= v == tl.load(stop + p * E + e).to(tl.int32)
    early = tl.load(n_output + p) + slot < tl.load(min_new + p)
    x = tl.where(is_stop & early, -INF, x)
    scale = tl.where(occurred, tl.load(repetition + p), 1.0)  # [V]
    tl.store(here, tl.where(x < 0, x * scale, x / scale), mask=v < V)


def penalise_triton(
    logits_BNV: torch.Tensor, tokens_BN: torch.Tensor, n_output_P: torch.Tensor, counts_RV: torch.Tensor, asked: Asked
) -> None:
    """Compute `penalise` by its kernel: one program per request with a penalty, slot, and BLOCK_V token ids."""
    (P, E), (N, V) = asked.stop_PE.shape, logits_BNV.shape[1:]
    grid = P, N, triton.cdiv(V, BLOCK_V)
    stride_b, stride_n, _ = logits_BNV.stride()
    if P:
        _penalise_kernel[grid](
            logits_BNV, tokens_BN, n_output_P, counts_RV, *asked, stride_b, stride_n, N, V, E, BLOCK_V=BLOCK_V
        )


PENALISE = Forms(on_cpu=penalise_ref, on_gpu=penalise_triton)


def penalise_(
    logits_BNV: torch.Tensor, tokens_BN: torch.Tensor, n_output_P: torch.Tensor, counts_RV: torch.Tensor, asked: Asked
) -> None:
    """Penalise `logits_BNV` in place.

    Args:
        logits_BNV: float32, bfloat16 or float16. Strides between slots may exceed V, as with a padded vocabulary.
        tokens_BN: int64, anchor and drafts.
        n_output_P: int64, number of output tokens up to and including the anchor.
        counts_RV: int32, number of occurrences of each token in the output, anchor included.
        asked: `index_P` without duplicates, `row_P` below R, and token ids below V. This is not checked.
    Raises:
        ValueError: shapes, dtypes or layouts that do not fit.
    """
    shapes = Shapes()
    shapes.check_strided(torch.float32, torch.bfloat16, torch.float16, logits_BNV=logits_BNV)
    if logits_BNV.stride(2) != 1:
        raise ValueError(f"logits_BNV has strides {logits_BNV.stride()}; a row must be contiguous")
    shapes.check(torch.int64, tokens_BN=tokens_BN, n_output_P=n_output_P, index_P=asked.index_P, row_P=asked.row_P)
    shapes.check(torch.int64, min_new_P=asked.min_new_P, stop_PE=asked.stop_PE)
    shapes.check(torch.float32, frequency_P=asked.frequency_P, presence_P=asked.presence_P)
    shapes.check(torch.float32, repetition_P=asked.repetition_P)
    shapes.check(torch.int32, counts_RV=counts_RV)
    PENALISE.form_for(logits_BNV)(logits_BNV, tokens_BN, n_output_P, counts_RV, asked)
