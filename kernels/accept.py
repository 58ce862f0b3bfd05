"""Accept the longest drafted prefix that equals the target's tokens, and add the target's next token: the bonus.

Shapes: B requests, N tokens per block (slot 0 is the anchor, slots 1..N-1 are drafts).
Cost: one launch, launch-bound: it reads 2BN tokens and writes BN, a few KiB.

`target_BN[b, i]` is the target's token after slot i, given slots 0..i: an argmax or a sample. A step emits the target's
tokens up to and including the first that differs from the draft in the next slot. If none differs, the step emits all
N tokens. So the output has exactly the target's distribution.
For a draft that proposes one token with certainty, this is equivalent to rejection sampling (Leviathan et al. 2023,
arXiv:2211.17192).

A recurrent state is saved for the prefix cache when the number of tokens that it has read is a multiple of the track
interval. After slot i it has read prefix_len + i + 1 tokens. So the result also has the last slot of this kind.
"""

from typing import NamedTuple

import torch
import triton
import triton.language as tl
from sglang_dflash_kernels.checks import Shapes
from sglang_dflash_kernels.dispatch import Forms


class Accepted(NamedTuple):
    """Result of `accept`: the tokens that a step emits, which are the accepted drafts and then the bonus."""

    n_accepted_B: torch.Tensor  # int32, number of accepted drafts, 0..N-1
    anchor_B: torch.Tensor  # int64, the bonus, which is the next step's anchor
    committed_BN: torch.Tensor  # int64, accepted drafts, then the bonus, then zeros (if N = 1 the bonus alone)
    n_committed_B: torch.Tensor  # int32, n_accepted + 1, also the number of kept rows: anchor and accepted drafts
    next_prefix_len_B: torch.Tensor  # int64, number of committed tokens before the next anchor
    last_B: torch.Tensor  # int64, n_accepted: block slot of the last kept row
    tracked_B: torch.Tensor | None  # int64, last kept slot that ends a track interval, else -1; None: no interval


