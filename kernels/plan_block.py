"""Plan the next block of every request: its tokens before drafting, their positions, and their KV slots.

Shapes: B requests, N tokens per block (slot 0 is the anchor, slots 1..N-1 are mask tokens). SGLang's request-to-token
table has Q rows of M KV slots, one row per request that the server can run at once.
Cost: one launch, launch-bound: it reads BN KV slots and writes 3BN + B values, a few KiB.

The anchor is committed, but its K and V are not computed yet. Its position is the first after the prefix: prefix_len.
The scheduler reserves KV slots for the whole block before the step. Positions past the end of a table row (M and above)
get KV slot 0, the padding slot, whose content is never read. Values of `req_pool_indices_B` must be in 0..Q-1. This is
not checked.
"""

from collections.abc import Sequence
from typing import NamedTuple

import torch
import triton
import triton.language as tl
from sglang_dflash_kernels.checks import Shapes
from sglang_dflash_kernels.dispatch import Forms
from torch.nn.functional import pad


class PlannedBlock(NamedTuple):
    """Tokens, positions and KV slots of each request's block."""

    tokens_BN: torch.Tensor  # int64, the anchor, then mask tokens
    positions_BN: torch.Tensor  # int64, prefix_len + index in the block
    slots_BN: torch.Tensor  # int64, the KV slot of each position
    end_B: torch.Tensor  # int64, prefix_len + N: number of tokens up to the end of the block


def plan_block_ref(
    anchor_B: torch.Tensor,
    prefix_len_B: torch.Tensor,
    req_pool_indices_B: torch.Tensor,
    req_to_token_QM: torch.Tensor,
    *,
    mask_token_id: int,
    n_tokens: int,
) -> PlannedBlock:
    """Define `plan_block`, in PyTorch."""
    last = req_to_token_QM.shape[1] - 1
    tokens_BN = pad(anchor_B[:, None], (0, n_tokens - 1), value=mask_token_id)
    positions_BN = prefix_len_B[:, None] + torch.arange(n_tokens, device=anchor_B.device)
    slots_BN = req_to_token_QM[req_pool_indices_B[:, None], positions_BN.clamp(max=last)].long()
    return PlannedBlock(tokens_BN, positions_BN, slots_BN.where(positions_BN <= last, 0), prefix_len_B + n_tokens)


def plan_block_torch(
    anchor_B: torch.Tensor,
    prefix_len_B: torch.Tensor,
    req_pool_indices_B: torch.Tensor,
    req_to_token_QM: torch.Tensor,
    *,
    mask_token_id: int,
    n_tokens: int,
) -> PlannedBlock:
    """Compute `plan_block`, with fewer operations if N = 1. In this case `tokens_BN` is a view of `anchor_B`."""
    if n_tokens > 1:
        rows = anchor_B, prefix_len_B, req_pool_indices_B
        return plan_block_ref(*rows, req_to_token_QM, mask_token_id=mask_token_id, n_tokens=n_tokens)
    last, positions_B1 = req_to_token_QM.shape[1] - 1, prefix_len_B[:, None].clone()
    slots_B1 = req_to_token_QM[req_pool_indices_B[:, None], positions_B1.clamp(max=last)].long()
    return PlannedBlock(anchor_B[:, None], positions_B1, slots_B1.where(positions_B1 <= last, 0), prefix_len_B + 1)


@triton.jit(do_not_specialize=["N", "N2"], do_not_specialize_on_alignment=["anchor", "prefix_len", "rows"])
def _plan_block_kernel(
    anchor, prefix_len, rows, req_to_token, tokens, positions, slots, end, tokens2, positions2, slots2, end2,
    mask_token_id, M, N, N2, BLOCK_N: tl.constexpr,
):  # fmt: skip
    """Write a block of N tokens. If N2 is not 0, also write a block of N2 tokens to `tokens2`, ..., `end2`."""
    b = tl.program_id(0).to(tl.int64)
    slot = tl.arange(0, BLOCK_N)  # [N]
    first = tl.load(prefix_len + b)
    position = first + slot  # [N]
    row = req_to_token + tl.load(rows + b).to(tl.int64) * M
    kv_slot = tl.load(row + position, mask=(slot < tl.maximum(N, N2)) & (position < M), other=0)  # [N]
    token = tl.where(slot == 0, tl.load(anchor + b), mask_token_id)  # [N]
    tl.store(tokens + b * N + slot, token, mask=slot < N)
    tl.store(positions + b * N + slot, position, mask=slot < N)
    tl.store(slots + b * N + slot, kv_slot, mask=slot < N)
    tl.store(tokens2 + b * N2 + slot, token, mask=slot < N2)
    tl.store(positions2 + b * N2 + slot, position, mask=slot < N2)
    tl.store(slots2 + b * N2 + slot, kv_slot, mask=slot < N2)
    tl.store(end + b, first + N)
    tl.store(end2 + b, first + N2, mask=N2 > 0)


