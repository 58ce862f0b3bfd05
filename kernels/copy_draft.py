"""Draft by n-gram lookup (prompt lookup): replace a block's last guesses by a copy from the request's token history.

Terms, also of `weigh_copies`. The text is the request's token history before the anchor. A guess is a token that the
draft model proposed. Place d, for d = 0..N-2, is the point in the block directly after slot d, where a copy can begin.
For each place d

    tail      = the text, then the anchor, then the first d guesses
    length    = number of tokens of the longest run of tokens that ends the tail and also ends a prefix of the text, at
                most LONGEST; 0 if the run has fewer than SHORTEST tokens
    source    = size of that prefix, which is the index of the text's token after the run; the largest if several
                prefixes end in such a run; -1 if length is 0
    copy[i]   = tail[source + i mod (len(tail) - source)]     (after the last token of the tail, continue at source)

At the first place whose match is trusted, the copy replaces the rest of the block. Matches are grouped by length into
classes (`length_class`), and a request trusts a match if the counts `gain` and `n` of the match's class satisfy

    2 (prior + gain) > 1 + n            prior is 1 if length = LONGEST, else -1

`weigh_copies` updates both counts, for each request and class. `n` is the number of places in earlier steps at which
the outcome of a copy is known. `gain` is the number of tokens that copies at these places would have committed beyond
the guesses. The formula adds one place with gain `prior`. So a copy is trusted if copies gain more than half a token on
average. If no run of SHORTEST tokens recurs, the block is unchanged.

Shapes: B requests, N slots per block, D = N - 1 drafts per block and also number of places; text table of Q rows of M
tokens, one row per request that the server can run at once; K classes, with two counts (2) each: gain and n.
Source: suffix decoding (Oliaro et al. 2024, arXiv:2411.04975) and prompt lookup. Copies inside a block are new here.
Cost: one launch, or two without `scratch_S`. It reads each text (at most 4 * M bytes) once per PLACES places, and
little else: 4.2 MB for 32 requests of 32k tokens. The time does not depend on the number of matches.

A negative token is a placeholder, e.g. for a part of an image. It matches no token and is not copied: the guess stays
in that slot. The resulting block is written to the text table after the prefix. So the anchor and the accepted drafts
are part of the text in the next step.
"""

from typing import NamedTuple

import numpy as np
import torch
import triton
import triton.language as tl
from sglang_dflash_kernels.checks import Shapes
from sglang_dflash_kernels.dispatch import Forms

SHORTEST, LONGEST = 3, 16  # limits of a match's length, in tokens
N_CLASSES = 5  # number of classes of match lengths: class c has lengths from 2^c to 2^(c+1) - 1; class 0 is unused
LENGTH_BIT = 26  # length << LENGTH_BIT | source is one int32, so a text has fewer than 2^26 tokens

_SHORTEST, _LONGEST = map(tl.constexpr, (SHORTEST, LONGEST))
_CLASSES, _LENGTH_BIT, _POSITION = map(tl.constexpr, (N_CLASSES, LENGTH_BIT, (1 << LENGTH_BIT) - 1))


class Texts(NamedTuple):
    """Token histories of B requests, and the counts by which each request trusts matches."""

    prefix_len_B: torch.Tensor  # int64, number of tokens in the history before the anchor
    rows_B: torch.Tensor  # int64 or int32, each request's row in `text_QM` and `counts_QK2`; all different
    text_QM: torch.Tensor  # int32; [row, :prefix_len] is the text
    counts_QK2: torch.Tensor  # int32; `gain` and `n` of each row and class


class Copied(NamedTuple):
    """Blocks whose last guesses may be replaced by copies, and the match of every place."""

    tokens_BN: torch.Tensor  # int64, the anchor, `place_B` guesses, then the copy
    place_B: torch.Tensor  # int32, place where the copy begins, 0..D-1; D: nothing is copied
    source_BD: torch.Tensor  # int32, `source` of each place; -1: no match
    length_BD: torch.Tensor  # int32, `length` of each place; 0: no match