def tracked_slot(
    prefix_len_B: torch.Tensor, next_prefix_len_B: torch.Tensor, track_interval: int
) -> torch.Tensor | None:
    """Return the field `tracked_B` of `Accepted`."""
    if not track_interval:
        return None
    return (next_prefix_len_B // track_interval * track_interval - prefix_len_B - 1).clamp(min=-1)


def accept_ref(
    tokens_BN: torch.Tensor, target_BN: torch.Tensor, prefix_len_B: torch.Tensor, track_interval: int = 0
) -> Accepted:
    """Define `accept`, in PyTorch."""
    agrees_BD = tokens_BN[:, 1:] == target_BN[:, :-1]  # D = N-1 drafts
    n_accepted_B1 = agrees_BD.int().cumprod(dim=1).sum(dim=1, keepdim=True)
    slot_N = torch.arange(target_BN.shape[1], device=target_BN.device)
    # Accepted drafts equal the target's tokens, so `target_BN` already contains them.
    committed_BN = target_BN.where(slot_N <= n_accepted_B1, 0)
    anchor_B = target_BN.gather(1, n_accepted_B1).squeeze(1)
    n_accepted_B = n_accepted_B1.squeeze(1)
    n_committed_B = n_accepted_B + 1
    next_len_B = prefix_len_B + n_committed_B
    counts = n_accepted_B.int(), anchor_B, committed_BN, n_committed_B.int(), next_len_B
    return Accepted(*counts, n_accepted_B, tracked_slot(prefix_len_B, next_len_B, track_interval))


def accept_torch(
    tokens_BN: torch.Tensor, target_BN: torch.Tensor, prefix_len_B: torch.Tensor, track_interval: int = 0
) -> Accepted:
    """Compute `accept`, with fewer operations if N = 1. In this case `committed_BN` is the tensor `target_BN`."""
    if target_BN.shape[1] > 1:
        return accept_ref(tokens_BN, target_BN, prefix_len_B, track_interval)
    n_accepted_B, next_len_B = torch.zeros_like(prefix_len_B, dtype=torch.int32), prefix_len_B + 1
    counts = n_accepted_B, target_BN[:, 0], target_BN, n_accepted_B + 1, next_len_B
    return Accepted(*counts, torch.zeros_like(prefix_len_B), tracked_slot(prefix_len_B, next_len_B, track_interval))


@triton.jit(do_not_specialize=["N"], do_not_specialize_on_alignment=["tokens", "target", "prefix_len"])
def _accept_kernel(
    tokens, target, prefix_len, n_accepted, anchor, committed, n_committed, next_len, last, tracked, N,
    INTERVAL: tl.constexpr, BLOCK_N: tl.constexpr,
):  # fmt: skip
    b = tl.program_id(0).to(tl.int64)
    slot = tl.arange(0, BLOCK_N)  # [N]
    target_token = tl.load(target + b * N + slot, mask=slot < N, other=0)  # [N]
    draft = tl.load(tokens + b * N + slot + 1, mask=slot < N - 1, other=0)  # [N], the draft in the next slot
    goes_on = (draft == target_token) & (slot < N - 1)  # the last slot has no next draft
    n = tl.min(tl.where(goes_on, BLOCK_N, slot), axis=0)  # the first slot whose next draft is rejected or missing
    tl.store(n_accepted + b, n)
    tl.store(anchor + b, tl.load(target + b * N + n))
    tl.store(committed + b * N + slot, tl.where(slot <= n, target_token, 0), mask=slot < N)
    tl.store(n_committed + b, n + 1)
    prefix = tl.load(prefix_len + b)
    tl.store(next_len + b, prefix + n + 1)
    tl.store(last + b, n.to(tl.int64))
    if INTERVAL:
        tl.store(tracked + b, tl.maximum((prefix + n + 1) // INTERVAL * INTERVAL - prefix - 1, -1))


def accept_triton(
    tokens_BN: torch.Tensor, target_BN: torch.Tensor, prefix_len_B: torch.Tensor, track_interval: int = 0
) -> Accepted:
    """Compute `accept` by its kernel: one program per request."""
    B, N = tokens_BN.shape
    int32_B = torch.empty_like(prefix_len_B, dtype=torch.int32)
    out = Accepted(
        n_accepted_B=int32_B,
        anchor_B=torch.empty_like(prefix_len_B),
        committed_BN=torch.empty_like(target_BN),
        n_committed_B=torch.empty_like(int32_B),
        next_prefix_len_B=torch.empty_like(prefix_len_B),
        last_B=torch.empty_like(prefix_len_B),
        tracked_B=torch.empty_like(prefix_len_B) if track_interval else None,
    )
    if B:
        written = out if track_interval else out._replace(tracked_B=out.last_B)  # the kernel needs some tensor
        constants = {"INTERVAL": track_interval, "BLOCK_N": triton.next_power_of_2(N)}
        _accept_kernel[(B,)](tokens_BN, target_BN, prefix_len_B, *written, N, **constants, num_warps=1)
    return out


ACCEPT = Forms(on_cpu=accept_torch, on_gpu=accept_triton)


def accept(
    tokens_BN: torch.Tensor, target_BN: torch.Tensor, prefix_len_B: torch.Tensor, track_interval: int = 0
) -> Accepted:
    """Accept the drafts in `tokens_BN`.

    Args:
        tokens_BN: int64, anchor and drafts; N >= 1, B may be 0.
        target_BN: int64, the target's token after every slot.
        prefix_len_B: int64, number of committed tokens before the anchor.
        track_interval: number of tokens between saved recurrent states; 0: none are saved.
    Raises:
        ValueError: shapes, dtypes or layouts that do not fit.
    """
    Shapes().check(torch.int64, tokens_BN=tokens_BN, target_BN=target_BN, prefix_len_B=prefix_len_B)
    return ACCEPT.form_for(tokens_BN)(tokens_BN, target_BN, prefix_len_B, track_interval)
