"""Count the gain of copies over a block's own guesses, at every place where the outcome of a copy is known.

Place d of a block is the point after slot d. `copy_draft` defines place, length, class and copy. A place is counted if
it has a match, all guesses before it were right, and a token was committed after it. At other places the outcome of a
copy is unknown. The committed tokens show which drafts would have been accepted. For each request:

    own      = number of leading guesses of the block that equal the committed tokens
    worth[d] = d + number of leading tokens of the copy at place d that equal the tokens committed after slot d
    gain    += worth[d] - own,   n += 1            in the class of length[d], for every counted place d

Both own and worth are at most N - 1, and at most the number of committed tokens, bonus included. When n exceeds MEMORY,
both counts of the class are halved and rounded down, so that recent steps weigh more.

`totals_K2` has two counts over all requests for each class, for monitoring: the number of blocks with a copy, and the
number of accepted copied drafts.

Shapes: as in `copy_draft`.
Cost: one launch, launch-bound: it reads up to D tokens of text for each of D places, 1 kB per request.
"""

import numpy as np
import torch
import triton
import triton.language as tl
from sglang_dflash_kernels.checks import Shapes
from sglang_dflash_kernels.copy_draft import (
    CLASS_OF,
    N_CLASSES,
    Copied,
    Texts,
    check_texts,
    copied_from,
    length_class,
)
from sglang_dflash_kernels.dispatch import Forms

MEMORY = 64  # number of counted places; counts of a class are halved when `n` exceeds it

_CLASSES, _MEMORY = tl.constexpr(N_CLASSES), tl.constexpr(MEMORY)


def weigh_copies_ref(
    tokens_BN: torch.Tensor,
    copied: Copied,
    committed_BN: torch.Tensor,
    n_committed_B: torch.Tensor,
    texts: Texts,
    *,
    totals_K2: torch.Tensor,
) -> None:
    """Define `weigh_copies`, in PyTorch."""
    B, N = tokens_BN.shape
    for b in range(B):
        row, n = int(texts.rows_B[b]), int(texts.prefix_len_B[b])
        block, counts_K2 = tokens_BN[b].tolist(), texts.counts_QK2[row]
        committed = committed_BN[b, : int(n_committed_B[b])].tolist()
        own = n_agreed(block[1:], committed)
        for d in range(min(own + 1, N - 1, len(committed))):
            length, source = int(copied.length_BD[b, d]), int(copied.source_BD[b, d])
            if length:
                tail = texts.text_QM[row, :n].tolist() + block[: d + 1]
                copy = [tail[source + i % (len(tail) - source)] for i in range(N - 1 - d)]
                gain = d + n_agreed(copy, committed[d:]) - own
                counts_K2[length_class(length)] += counts_K2.new_tensor([gain, 1])
        counts_K2[counts_K2[:, 1] > MEMORY] >>= 1
        place = int(copied.place_B[b])
        if place < N - 1:
            n_accepted = max(len(committed) - 1 - place, 0)
            totals_K2[length_class(int(copied.length_BD[b, place]))] += totals_K2.new_tensor([1, n_accepted])


def n_agreed(drafts: list[int], committed: list[int]) -> int:
    """Return the number of leading drafts that equal the committed tokens."""
    for i, (draft, token) in enumerate(zip(drafts, committed, strict=False)):
        if draft != token:
            return i
    return min(len(drafts), len(committed))


def weigh_copies_numpy(
    tokens_BN: torch.Tensor,
    copied: Copied,
    committed_BN: torch.Tensor,
    n_committed_B: torch.Tensor,
    texts: Texts,
    *,
    totals_K2: torch.Tensor,
) -> None:
    """Compute `weigh_copies` one request at a time, but all places of the request at once."""
    B, N = tokens_BN.shape
    tokens, known, n_committed = tokens_BN.numpy(), committed_BN.numpy(), n_committed_B.numpy()
    _, place_B, source_BD, length_BD = (tensor.numpy() for tensor in copied)
    prefix_len_B, rows_B, text_QM, counts_QK2 = (tensor.numpy() for tensor in texts)
    total_K2 = totals_K2.numpy()
    for b in range(B):
        n, n_known, length_D = int(prefix_len_B[b]), min(int(n_committed[b]), N - 1), length_BD[b]
        known_S = known[b, :n_known]
        own = leading(tokens[b, 1 : n_known + 1] == known_S)
        place_P1 = length_D[: min(own + 1, n_known)].nonzero()[0][:, None]
        if len(place_P1):
            text_L = np.concatenate([text_QM[rows_B[b], :n], tokens[b]])
            copy_PS = text_L[copied_from(n, place_P1, source_BD[b, place_P1], N)[:, :n_known]]
            worth_P = leading((copy_PS == known_S) | (np.arange(n_known) < place_P1))
            counts_K2, class_P = counts_QK2[rows_B[b]], CLASS_OF[length_D[place_P1[:, 0]]]
            np.add.at(counts_K2, class_P, np.stack([worth_P - own, np.ones_like(worth_P)], 1))
            counts_K2[counts_K2[:, 1] > MEMORY] >>= 1
        if (place := place_B[b]) < N - 1:
            total_K2[CLASS_OF[length_D[place]]] += 1, max(n_committed[b] - 1 - place, 0)


def leading(is_true: np.ndarray) -> np.ndarray:
    """Return the number of leading True values along the last dimension."""
    return np.logical_and.accumulate(is_true, axis=-1).sum(-1)


