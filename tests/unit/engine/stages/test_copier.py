"""Copier: n-gram copies from token histories. Prompts and steps append to the history of a request's table row."""

from array import array
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from sglang.srt.managers.schedule_batch import Req
from sglang.srt.sampling.sampling_params import SamplingParams
from sglang_dflash_kernels.accept import accept_ref

from sglang_dflash.engine.stages.copier import NoCopies, RandomCopies, TextCopies, make_copier
from sglang_dflash.flags import Copy

VOCABULARY, M, WIDEST = 100, 60, 16
TABLE = torch.zeros(4, M, dtype=torch.int32)
TEXT = [*range(1, 21), *range(1, 16)]  # the last fifteen tokens occurred before, followed by 16, 17, ...


def batch_of(*texts: list[int], rows: list[int]) -> Any:
    reqs = [
        SimpleNamespace(kv=SimpleNamespace(req_pool_idx=row), get_fill_ids=lambda text=text: array("q", text))
        for row, text in zip(rows, texts, strict=True)
    ]
    return SimpleNamespace(reqs=reqs, decoding_reqs=None)


def having(*texts: list[int], rows: list[int]) -> TextCopies:
    copies = TextCopies(TABLE, VOCABULARY, WIDEST)
    copies.read(batch_of(*texts, rows=rows))
    return copies


def plan_of(prefix_len: list[int], rows: list[int], width: int) -> Any:
    return SimpleNamespace(prefix_len_B=torch.tensor(prefix_len), rows_B=torch.tensor(rows), width=width)


def step(copies: TextCopies, prefix_len: int, row: int, block: list[int], predicted: list[int]) -> list[int]:
    """Return the verified tokens of a step in which the target predicts `predicted`."""
    plan = plan_of([prefix_len], [row], len(block))
    copied = copies.copy(plan, torch.tensor([block]))
    copies.weigh(copied, accept_ref(copied.tokens_BN, torch.tensor([predicted]), plan.prefix_len_B))
    return copied.tokens_BN[0].tolist()


def test_prompt_and_committed_tokens_are_copied() -> None:
    copies = having([50, 51], TEXT, rows=[1, 3])
    assert step(copies, len(TEXT), 3, [16, 60, 61], [17, 18, 19]) == [16, 17, 18]
    # The step kept 16, 17 and 18, and the next anchor is 19.
    assert copies.text_QM[3, : len(TEXT) + 3].tolist() == [*TEXT, 16, 17, 18]
    assert step(copies, len(TEXT) + 3, 3, [19, 60, 61], [20, 1, 2]) == [19, 20, 1]
    assert copies.text_QM[1, :2].tolist() == [50, 51]


def test_a_mixed_step_appends_the_anchor_of_running_requests() -> None:
    """One request begins, another has read its anchor 16. Its counts stay, and what follows its anchor is copied."""
    copies = having(TEXT, rows=[3])
    step(copies, len(TEXT), 3, [16, 60, 61], [17, 18, 19])
    before = copies.counts_QK2[3].clone()
    assert before.any()
    batch = batch_of([50, 51], [*TEXT, 99], rows=[1, 3])
    batch.decoding_reqs, batch.req_pool_indices = batch.reqs[1:], torch.tensor([1, 3])
    batch.prefix_lens, batch.input_ids = [0, len(TEXT) + 3], torch.tensor([50, 51, 19])
    copies.read(batch)
    assert copies.text_QM[3, : len(TEXT) + 4].tolist() == [*TEXT, 16, 17, 18, 19]
    assert copies.text_QM[1, :2].tolist() == [50, 51]
    assert torch.equal(copies.counts_QK2[3], before)
    assert step(copies, len(TEXT) + 4, 3, [20, 60, 61], [1, 2, 3]) == [20, 1, 2]