def copy_draft_ref(tokens_BN: torch.Tensor, texts: Texts, scratch_S: torch.Tensor | None = None) -> Copied:
    """Define `copy_draft`, in PyTorch."""
    B, N = tokens_BN.shape
    drafted_BN, place_B = tokens_BN.clone(), torch.full((B,), N - 1, dtype=torch.int32)
    source_BD, length_BD = (torch.full((B, N - 1), value, dtype=torch.int32) for value in (-1, 0))
    for b in range(B):
        row, n = int(texts.rows_B[b]), int(texts.prefix_len_B[b])
        block, text = tokens_BN[b].tolist(), texts.text_QM[row, :n].tolist()
        for d in reversed(range(N - 1)):
            tail = text + block[: d + 1]
            length, source = longest_match(text, tail)
            source_BD[b, d], length_BD[b, d] = source, length
            if length and is_trusted(length, *texts.counts_QK2[row, length_class(length)].tolist()):
                copy = [tail[source + i % (len(tail) - source)] for i in range(N - 1 - d)]
                place_B[b] = d
                kept = block[: d + 1] + [c if c >= 0 else own for c, own in zip(copy, block[d + 1 :], strict=True)]
                drafted_BN[b] = torch.tensor(kept)
        end = min(n + N, texts.text_QM.shape[1])
        texts.text_QM[row, n:end] = drafted_BN[b, : end - n].int()
    return Copied(drafted_BN, place_B, source_BD, length_BD)


def longest_match(text: list[int], tail: list[int]) -> tuple[int, int]:
    """Return `length` and `source` of the match for `tail`, which begins with `text`; (0, -1) if there is none."""
    best = 0, -1
    for end in range(SHORTEST, len(text) + 1):
        length = 0
        while length < min(LONGEST, end) and text[end - 1 - length] == tail[-1 - length] >= 0:
            length += 1
        if length >= max(SHORTEST, best[0]):
            best = length, end
    return best


def is_trusted(length: int, gain: int, n: int) -> bool:
    """Return whether a match of `length` tokens is trusted, given the counts `gain` and `n` of its class."""
    prior = 1 if length == LONGEST else -1
    return 2 * (prior + gain) > 1 + n


def length_class(length: int) -> int:
    """Return the class of a match length: 1 for lengths 2 and 3, 2 for 4 to 7, 3 for 8 to 15, 4 for 16."""
    return length.bit_length() - 1


CLASS_OF = np.array([0, *map(length_class, range(1, LONGEST + 1))])  # class of each length; class 0 for length 0


def copy_draft_numpy(tokens_BN: torch.Tensor, texts: Texts, scratch_S: torch.Tensor | None = None) -> Copied:
    """Compute `copy_draft` one request at a time, but all its places at once.

    If N = 1, nothing is searched. Then the result contains `tokens_BN` itself, not a copy.
    """
    B, N = tokens_BN.shape
    if N == 1:
        append_anchors(tokens_BN, texts)
        none_BD = tokens_BN.new_empty(B, 0, dtype=torch.int32)
        return Copied(tokens_BN, tokens_BN.new_zeros(B, dtype=torch.int32), none_BD, none_BD)
    int32_2BD, place_B = np.zeros((2, B, N - 1), np.int32), np.full(B, N - 1, np.int32)
    (source_BD, length_BD), drafted_BN = int32_2BD, tokens_BN.numpy().copy()
    prefix_len_B, rows_B, text_QM, counts_QK2 = (tensor.numpy() for tensor in texts)
    for b in range(B):
        row, n, block_N = rows_B[b], int(prefix_len_B[b]), drafted_BN[b]
        text_L = np.concatenate([text_QM[row, :n], block_N])
        best_D = longest_matches(text_L, n)
        length_D = best_D >> LENGTH_BIT
        length_BD[b], source_BD[b] = length_D, np.where(length_D > 0, best_D & ((1 << LENGTH_BIT) - 1), -1)
        gain_D, n_D = counts_QK2[row, CLASS_OF[length_D]].T
        trusted_D = (length_D > 0) & (2 * (np.where(length_D == LONGEST, 1, -1) + gain_D) > 1 + n_D)
        if trusted_D.any():
            place = place_B[b] = trusted_D.argmax()
            copy = text_L[copied_from(n, place, source_BD[b, place], N)][place:]
            block_N[place + 1 :] = np.where(copy >= 0, copy, block_N[place + 1 :])
        inside = min(N, text_QM.shape[1] - n)
        text_QM[row, n : n + inside] = block_N[:inside]
    return Copied(*(torch.from_numpy(array) for array in (drafted_BN, place_B, source_BD, length_BD)))