@triton.jit(
    do_not_specialize=["N", "M"],
    do_not_specialize_on_alignment=["tokens", "committed", "n_committed", "prefix_len", "rows", "source", "length"],
)
def _weigh_copies_kernel(
    tokens, committed, n_committed, places, source, length, prefix_len, rows, text, counts, totals, M, N,
    BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr,
):  # fmt: skip
    b = tl.program_id(0).to(tl.int64)
    i = tl.arange(0, BLOCK_N)  # [N], index of a draft (in slot i + 1) and of a place
    D = N - 1
    n = tl.load(prefix_len + b).to(tl.int32)
    row = tl.load(rows + b).to(tl.int64)
    block = tokens + b * N
    n_known = tl.minimum(tl.load(n_committed + b), D)
    counted = i < n_known
    known = tl.load(committed + b * N + i, mask=counted, other=-1)
    own = _n_agreed(tl.load(block + 1 + i, mask=i < D, other=-2), known, i, D)
    kind = tl.arange(0, BLOCK_K)
    gain, steps = tl.zeros([BLOCK_K], tl.int32), tl.zeros([BLOCK_K], tl.int32)
    for d in range(tl.minimum(own + 1, n_known)):
        matched = tl.load(length + b * D + d)
        first = tl.maximum(tl.load(source + b * D + d), 0)
        at = first + tl.maximum(i - d, 0) % (n + d + 1 - first)
        from_text = tl.load(text + row * M + at, mask=at < n, other=-1).to(tl.int64)
        from_block = tl.load(block + at - n, mask=(at >= n) & (at - n < N), other=-1)
        copy = tl.where(i < d, known, tl.where(at < n, from_text, from_block))
        worth = _n_agreed(tl.where(counted, copy, -2), known, i, D)
        mine = (kind == (matched >= 4).to(tl.int32) + (matched >= 8) + (matched >= 16) + 1) & (matched > 0)
        gain += tl.where(mine, worth - own, 0)
        steps += mine.to(tl.int32)
    count = counts + (row * _CLASSES + kind) * 2
    inside = kind < _CLASSES
    gain += tl.load(count, mask=inside, other=0)
    steps += tl.load(count + 1, mask=inside, other=0)
    half = (steps > _MEMORY).to(tl.int32)
    tl.store(count, gain >> half, mask=inside)
    tl.store(count + 1, steps >> half, mask=inside)
    place = tl.load(places + b)
    matched = tl.load(length + b * D + place, mask=place < D, other=0)
    total = totals + ((matched >= 4).to(tl.int32) + (matched >= 8) + (matched >= 16) + 1) * 2
    tl.atomic_add(total, 1, mask=place < D)
    tl.atomic_add(total + 1, tl.maximum(tl.load(n_committed + b) - 1 - place, 0), mask=place < D)


@triton.jit
def _n_agreed(draft, known, i, D):
    """Return the number of leading drafts that equal `known`, the committed tokens.

    Past the last committed token, the caller must fill `draft` and `known` with different values.
    """
    return tl.min(tl.where((draft == known) & (i < D), D, tl.minimum(i, D)), axis=0)


def weigh_copies_triton(
    tokens_BN: torch.Tensor,
    copied: Copied,
    committed_BN: torch.Tensor,
    n_committed_B: torch.Tensor,
    texts: Texts,
    *,
    totals_K2: torch.Tensor,
) -> None:
    """Compute `weigh_copies` by its kernel: one program per request."""
    B, N = tokens_BN.shape
    if not B or N == 1:
        return
    step = tokens_BN, committed_BN, n_committed_B, copied.place_B, copied.source_BD, copied.length_BD
    blocks = {"BLOCK_N": triton.next_power_of_2(N), "BLOCK_K": triton.next_power_of_2(N_CLASSES)}
    _weigh_copies_kernel[(B,)](*step, *texts, totals_K2, texts.text_QM.shape[1], N, **blocks, num_warps=1)


WEIGH_COPIES = Forms(on_cpu=weigh_copies_numpy, on_gpu=weigh_copies_triton)


def weigh_copies(
    tokens_BN: torch.Tensor,
    copied: Copied,
    committed_BN: torch.Tensor,
    n_committed_B: torch.Tensor,
    texts: Texts,
    *,
    totals_K2: torch.Tensor,
) -> None:
    """Add the outcome of a step to `texts.counts_QK2` and `totals_K2`. B may be 0.

    Args:
        tokens_BN: int64, the anchor and the block's own guesses, as passed to `copy_draft`.
        copied: result of `copy_draft`.
        committed_BN: int64, from `accept`.
        n_committed_B: int32, from `accept`.
        texts: as passed to `copy_draft`. `counts_QK2` is updated.
        totals_K2: int32, updated. A count that exceeds int32 wraps around.
    Raises:
        ValueError: shapes, dtypes or layouts that do not fit.
    """
    shapes = Shapes()
    shapes.check(torch.int64, tokens_BN=tokens_BN, committed_BN=committed_BN)
    shapes.check(torch.int32, n_committed_B=n_committed_B, place_B=copied.place_B, totals_K2=totals_K2)
    shapes.check(torch.int32, source_BD=copied.source_BD, length_BD=copied.length_BD)
    check_texts(shapes, texts)
    if shapes["D"] != shapes["N"] - 1:
        raise ValueError(
            f"copied has {shapes['D']} drafts per block, and blocks of {shapes['N']} have {shapes['N'] - 1}; pass the "
            "result of copy_draft for these blocks"
        )
    WEIGH_COPIES.form_for(tokens_BN)(tokens_BN, copied, committed_BN, n_committed_B, texts, totals_K2=totals_K2)
