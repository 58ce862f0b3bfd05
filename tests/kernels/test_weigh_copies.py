import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from sglang_dflash_kernels.copy_draft import N_CLASSES, Copied, Texts, copy_draft_ref, length_class
from sglang_dflash_kernels.weigh_copies import (
    MEMORY,
    weigh_copies,
    weigh_copies_numpy,
    weigh_copies_ref,
    weigh_copies_triton,
)

FORMS = pytest.mark.parametrize(
    "form", [weigh_copies_ref, weigh_copies_numpy, weigh_copies_triton], ids=["definition", "numpy", "kernel"]
)


def weighed(form, text: list[int], block: list[int], committed: list[int], before=(0, 0)) -> dict[int, list[int]]:
    """Run one step for a request in row 1; return the counts of the length classes that changed."""
    text_QM = torch.full((3, 64), 77, dtype=torch.int32)
    text_QM[1, : len(text)] = torch.tensor(text, dtype=torch.int32)
    counts_QK2 = torch.zeros(3, N_CLASSES, 2, dtype=torch.int32)
    counts_QK2[1] = torch.tensor(before, dtype=torch.int32)
    texts = Texts(torch.tensor([len(text)]), torch.tensor([1]), text_QM, counts_QK2)
    tokens_BN = torch.tensor([block])
    copied = copy_draft_ref(tokens_BN, texts)
    said_BN = torch.tensor([committed + [0] * (len(block) - len(committed))])
    n_committed_B = torch.tensor([len(committed)], dtype=torch.int32)
    form(tokens_BN, copied, said_BN, n_committed_B, texts, totals_K2=torch.zeros(N_CLASSES, 2, dtype=torch.int32))
    assert not counts_QK2[[0, 2]].any()
    return {k: count for k, count in enumerate(counts_QK2[1].tolist()) if count != list(before)}


SHORT = length_class(3)