def append_anchors(anchor_B1: torch.Tensor, texts: Texts) -> None:
    """Write each request's anchor after its text; `anchor_B1`: int64 [B, 1]."""
    prefix_len_B, rows_B, text_QM, _ = (tensor.numpy() for tensor in texts)
    anchor_B = anchor_B1.numpy()[:, 0]
    if prefix_len_B.max(initial=0) >= text_QM.shape[1]:
        inside_B = prefix_len_B < text_QM.shape[1]
        anchor_B, rows_B, prefix_len_B = anchor_B[inside_B], rows_B[inside_B], prefix_len_B[inside_B]
    text_QM[rows_B, prefix_len_B] = anchor_B


def longest_matches(text_L: np.ndarray, n: int) -> np.ndarray:
    """Return the longest match of each place, int64 [D]: length << LENGTH_BIT | source; 0: no match.

    The last SHORTEST tokens of each tail are compared with the whole text. Earlier tokens of the tail are compared only
    where these SHORTEST tokens match.

    Args:
        text_L: n tokens of text, then the block.
        n: number of tokens of the text without the block.
    """
    D = len(text_L) - n - 1
    best_D = np.zeros(D, np.int64)
    if n < SHORTEST or not D:
        return best_D
    # equal[i, j] is True if text_L[j] equals text_L[n - 2 + i] and is no placeholder.
    equal = (text_L[n - SHORTEST + 1 : n + D, None] == text_L[:n]) & (text_L[:n] >= 0)
    found = equal[2:, 2:] & equal[1:-1, 1:-1] & equal[:-2, :-2]
    place_F, last_F = found.nonzero()
    last_F += SHORTEST - 1
    before_O = np.arange(SHORTEST, LONGEST)
    text_FO, tail_FO = last_F[:, None] - before_O, n + place_F[:, None] - before_O
    token_FO = text_L[text_FO.clip(0)]
    equal_FO = (text_FO >= 0) & (token_FO == text_L[tail_FO.clip(0)]) & (token_FO >= 0)
    length_F = SHORTEST + np.logical_and.accumulate(equal_FO, axis=1).sum(1)
    np.maximum.at(best_D, place_F, (length_F << LENGTH_BIT) + last_F + 1)
    return best_D


def copied_from(n: int, place: int | np.ndarray, source: int | np.ndarray, N: int) -> np.ndarray:
    """Return the indices of the tokens that a copy at `place` writes over a block's drafts, [..., D].

    An index counts from the text's start and continues in the block. The first `place` drafts are not copied, so their
    indices have no meaning. `weigh_copies` calls this too.
    """
    ahead = (np.arange(N - 1) - place).clip(0)
    return source + ahead % (n + place + 1 - source)


TILE, N_WARPS = 128, 4  # number of text positions that a program compares at once, one per thread; warps per program
PROGRAMS, LEAST = 512, 16  # wanted programs per launch, four per multiprocessor of an H200; least programs per request
PLACES = 16  # number of places per program; blocks with more places use several programs, each reading the text

_PLACES, _WINDOW, _RUN = map(tl.constexpr, (PLACES, PLACES + LONGEST, (1 << LONGEST) - 1))