def plan_block_triton(
    anchor_B: torch.Tensor,
    prefix_len_B: torch.Tensor,
    req_pool_indices_B: torch.Tensor,
    req_to_token_QM: torch.Tensor,
    *,
    mask_token_id: int,
    n_tokens: int,
) -> PlannedBlock:
    """Compute `plan_block` by its kernel: one program per request."""
    request = anchor_B, prefix_len_B, req_pool_indices_B, req_to_token_QM
    return _launch(*request, mask_token_id=mask_token_id, n_tokens=[n_tokens])[0]


def plan_blocks_triton(
    *request: torch.Tensor, mask_token_id: int, n_tokens: tuple[int, int]
) -> tuple[PlannedBlock, PlannedBlock]:
    """Compute `plan_blocks` by one launch of the kernel of `plan_block`."""
    first, second = _launch(*request, mask_token_id=mask_token_id, n_tokens=n_tokens)
    return first, second


def _launch(*request: torch.Tensor, mask_token_id: int, n_tokens: Sequence[int]) -> list[PlannedBlock]:
    anchor_B, _, _, req_to_token_QM = request
    B = len(anchor_B)
    out = [PlannedBlock(*(anchor_B.new_empty(shape) for shape in ((B, n), (B, n), (B, n), B))) for n in n_tokens]
    if B:
        sizes = req_to_token_QM.shape[1], n_tokens[0], n_tokens[1] if len(n_tokens) > 1 else 0
        block_n = triton.next_power_of_2(max(n_tokens))
        _plan_block_kernel[(B,)](*request, *out[0], *out[-1], mask_token_id, *sizes, BLOCK_N=block_n, num_warps=1)
    return out


def plan_blocks_torch(
    *request: torch.Tensor, mask_token_id: int, n_tokens: tuple[int, int]
) -> tuple[PlannedBlock, PlannedBlock]:
    """Define `plan_blocks`: two blocks of each request, of `n_tokens` tokens. The arguments are those of `plan_block`.

    A step whose verify is narrower or wider than its drafted block plans both. On a GPU this is one launch.
    """
    first, second = (plan_block_torch(*request, mask_token_id=mask_token_id, n_tokens=n) for n in n_tokens)
    return first, second


PLAN_BLOCKS = Forms(on_cpu=plan_blocks_torch, on_gpu=plan_blocks_triton)
PLAN_BLOCK = Forms(on_cpu=plan_block_torch, on_gpu=plan_block_triton)


def plan_block(
    anchor_B: torch.Tensor,
    prefix_len_B: torch.Tensor,
    req_pool_indices_B: torch.Tensor,
    req_to_token: torch.Tensor,
    *,
    mask_token_id: int,
    n_tokens: int,
) -> PlannedBlock:
    """Plan blocks of `n_tokens` >= 1. B may be 0.

    Args:
        anchor_B: int64, last committed token of each request.
        prefix_len_B: int64, number of committed tokens before the anchor.
        req_pool_indices_B: int64 or int32, row of each request in `req_to_token`.
        req_to_token: int32 [Q, M], SGLang's request-to-token table.
    Raises:
        ValueError: shapes, dtypes or layouts that do not fit.
    """
    shapes = Shapes()
    shapes.check(torch.int64, anchor_B=anchor_B, prefix_len_B=prefix_len_B)
    shapes.check(torch.int64, torch.int32, req_pool_indices_B=req_pool_indices_B)
    shapes.check(torch.int32, req_to_token_QM=req_to_token)
    rows = anchor_B, prefix_len_B, req_pool_indices_B
    return PLAN_BLOCK.form_for(anchor_B)(*rows, req_to_token, mask_token_id=mask_token_id, n_tokens=n_tokens)
