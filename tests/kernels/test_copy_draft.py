import functools
import importlib

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from sglang_dflash_kernels.checks import Shapes
from sglang_dflash_kernels.copy_draft import (
    LEAST,
    LONGEST,
    N_CLASSES,
    TILE,
    Copied,
    Texts,
    check_texts,
    copy_draft,
    copy_draft_numpy,
    copy_draft_ref,
    copy_draft_triton,
    length_class,
)

FORMS = pytest.mark.parametrize(
    "form", [copy_draft_ref, copy_draft_numpy, copy_draft_triton], ids=["definition", "numpy", "kernel"]
)
ALWAYS, NEVER = 100, -100  # values of `gain`: every match is trusted; no match is trusted


def counts(n_rows: int, gain: int = 0) -> torch.Tensor:
    counts_QK2 = torch.zeros(n_rows, N_CLASSES, 2, dtype=torch.int32)
    counts_QK2[..., 0] = gain
    return counts_QK2


def run_one(form, text: list[int], block: list[int], gain: int = 0, room: int = 64) -> tuple[Copied, list[int]]:
    """Run `form` for one request in row 1 of the history table; return the result and the row afterwards."""
    text_QM = torch.full((3, room), 77, dtype=torch.int32)
    text_QM[1, : len(text)] = torch.tensor(text, dtype=torch.int32)
    got = form(torch.tensor([block]), Texts(torch.tensor([len(text)]), torch.tensor([1]), text_QM, counts(3, gain)))
    assert (text_QM[[0, 2]] == 77).all()
    return got, text_QM[1].tolist()


TEXT, RUN = [1, 2, 3, 4, 5, 6, 7, 8, 9, 1, 2], list(range(30))
HAND_WORKED = {  # text, block, gain, expected fields
    "what-came-after-the-n-gram": (
        TEXT, [3, 0, 0, 0, 0], ALWAYS,
        {"tokens": [3, 4, 5, 6, 7], "place": 0, "source": [3, -1, -1, -1], "length": [3, 0, 0, 0]},
    ),
    "a-run-of-three-has-to-earn-trust": (TEXT, [3, 0, 0, 0, 0], 0, {"tokens": [3, 0, 0, 0, 0], "place": 4}),
    "after-the-guesses-4-5-6": (
        [3, 4, 5, 6, 7, 8, 9, 1], [2, 4, 5, 6, 0, 0, 0], ALWAYS,
        {"tokens": [2, 4, 5, 6, 7, 8, 9], "place": 3, "source": [-1, -1, -1, 4, -1, -1]},
    ),
    "a-copy-that-reaches-the-end-goes-round": (
        [9, 1, 2, 1, 2, 1], [2, 0, 0, 0, 0, 0], ALWAYS,
        {"tokens": [2, 1, 2, 1, 2, 1], "source": [5, -1, -1, -1, -1], "length": [4, 0, 0, 0, 0]},
    ),
    "the-longest-wins": ([8, 1, 2, 3, 40, 1, 2, 3, 50, 9, 8, 1, 2], [3, 0], ALWAYS, {"tokens": [3, 40]}),
    "of-equal-ones-the-latest": ([7, 1, 2, 3, 40, 6, 1, 2, 3, 50, 9, 8, 1, 2], [3, 0], ALWAYS, {"tokens": [3, 50]}),
    "a-long-one-is-trusted-at-once": ([*RUN, 99, *RUN[:-1]], [29, 0], 0, {"tokens": [29, 99], "length": [LONGEST]}),
    "before-the-text-is-nothing": ([5, 6, 7, 8, 5, 6, 7], [8, 0], 0, {"source": [4], "length": [4]}),
    "before-the-text-is-not-the-row-above": ([1, 2, 3, 9, 77, 1, 2], [3, 0], 0, {"source": [3], "length": [3]}),
    "before-the-text-is-not-its-first-token": ([1, 2, 3, 9, 1, 1, 2], [3, 0], 0, {"source": [3], "length": [3]}),
    "no-text-is-not-matched": ([1, -1, -1, -1, 5, 1, -1, -1], [-1, 0], ALWAYS, {"place": 1}),
    "no-text-is-not-copied": ([1, 2, 3, 4, -1, 6, 9, 1, 2], [3, 60, 61, 62], ALWAYS, {"tokens": [3, 4, 61, 6]}),
    "the-anchor-alone": ([1, 2, 3], [4], 0, {"tokens": [4], "place": 0, "source": []}),
    "a-place-beyond-the-first-sixteen": (
        [*range(100, 120), 7], [1, *range(200, 217), 100, 101, 102, 103, 0, 0], ALWAYS,
        {"tokens": [1, *range(200, 217), *range(100, 106)], "place": 20},
    ),
}  # fmt: skip