@triton.jit(
    do_not_specialize=["N", "M"],
    do_not_specialize_on_alignment=["tokens", "prefix_len", "rows", "source_out", "length_out"],
)
def _copy_draft_kernel(
    tokens, prefix_len, rows, text, counts, drafted, place_out, source_out, length_out, found, M, N,
    BLOCK_N: tl.constexpr, BLOCK_M: tl.constexpr,
):  # fmt: skip
    """Search tiles of a text for matches. A request's last program to finish also chooses the copy and writes results.

    `found` [B, N] is zero before and after the launch. found[b, d] becomes length << LENGTH_BIT | source of place d's
    match. found[b, N - 1] counts the programs of request b that have finished.

    The tail of place d + 1 is the tail of place d and one more token. So the last tokens of the tails of PLACES places
    form one window of PLACES + LONGEST tokens. For each text position `end`, the text's token at end - j is compared
    with the window's j-th token before its last one. Bit j of `equal` is set if the two are equal. For the place whose
    tail ends s tokens before the window's end, the match length is the number of consecutive ones from bit s upwards.
    """
    b = tl.program_id(0).to(tl.int64)
    n = tl.load(prefix_len + b).to(tl.int32)
    row = tl.load(rows + b).to(tl.int64)
    n_tiles = tl.where(N > 1, tl.cdiv(n + _PLACES - 1, BLOCK_M), 0)  # N = 1: no search, the anchor is only written
    n_searching = tl.minimum(tl.maximum(n_tiles, 1), tl.num_programs(1))
    if tl.program_id(1) >= n_searching:
        return
    line, block, best = text + row * M, tokens + b * N, found + b * N
    last = (tl.program_id(2) + 1) * _PLACES - 1  # block slot of the window's last token; -1 would be the text's last
    j = tl.arange(0, _WINDOW)  # [W]
    from_text = tl.load(line + n + last - j, mask=(last < j) & (n + last >= j), other=-1)
    from_block = tl.load(block + last - j, mask=(last >= j) & (last - j < N - 1), other=-1).to(tl.int32)
    window = tl.where(last < j, from_text, from_block)
    bit = 1 << j
    is_text = tl.sum(tl.where(window >= 0, bit, 0), axis=0)
    s = tl.arange(0, _PLACES)  # [P]
    found_PM = tl.zeros([_PLACES, BLOCK_M], tl.int32)
    for tile in range(tl.program_id(1), n_tiles, tl.num_programs(1)):
        end = tile * BLOCK_M + tl.arange(0, BLOCK_M)  # [M], text positions compared with the window's last token
        at = end[None] - j[:, None]  # [W, M]
        # A negative position exceeds n as an unsigned number, so one comparison checks both bounds.
        token = tl.load(line + at, mask=at.to(tl.uint32) < n.to(tl.uint32), other=-1)
        equal = tl.sum(tl.where(token == window[:, None], bit[:, None], 0), axis=0) & is_text
        run = (equal[None] >> s[:, None]) & _RUN  # [P, M]
        power = ~run & (run + 1)  # 2^length; as a float its exponent field is length + 127 and its fraction 0
        length = power.to(tl.float32).to(tl.int32, bitcast=True) - (127 << 23)  # length << 23, its place in the float
        found_PM = tl.maximum(found_PM, (length << _LENGTH_BIT - 23) + end[None] - s[:, None] + 1)
    longest = tl.max(found_PM, axis=1)
    tl.atomic_max(best + last - s, longest, mask=longest >= (_SHORTEST << _LENGTH_BIT), sem="relaxed")
    tl.debug_barrier()  # all threads must have written their maxima before this program counts as finished
    if tl.atomic_add(best + N - 1, 1) != n_searching * tl.num_programs(2) - 1:
        return
    slot = tl.arange(0, BLOCK_N)  # [N]; place d follows slot d, so `slot` also indexes places
    # .cg skips the L1 cache, which may lack the results of other programs.
    match = tl.load(best + slot, mask=slot < N - 1, other=0, cache_modifier=".cg")
    tl.debug_barrier()  # every warp reads all matches, so no match may be cleared before all warps have read
    tl.store(best + slot, 0, mask=slot < N)
    length = match >> _LENGTH_BIT  # [N]
    source = tl.where(length > 0, match & _POSITION, -1)
    kind = (length >= 2).to(tl.int32) + (length >= 4) + (length >= 8) + (length >= 16)
    count = counts + (row * _CLASSES + kind) * 2
    gain, n_seen = tl.load(count), tl.load(count + 1)
    prior = tl.where(length == _LONGEST, 1, -1)
    trusted = (length > 0) & (2 * (prior + gain) > n_seen + 1)
    place = tl.min(tl.where(trusted, slot, N - 1), axis=0)
    first = tl.maximum(tl.sum(tl.where(slot == place, source, 0), axis=0), 0)
    at = first + tl.maximum(slot - place - 1, 0) % (n + place + 1 - first)  # [N]
    from_text = tl.load(line + at, mask=at < n, other=-1).to(tl.int64)
    from_block = tl.load(block + at - n, mask=(at >= n) & (at - n < N), other=-1)
    copied = tl.where(at < n, from_text, from_block)
    own = tl.load(block + slot, mask=slot < N, other=-2)
    drafts = tl.where((slot > place) & (copied >= 0), copied, own)
    tl.store(drafted + b * N + slot, drafts, mask=slot < N)
    tl.store(line + n + slot, drafts.to(tl.int32), mask=(slot < N) & (n + slot < M))
    tl.store(place_out + b, place)
    tl.store(source_out + b * (N - 1) + slot, source, mask=slot < N - 1)
    tl.store(length_out + b * (N - 1) + slot, length, mask=slot < N - 1)


