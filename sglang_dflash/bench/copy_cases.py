"""The kernels that continue blocks by copies of the text."""

import torch
from sglang_dflash_kernels.copy_draft import N_CLASSES, Texts, copy_draft, copy_draft_ref
from sglang_dflash_kernels.weigh_copies import weigh_copies, weigh_copies_ref

from sglang_dflash.bench.case import Case, Sizes, assert_equal

PERIOD = 61  # tokens after which a text repeats itself: every place of a block has matches, of all lengths


def copy_cases(B: int, N: int, sizes: Sizes, device: str) -> list[Case]:
    """Return cases with texts of four fifths of the positions, 32,768 of 40,960. Launches write the same again."""
    n_text = sizes.n_positions * 4 // 5
    words_P = torch.randint(sizes.n_vocab, (PERIOD,), device=device, dtype=torch.int32)
    text_QM = words_P.repeat(-(-sizes.n_positions // PERIOD))[: sizes.n_positions].repeat(2 * B, 1)
    texts = Texts(
        prefix_len_B=torch.full((B,), n_text, device=device),
        rows_B=torch.randperm(2 * B, device=device)[:B],
        text_QM=text_QM,
        counts_QK2=torch.zeros(2 * B, N_CLASSES, 2, dtype=torch.int32, device=device),
    )
    tokens_BN = text_QM[texts.rows_B, n_text : n_text + N].long()
    tokens_BN[:, N // 2 :] = sizes.n_vocab - 1  # from here on the block's guesses are wrong
    committed_BN = text_QM[texts.rows_B, n_text + 1 : n_text + N + 1].long()
    n_committed_B = torch.full((B,), N, dtype=torch.int32, device=device)
    copied, totals_K2 = copy_draft(tokens_BN, texts), torch.zeros_like(texts.counts_QK2[0])

    def copy() -> object:
        return copy_draft(tokens_BN, texts)

    def check_copy() -> None:
        got, its = copy_draft(tokens_BN, texts), Texts(*(tensor.cpu() for tensor in texts))
        want = copy_draft_ref(tokens_BN.cpu(), its)
        assert_equal((*(field.cpu() for field in got), texts.text_QM.cpu()), (*want, its.text_QM))

    step = tokens_BN, copied, committed_BN, n_committed_B

    def weigh() -> None:
        weigh_copies(*step, texts, totals_K2=totals_K2)

    def check_weigh() -> None:
        results = []
        for run in (weigh_copies, weigh_copies_ref):
            fresh = torch.zeros_like(texts.counts_QK2), torch.zeros_like(totals_K2)
            run(*step, texts._replace(counts_QK2=fresh[0]), totals_K2=fresh[1])
            results.append(fresh)
        assert_equal(*results)

    D = N - 1
    copy_bytes = B * (4 * n_text + 20 * N + 8 * D + 8 * N_CLASSES + 20)
    weigh_bytes = B * (16 * N + 12 * D + 16 * N_CLASSES + 40)
    return [
        Case("copy_draft", f"B={B} N={N}, {n_text} tokens", copy_bytes, copy, check_copy),
        Case("weigh_copies", f"B={B} N={N}", weigh_bytes, weigh, check_weigh),
    ]