@FORMS
@pytest.mark.parametrize(("text", "block", "gain", "want"), HAND_WORKED.values(), ids=HAND_WORKED)
def test_hand_worked_copies(form, text, block, gain, want) -> None:
    """Afterwards the request's row must hold its history, then the tokens to verify, then the row's old content."""
    got, row = run_one(form, text, block, gain, room=70)
    tokens, place, source, length = (field[0].tolist() for field in got)
    found = {"tokens": tokens, "place": place, "source": source, "length": length}
    assert {name: found[name] for name in want} == want
    assert row == [*text, *tokens, *[77] * 70][:70]


@FORMS
@pytest.mark.parametrize("n", [4 * TILE, 4 * TILE + 1])
def test_a_text_is_searched_to_its_last_token(form, n) -> None:
    """The text ends with the match, a run of 7s. The last 7 is the last token of a tile, or the first of the next."""
    got, _ = run_one(form, [*range(100, 97 + n), 7, 7, 7], [7, 0, 0], ALWAYS, room=n + 7)
    assert got.tokens_BN.tolist() == [[7, 7, 7]]
    assert (got.source_BD[0, 0], got.length_BD[0, 0]) == (n, 3)


@FORMS
@pytest.mark.parametrize("length", [3, 4, 7, 8, 15, 16])
def test_each_length_is_trusted_by_its_own_class(form, length) -> None:
    """A request trusts matches of a length class if copies gain more than half a token per place, on average.

    The mean includes one more place, with gain `prior`. `kernels/copy_draft.py` defines the terms.
    """
    run = list(range(100, 100 + length))
    text, block = [1, *run, 2, 3, *run[:-1]], [run[-1], 0]
    prior = 1 if length == LONGEST else -1

    def takes(gain: int, n: int, other: int) -> bool:
        counts_QK2 = counts(2, other)
        counts_QK2[1, length_class(length)] = torch.tensor([gain, n])
        text_QM = torch.zeros(2, 64, dtype=torch.int32)
        text_QM[1, : len(text)] = torch.tensor(text)
        texts = Texts(torch.tensor([len(text)]), torch.tensor([1]), text_QM, counts_QK2)
        return form(torch.tensor([block]), texts).place_B.tolist() == [0]

    for n in (0, 10):
        enough = (1 + n) // 2 - prior + 1
        assert takes(enough, n, NEVER)
        assert not takes(enough - 1, n, ALWAYS)


@FORMS
def test_nothing_is_written_past_a_row(form) -> None:
    got, row = run_one(form, [1, 2, 3, 1, 2], [3, 0, 0, 0], ALWAYS, room=7)
    assert row == [1, 2, 3, 1, 2, 3, 1]
    assert got.tokens_BN.tolist() == [[3, 1, 2, 3]]