def copy_draft_triton(tokens_BN: torch.Tensor, texts: Texts, scratch_S: torch.Tensor | None = None) -> Copied:
    """Compute `copy_draft` by its kernel: programs for each request, part of the text, and PLACES places of a block."""
    B, N = tokens_BN.shape
    M = texts.text_QM.shape[1]
    int32_2BD = tokens_BN.new_empty(2, B, N - 1, dtype=torch.int32)
    out = Copied(torch.empty_like(tokens_BN), tokens_BN.new_empty(B, dtype=torch.int32), *int32_2BD)
    if B:
        found_BN = tokens_BN.new_zeros(B, N, dtype=torch.int32) if scratch_S is None else scratch_S
        n_parts = min(triton.cdiv(M + PLACES, TILE), max(PROGRAMS // B, LEAST)) if N > 1 else 1
        grid = B, n_parts, max(1, triton.cdiv(N - 1, PLACES))
        blocks = {"BLOCK_N": triton.next_power_of_2(N), "BLOCK_M": TILE}
        _copy_draft_kernel[grid](tokens_BN, *texts, *out, found_BN, M, N, **blocks, num_warps=N_WARPS)
    return out


COPY_DRAFT = Forms(on_cpu=copy_draft_numpy, on_gpu=copy_draft_triton)


def copy_draft(tokens_BN: torch.Tensor, texts: Texts, scratch_S: torch.Tensor | None = None) -> Copied:
    """Replace the last guesses of blocks by trusted copies, and write the blocks after the prefix in `text_QM`.

    Args:
        tokens_BN: int64, the anchor and the block's guesses; N >= 1, B may be 0.
        texts: token histories. `rows_B` must have no duplicates, which is not checked.
        scratch_S: int32, B * N elements or more, for the search on a GPU. All are zero before and after each call.
            None: a call allocates and clears its own.
    Raises:
        ValueError: shapes, dtypes or layouts that do not fit.
    """
    shapes = Shapes()
    shapes.check(torch.int64, tokens_BN=tokens_BN)
    check_texts(shapes, texts)
    if scratch_S is not None:
        shapes.check(torch.int32, scratch_S=scratch_S)
        if len(scratch_S) < tokens_BN.numel():
            raise ValueError(f"scratch_S has {len(scratch_S)} elements; pass {tokens_BN.numel()}, one per token")
    return COPY_DRAFT.form_for(tokens_BN)(tokens_BN, texts, scratch_S)


def check_texts(shapes: Shapes, texts: Texts) -> None:
    """Check shapes, dtypes and sizes of `texts`. `weigh_copies` calls this too."""
    shapes.check(torch.int64, prefix_len_B=texts.prefix_len_B)
    shapes.check(torch.int64, torch.int32, rows_B=texts.rows_B)
    shapes.check(torch.int32, text_QM=texts.text_QM, counts_QK2=texts.counts_QK2)
    if shapes["K"] != N_CLASSES or shapes["M"] >= 1 << LENGTH_BIT:
        raise ValueError(
            f"there are {shapes['K']} classes of matches and texts of {shapes['M']} tokens; pass {N_CLASSES} classes, "
            f"and less than 2^{LENGTH_BIT} tokens"
        )