TEXT = [1, 2, 3, 4, 5, 6, 7, 8, 9, 1, 2]  # after 1 2 3 the copy is 4 5 6 7
HAND_WORKED = {  # text, block, committed tokens, counts before and after
    # A copy can begin at place d, directly after slot d. One of the block's guesses is right (4). From place 0 the copy
    # is 4 5 6 7: three tokens are right, so gain is 3 - 1. From place 1 it is 5 6 7: with guess 4, again three right.
    "later-places-were-not-reached": (
        TEXT, [3, 4, 0, 0, 0], [4, 5, 6, 9], (0, 0), {SHORT: [2, 1], length_class(4): [2, 1]}
    ),
    # A block of 5 has 4 guesses. All are right, and no token of the copy is: gain is 0 - 4.
    "the-block-was-right-throughout": (TEXT, [3, 10, 11, 12, 13], [10, 11, 12, 13, 14], (0, 0), {SHORT: [-4, 1]}),
    "the-first-guess-is-all-that-was-committed": (TEXT, [3, 10, 11, 12, 13], [10], (0, 0), {SHORT: [-1, 1]}),
    "both-are-right-as-far-as-it-goes": (TEXT, [3, 4, 0, 0, 0], [4], (0, 0), {SHORT: [0, 1]}),
    "guesses-4-5-6-lead-into-the-text": (
        [3, 4, 5, 6, 7, 8, 9, 1], [2, 4, 5, 6, 0, 0, 0], [4, 5, 6, 7, 8, 9, 1], (0, 0), {SHORT: [3, 1]}
    ),
    "their-place-was-not-reached": ([3, 4, 5, 6, 7, 8, 9, 1], [2, 4, 5, 6, 0, 0, 0], [4, 5, 9], (0, 0), {}),
    # The copy after the guesses 2 3 wraps around: 1 2 3 1. All 4 were committed after the 2 right guesses.
    "a-copy-goes-round": ([1, 2, 3], [1, 2, 3, 0, 0, 0, 0], [2, 3, 1, 2, 3, 1, 9], (0, 0), {SHORT: [4, 1]}),
    # gain (-7 - 4) / 2 is rounded down to -6.
    "what-is-long-ago-counts-half": (
        TEXT, [3, 10, 11, 12, 13], [10, 11, 12, 13, 14], (-7, MEMORY), {SHORT: [-6, (MEMORY + 1) // 2]}
    ),
    "before-that-it-counts-whole": (TEXT, [3, 10, 11, 12, 13], [4, 9], (-7, MEMORY - 1), {SHORT: [-6, MEMORY]}),
}  # fmt: skip


@FORMS
@pytest.mark.parametrize(("text", "block", "committed", "before", "want"), HAND_WORKED.values(), ids=HAND_WORKED)
def test_hand_worked_counts(form, text, block, committed, before, want) -> None:
    assert weighed(form, text, block, committed, before) == want


@FORMS
def test_block_without_a_match_reads_no_other_request(form) -> None:
    """A place is a point in the block where a copy can begin. Request 0 has no place with a match.

    In memory its last place is followed by the first place of request 1, which has a match.
    """
    text_QM = torch.tensor([TEXT + [77] * 9] * 2, dtype=torch.int32)
    counts_QK2 = torch.zeros(2, N_CLASSES, 2, dtype=torch.int32)
    texts = Texts(torch.tensor([len(TEXT)] * 2), torch.arange(2), text_QM, counts_QK2)
    tokens_BN, said_BN = torch.tensor([[60, 10, 11], [3, 10, 11]]), torch.tensor([[10, 11, 12], [9, 0, 0]])
    copied, n_committed_B = copy_draft_ref(tokens_BN, texts), torch.tensor([3, 1], dtype=torch.int32)
    form(tokens_BN, copied, said_BN, n_committed_B, texts, totals_K2=torch.zeros(N_CLASSES, 2, dtype=torch.int32))
    assert not counts_QK2[0].any()
    assert counts_QK2[1, SHORT].tolist() == [0, 1]


@FORMS
def test_hand_worked_totals(form) -> None:
    """Three requests: a copy at place 0 by a match of 16 tokens, one at place 2 by a match of 3, and no copy."""
    length_BD = torch.tensor([[16, 0, 0, 0], [0, 0, 3, 0], [5, 0, 0, 0]], dtype=torch.int32)
    place_B = torch.tensor([0, 2, 4], dtype=torch.int32)
    texts = Texts(
        torch.full((3,), 20), torch.arange(3), torch.zeros(3, 32, dtype=torch.int32), torch.zeros(3, N_CLASSES, 2).int()
    )
    tokens_BN = torch.zeros(3, 5, dtype=torch.int64)
    copied = Copied(tokens_BN, place_B, torch.full_like(length_BD, 7), length_BD)
    totals_K2 = torch.ones(N_CLASSES, 2, dtype=torch.int32)
    for n_committed in (5, 2):  # in the second step the guesses before the second copy were not all accepted
        n_committed_B = torch.full((3,), n_committed, dtype=torch.int32)
        form(tokens_BN, copied, tokens_BN, n_committed_B, texts, totals_K2=totals_K2)
    want = {length_class(16): [1 + 2, 1 + 4 + 1], length_class(3): [1 + 2, 1 + 2]}
    assert totals_K2.tolist() == [want.get(k, [1, 1]) for k in range(N_CLASSES)]


def drawn(B: int, N: int, n_text: int, n_words: int, device: str = "cpu") -> tuple:
    Q = 2 * B + 1
    text_QM = torch.randint(-1, n_words, (Q, n_text + N + 1), dtype=torch.int32)
    counts_QK2 = torch.randint(-12, 13, (Q, N_CLASSES, 2), dtype=torch.int32)
    counts_QK2[..., 1] = torch.randint(0, MEMORY + 1, (Q, N_CLASSES))
    texts = Texts(torch.randint(0, n_text + 1, (B,)), torch.randperm(Q)[:B], text_QM, counts_QK2)
    tokens_BN = torch.randint(0, n_words, (B, N))
    copied = copy_draft_ref(tokens_BN, texts)
    committed_BN = torch.randint(0, n_words, (B, N))
    half = B // 2  # half of the blocks have a long accepted prefix
    committed_BN[:half, : N // 2] = tokens_BN[:half, 1 : N // 2 + 1]
    n_committed_B = torch.randint(1, N + 1, (B,), dtype=torch.int32)
    step = tokens_BN.to(device), Copied(*(tensor.to(device) for tensor in copied))
    said = committed_BN.to(device), n_committed_B.to(device)
    return *step, *said, Texts(*(tensor.to(device) for tensor in texts))


def assert_same(form, args: tuple) -> None:
    *step, texts = args
    results = []
    for one in (form, weigh_copies_ref):
        counts_QK2, totals_K2 = texts.counts_QK2.clone(), texts.counts_QK2[0] + 7
        one(*step, texts._replace(counts_QK2=counts_QK2), totals_K2=totals_K2)
        results.append((counts_QK2, totals_K2))
    assert torch.equal(results[0][0], results[1][0])
    assert torch.equal(results[0][1], results[1][1])


@given(st.data())
@settings(max_examples=150, deadline=None)
def test_the_torch_form_is_the_definition(data) -> None:
    torch.manual_seed(data.draw(st.integers(0, 1 << 30)))
    sizes = [data.draw(st.integers(*bounds)) for bounds in ((0, 4), (1, 8), (0, 40), (1, 3))]
    assert_same(weigh_copies_numpy, drawn(*sizes))


@pytest.mark.parametrize(
    "sizes",
    [
        (0, 4, 10, 2), (1, 1, 5, 2), (4, 16, 90, 2), (3, 12, 60, 2), (8, 8, 60, 2), (4, 5, 1, 2), (2, 2, 9, 1),
        (2, 32, 90, 2),
    ],
)  # fmt: skip
def test_the_kernel_is_the_definition(sizes, device) -> None:
    torch.manual_seed(sum(sizes))
    for _ in range(3):
        assert_same(weigh_copies_triton, drawn(*sizes, device=device))


def test_wrong_arguments_are_refused() -> None:
    args = drawn(2, 4, 20, 2)
    totals_K2 = torch.zeros(N_CLASSES, 2, dtype=torch.int32)
    weigh_copies(*args, totals_K2=totals_K2)
    for said, i, wrong in (
        ("tokens_BN is torch.int32", 0, args[0].int()),
        ("n_committed_B is torch.int64", 3, args[3].long()),
        ("committed_BN has shape", 0, args[0][:, :3].contiguous()),
    ):
        with pytest.raises(ValueError, match=said):
            weigh_copies(*args[:i], wrong, *args[i + 1 :], totals_K2=totals_K2)
    wider = args[1]._replace(**{name: torch.zeros(2, 4, dtype=torch.int32) for name in ("source_BD", "length_BD")})
    with pytest.raises(ValueError, match="copied has 4 drafts per block, and blocks of 4 have 3; pass the result"):
        weigh_copies(args[0], wider, *args[2:], totals_K2=totals_K2)