def test_forget_clears_counts_of_dry_runs() -> None:
    """In a dry run the token history and the block are all zeros, so matches are found and copies are counted."""
    copies = TextCopies(TABLE, VOCABULARY, WIDEST)
    step(copies, M // 2, 2, [0, 0, 0, 0], [0, 0, 0, 7])
    assert copies.counts_QK2.any()
    assert any(any(row) for row in copies.totals())
    copies.forget()
    assert not copies.counts_QK2.any()
    assert not any(any(row) for row in copies.totals())


def test_rejected_copies_are_not_kept_in_the_history() -> None:
    copies = having(TEXT, rows=[3])
    step(copies, len(TEXT), 3, [16, 60, 61], [40, 0, 0])
    step(copies, len(TEXT) + 1, 3, [40, 62, 63], [41, 0, 0])
    assert copies.text_QM[3, : len(TEXT) + 4].tolist() == [*TEXT, 16, 40, 62, 63]


def test_steps_without_drafts_extend_the_history() -> None:
    copies = having(TEXT[:-1], rows=[3])
    assert step(copies, len(TEXT) - 1, 3, [15], [16]) == [15]
    assert not copies.counts_QK2.any()
    assert step(copies, len(TEXT), 3, [16, 60, 61], [17, 18, 19]) == [16, 17, 18]
    before = copies.counts_QK2.clone(), copies.totals()
    step(copies, len(TEXT) + 3, 3, [19], [20])
    assert torch.equal(copies.counts_QK2, before[0]), "a step without drafts weighs no copies"
    assert copies.totals() == before[1]


def test_counts_are_reset_for_the_next_request_of_a_row() -> None:
    copies = having(TEXT, rows=[2])
    for _ in range(3):  # the copies are rejected, and the block's own drafts would have been accepted
        step(copies, len(TEXT), 2, [16, 60, 61], [60, 61, 62])
    assert step(copies, len(TEXT), 2, [16, 60, 61], [60, 61, 62]) == [16, 60, 61]
    other = copies.counts_QK2.clone()
    copies.read(batch_of([9, 8, 7], rows=[1]))
    assert torch.equal(copies.counts_QK2, other)
    copies.read(batch_of(TEXT, rows=[2]))
    assert step(copies, len(TEXT), 2, [16, 60, 61], [60, 61, 62]) == [16, 17, 18]


def test_counts_are_reset_for_all_requests_of_a_batch() -> None:
    copies = TextCopies(TABLE, VOCABULARY, WIDEST)
    copies.counts_QK2[:] = -7
    copies.read(batch_of(TEXT, [9, 8, 7], rows=[1, 3]))
    assert [row.any().item() for row in copies.counts_QK2] == [True, False, True, False]


def test_a_retracted_request_resumes_in_another_row() -> None:
    """The prompt is a prefix cache hit. Still, the whole history must replace that of the row's last request."""
    copies = having(list(range(40, 40 + M - 4)), rows=[3])
    step(copies, M - 4, 3, [96, 97, 98], [50, 51, 52])
    req = Req("r", "", array("q", TEXT[:18]), SamplingParams(), vocab_size=VOCABULARY)
    req.output_ids.extend(TEXT[18:])
    req.refresh_fill_ids()
    req.prefix_len, req.extend_end, req.kv.req_pool_idx = 18, len(TEXT), 3
    copies.read(SimpleNamespace(reqs=[req], decoding_reqs=None))
    assert step(copies, len(TEXT), 3, [16, 60, 61], [17, 18, 19]) == [16, 17, 18]
    assert copies.text_QM[3, : len(TEXT) + 3].tolist() == [*TEXT, 16, 17, 18]


def test_requests_of_one_step_copy_from_their_own_history() -> None:
    """The step's batch has rows 0 and 3, in this order. After the same 15 tokens, row 0 has 70 and row 3 has 16."""
    copies = TextCopies(TABLE, VOCABULARY, WIDEST)
    shifted = [*TEXT[:15], *range(70, 76), *TEXT[:15]]
    copies.read(batch_of(TEXT, shifted, rows=[3, 0]))
    plan = plan_of([len(shifted), len(TEXT)], [0, 3], 3)
    copied = copies.copy(plan, torch.tensor([[70, 60, 61], [16, 60, 61]]))
    assert copied.tokens_BN.tolist() == [[70, 71, 72], [16, 17, 18]]
    copies.weigh(copied, accept_ref(copied.tokens_BN, torch.tensor([[60, 0, 0], [17, 18, 19]]), plan.prefix_len_B))
    worth = {row: counts_K2[-1].tolist() for row, counts_K2 in enumerate(copies.counts_QK2)}
    assert worth == {0: [-1, 1], 1: [0, 0], 2: [0, 0], 3: [2, 1]}


def test_a_shorter_history_in_the_row_hides_the_older_one() -> None:
    """After the 15 tokens of the new history, the row still holds tokens of the older one, which must not be copied."""
    copies = having(TEXT, rows=[3])
    copies.read(batch_of(TEXT[-15:], rows=[3]))
    assert step(copies, 15, 3, [16, 60, 61], [17, 18, 19]) == [16, 60, 61]


def test_image_tokens_are_not_copied() -> None:
    copies = having([1, VOCABULARY - 1, VOCABULARY, 1 << 40, 2], rows=[0])
    assert copies.text_QM[0, :5].tolist() == [1, VOCABULARY - 1, -1, -1, 2]


def test_totals_count_copied_and_kept_tokens() -> None:
    copies = having(TEXT, rows=[3])
    step(copies, len(TEXT), 3, [16, 60, 61], [17, 18, 19])
    assert copies.totals() == [[0, 0], [0, 0], [0, 0], [0, 0], [1, 2]]
    assert not copies.counts_QK2[:3].any()


@pytest.mark.parametrize(
    ("copy", "kind"),
    [(Copy.OFF, NoCopies), (Copy.AUTO, TextCopies), (Copy.ON, TextCopies), (Copy.RANDOM, RandomCopies)],
)
def test_the_flag_selects_the_copier(copy: Copy, kind: type) -> None:
    assert type(make_copier(copy, TABLE, VOCABULARY, WIDEST)) is kind


def test_random_copies_occur_and_agree_on_every_rank() -> None:
    ranks = [RandomCopies(TABLE, VOCABULARY, WIDEST) for _ in range(2)]
    predicted = []
    for copies in ranks:
        copies.read(batch_of(TEXT, rows=[3]))
        predicted.append([step(copies, len(TEXT), 3, [16, 60, 61], [60, 61, 62]) for _ in range(20)])
    assert predicted[0] == predicted[1]
    assert [16, 60, 61] in predicted[0]
    assert [16, 17, 18] in predicted[0]


def test_without_copies_a_block_stays_as_it_is() -> None:
    tokens_BN = torch.tensor([[16, 60, 61]])
    assert NoCopies().copy(plan_of([7], [3], 3), tokens_BN).tokens_BN is tokens_BN