def drawn(B: int, N: int, n_text: int, n_words: int, device: str = "cpu") -> tuple[torch.Tensor, Texts]:
    """Draw random blocks, and token histories that also have placeholders (-1), from `n_words` token ids.

    Rows of the history table are in random order, and longer than their history.
    """
    Q = 2 * B + 1
    text_QM = torch.randint(-1, n_words, (Q, n_text + N // 2 + 1), device=device, dtype=torch.int32)
    counts_QK2 = torch.randint(-12, 13, (Q, N_CLASSES, 2), device=device, dtype=torch.int32)
    prefix_len_B, rows_B = torch.randint(0, n_text + 1, (B,), device=device), torch.randperm(Q, device=device)[:B]
    tokens_BN = torch.randint(0, n_words, (B, N), device=device)
    return tokens_BN, Texts(prefix_len_B, rows_B, text_QM, counts_QK2)


def assert_same(form, tokens_BN: torch.Tensor, texts: Texts) -> None:
    both = texts._replace(text_QM=texts.text_QM.clone()), texts._replace(text_QM=texts.text_QM.clone())
    got, want = (f(tokens_BN, its) for f, its in zip((form, copy_draft_ref), both, strict=True))
    for name, got_field, want_field in zip(Copied._fields, got, want, strict=True):
        assert got_field.dtype == want_field.dtype, name
        assert torch.equal(got_field, want_field), name
    assert torch.equal(*(its.text_QM for its in both))


@given(st.data())
@settings(max_examples=150, deadline=None)
def test_the_torch_form_is_the_definition(data) -> None:
    torch.manual_seed(data.draw(st.integers(0, 1 << 30)))
    sizes = [data.draw(st.integers(*bounds)) for bounds in ((0, 3), (1, 8), (0, 40), (1, 3))]
    assert_same(copy_draft_numpy, *drawn(*sizes))


@pytest.mark.parametrize(
    "sizes",
    [
        (0, 4, 10, 2), (1, 1, 5, 2), (2, 16, 700, 3), (3, 12, 513, 2), (5, 8, 60, 2), (4, 5, 1, 2), (2, 2, 0, 1),
        (2, 24, 300, 2), (1, 17, 140, 2), (1, 40, 200, 2), (40, 3, 30, 2),
    ],
)  # fmt: skip
def test_the_kernel_is_the_definition(sizes, device) -> None:
    torch.manual_seed(sum(sizes))
    for _ in range(3):
        assert_same(copy_draft_triton, *drawn(*sizes, device=device))


def test_scratch_memory_is_zero_again_after_a_search(device) -> None:
    """So that the next search, of other requests and blocks, needs no launch that clears it."""
    torch.manual_seed(0)
    scratch_S = torch.zeros(50, dtype=torch.int32, device=device)
    for sizes in ((2, 16, 300, 3), (3, 1, 40, 2), (1, 40, 200, 2), (4, 5, 60, 2)):
        assert_same(functools.partial(copy_draft_triton, scratch_S=scratch_S), *drawn(*sizes, device=device))
        assert not scratch_S.any()


def run_backwards(monkeypatch) -> None:
    """Make the interpreter run the programs of a launch from last to first."""
    builder = type(importlib.import_module("triton.runtime.interpreter").interpreter_builder)
    stock = builder.set_grid_idx

    def set_grid_idx(self, *at: int) -> None:
        stock(self, *(n - 1 - i for n, i in zip(self.grid_dim, at, strict=True)))

    monkeypatch.setattr(builder, "set_grid_idx", set_grid_idx)


@pytest.mark.parametrize("backwards", [False, True], ids=["first-to-last", "last-to-first"])
@pytest.mark.parametrize("n_programs", [1, 2, 3, 7])
@pytest.mark.parametrize("N", [5, 20])
def test_programs_that_share_a_text_agree_with_one_program(N, n_programs, backwards, device, monkeypatch) -> None:
    """With three token ids, many tiles have matches of equal length, and the longest match is not always the last."""
    torch.manual_seed(N + n_programs)
    kernel = importlib.import_module("sglang_dflash_kernels.copy_draft")
    for name in ("PROGRAMS", "LEAST"):
        monkeypatch.setattr(kernel, name, n_programs)
    if backwards and device == "cpu":
        run_backwards(monkeypatch)
    tokens_BN, texts = drawn(4, N, 5 * TILE + 3, 3, device)
    prefix_len_B = torch.tensor([5 * TILE + 3, 2 * TILE, 5, TILE + 1], device=device)
    assert_same(copy_draft_triton, tokens_BN, texts._replace(prefix_len_B=prefix_len_B))


@FORMS
@pytest.mark.parametrize("end", [LONGEST, TILE - 1, TILE, TILE + 1, TILE + 15, 2 * TILE])
def test_a_match_that_crosses_two_tiles_is_whole(form, end) -> None:
    run, text = list(range(LONGEST)), list(range(1000, 1000 + 3 * TILE))
    text[end - LONGEST : end] = run
    got, _ = run_one(form, [*text, *run[:-3]], run[-3:], room=4 * TILE)
    assert got.source_BD.tolist() == [[end - 2, end - 1]]
    assert got.length_BD.tolist() == [[LONGEST - 2, LONGEST - 1]]


def test_a_text_longer_than_a_pass_of_its_programs(device) -> None:
    """Each of 40 texts gets LEAST programs, which search LEAST tiles in one pass. Two texts need more tiles."""
    torch.manual_seed(0)
    B, n = 40, LEAST * TILE + 200
    tokens_BN, texts = drawn(B, 4, n, 3, device)
    prefix_len_B = torch.randint(0, 20, (B,), device=device)
    prefix_len_B[[3, 7]] = torch.tensor([n, LEAST * TILE - 1], device=device)
    assert_same(copy_draft_triton, tokens_BN, texts._replace(prefix_len_B=prefix_len_B))


@FORMS
def test_full_row_is_unchanged(form) -> None:
    text = [1, 2, 3, 4, *range(100, 100 + TILE), 1, 2]
    got, row = run_one(form, text, [3, 0, 0], ALWAYS, room=len(text))
    assert (got.tokens_BN.tolist(), row) == ([[3, 4, 100]], text)


@FORMS
@pytest.mark.parametrize("nothing", [-1, -2, -(2**31)])
def test_negative_tokens_match_nothing(form, nothing) -> None:
    got, _ = run_one(form, [5, nothing, 6, 7, 5, nothing, 6], [7, 8], ALWAYS)
    assert got.length_BD.tolist() == [[0]]
    got, _ = run_one(form, [5, 6, 7, nothing, 5, 6], [7, nothing, 0], ALWAYS)
    assert got.length_BD.tolist() == [[3, 0]]
    assert got.tokens_BN.tolist() == [[7, nothing, 5]]


def test_int32_rows_and_wrong_arguments() -> None:
    tokens_BN, texts = drawn(2, 4, 20, 2)
    copy_draft(tokens_BN, texts._replace(rows_B=texts.rows_B.int()))
    with pytest.raises(ValueError, match=r"tokens_BN is torch\.int32"):
        copy_draft(tokens_BN.int(), texts)
    for message, wrong in {
        "text_QM is torch.int64": texts._replace(text_QM=texts.text_QM.long()),
        "prefix_len_B has shape": texts._replace(prefix_len_B=texts.prefix_len_B[:1]),
        "3 classes": texts._replace(counts_QK2=texts.counts_QK2[:, :3].contiguous()),
    }.items():
        with pytest.raises(ValueError, match=message):
            copy_draft(tokens_BN, wrong)
    with pytest.raises(ValueError, match=r"scratch_S has 7 elements; pass 8, one per token"):
        copy_draft(tokens_BN, texts, torch.zeros(7, dtype=torch.int32))
    nowhere = Texts(*(tensor.to("meta") for tensor in texts))
    nowhere = nowhere._replace(text_QM=torch.empty(len(texts.text_QM), 1 << 26, dtype=torch.int32, device="meta"))
    with pytest.raises(ValueError, match="texts of 67108864 tokens; pass 5 classes, and less than 2"):
        check_texts(Shapes(), nowhere)
