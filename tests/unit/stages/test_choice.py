"""Parameters repeated for every slot, and SGLang's own functions run over B x N rows, against one row at a time."""

from array import array
from collections.abc import Iterator
from itertools import pairwise
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from sglang.srt.layers import sampler
from sglang.srt.layers.sampler import (
    sampling_from_probs_torch,
    top_k_top_p_min_p_sampling_from_probs_torch,
)
from sglang.srt.sampling.custom_logit_processor import (
    CustomLogitProcessor,
    DeepseekOCRNoRepeatNGramLogitProcessor,
    DisallowedTokensLogitsProcessor,
)
from sglang.srt.sampling.sampling_batch_info import ProcessorEntry, SamplingBatchInfo

from sglang_dflash.stages.choice import Choice
from sglang_dflash.stages.processors import Processors
from sglang_dflash.stages.sampling import over_slots

V, N = 50, 4
WHOLE = 1 << 30  # SGLang's top_k for the whole vocabulary


@pytest.fixture(scope="module", autouse=True)
def hash_on_cpu() -> Iterator[None]:
    """SGLang's hash needs its compiled operators; any hash of seed, position and column will do."""

    def hashed(seed_T: torch.Tensor, positions_T: torch.Tensor, columns_V: torch.Tensor) -> torch.Tensor:
        key_TV = seed_T.to(torch.int64)[:, None] * 2654435761 + positions_T[:, None] * 40503 + columns_V
        key_TV = (key_TV % 2**31) * 2246822519 % 2**32
        return (key_TV ^ (key_TV >> 15)) * 1103515245 % 2**32

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(sampler, "murmur_hash32", hashed)
        yield


def info_of(rows: list[dict[str, Any]], **fields: Any) -> SamplingBatchInfo:
    def column(name: str, default: float, dtype: torch.dtype) -> torch.Tensor:
        return torch.tensor([row.get(name, default) for row in rows], dtype=dtype)

    top_ks = column("top_k", WHOLE, torch.int32)
    return SamplingBatchInfo(
        temperatures=column("temperature", 1.0, torch.float32)[:, None],
        top_ps=column("top_p", 1.0, torch.float32),
        top_ks=top_ks,
        min_ps=column("min_p", 0.0, torch.float32),
        sampling_seed=column("seed", 42, torch.int64),
        is_all_greedy=bool((top_ks <= 1).all()),
        is_any_greedy=bool((top_ks <= 1).any()),
        need_top_p_sampling=any("top_p" in row for row in rows),
        need_top_k_sampling=any("top_k" in row for row in rows),
        need_min_p_sampling=any("min_p" in row for row in rows),
        vocab_size=V,
        device="cpu",
        **fields,
    )


def draw(logits_TV: torch.Tensor, info: SamplingBatchInfo, positions_T: torch.Tensor) -> list[int]:
    """What SGLang's sampler does with the torch backend, which is the one that takes seeds."""
    probs_TV = (logits_TV / info.temperatures).softmax(-1)
    if not (info.need_top_p_sampling or info.need_top_k_sampling or info.need_min_p_sampling):
        return sampling_from_probs_torch(probs_TV, info.sampling_seed, positions_T).tolist()
    filters = info.top_ks, info.top_ps, info.min_ps, info.need_min_p_sampling
    return top_k_top_p_min_p_sampling_from_probs_torch(probs_TV, *filters, info.sampling_seed, positions_T).tolist()


PARAMETERS = {
    "temperature": st.sampled_from([0.3, 1.0, 2.0]),
    "top_k": st.sampled_from([1, 3, 20, WHOLE]),
    "top_p": st.sampled_from([0.3, 0.9, 1.0]),
    "seed": st.integers(0, 2**40),
}


@given(st.lists(st.fixed_dictionaries({}, optional=PARAMETERS), min_size=1, max_size=5), st.integers(0, 10**6))
@settings(max_examples=60, deadline=None)
def test_every_slot_draws_as_its_request_would_alone_at_that_position(rows, torch_seed):
    """With seeds a draw is a function of seed and position, so a mix can be compared with each request by itself."""
    torch.manual_seed(torch_seed)
    B = len(rows)
    logits_TV = 3 * torch.randn(B * N, V)
    positions_BN = torch.randint(0, 900, (B, 1)) + torch.arange(N)
    together = draw(logits_TV, over_slots(info_of(rows), N), positions_BN.view(-1))
    for row, token in enumerate(together):
        # Every parameter spelled out: the batch as a whole decides which of SGLang's two functions runs.
        alone = {"temperature": 1.0, "top_p": 1.0, "top_k": WHOLE} | rows[row // N]
        names = {name for other in rows for name in other}
        alone = {name: value for name, value in alone.items() if name in names}
        position = positions_BN.view(-1)[row : row + 1]
        assert draw(logits_TV[row : row + 1], info_of([alone]), position) == [token]


def test_min_p_holds_for_every_slot_of_its_request():
    """SGLang draws min_p without seeds only; at 1.0 it leaves the most likely token alone."""
    logits_TV = torch.randn(3 * N, V)
    info = over_slots(info_of([{}, {"min_p": 1.0}, {"min_p": 0.01}]), N)
    info.sampling_seed = None
    drawn_TN = torch.tensor([draw(logits_TV, info, torch.arange(3 * N)) for _ in range(20)]).view(20, 3, N)
    likeliest_N = logits_TV.argmax(-1).view(3, N)[1]
    assert (drawn_TN[:, 1] == likeliest_N).all()
    assert not (drawn_TN[:, 0] == drawn_TN[0, 0]).all()
    assert not (drawn_TN[:, 2] == drawn_TN[0, 2]).all()


def test_a_sampled_batch_is_not_a_greedy_one_repeated():
    """The test above could pass with one draw per request."""
    info = over_slots(info_of([{"temperature": 5.0}]), 16)
    assert len(set(draw(torch.zeros(16, V), info, torch.arange(16)))) > 1


# -- custom processors ------------------------------------------------------------------------------------------------


class Request:
    def __init__(self, prompt: list[int], output: list[int]) -> None:
        self.origin_input_ids, self.output_ids = array("q", prompt), array("q", output)
        self.rid = "r"


def entries(*pairs: tuple[CustomLogitProcessor, list[int]]) -> dict[int, ProcessorEntry]:
    return {i: ProcessorEntry(processor, rows, torch.tensor(rows)) for i, (processor, rows) in enumerate(pairs)}


NGRAM = {"ngram_size": 2, "window_size": 100}


def processed(reqs: list[Request], late: list[list[int]], tokens_BN: torch.Tensor) -> torch.Tensor:
    """The logits after one step whose host has not seen the `late` tokens of each request yet."""
    params = [NGRAM | {"__req__": reqs[0]}, {"token_ids": [5, 6]}, None, NGRAM | {"__req__": reqs[3]}]
    info = info_of(
        [{}] * 4,
        has_custom_logit_processor=True,
        custom_params=params,
        custom_logit_processor=entries(
            (DeepseekOCRNoRepeatNGramLogitProcessor(), [0, 3]), (DisallowedTokensLogitsProcessor(), [1])
        ),
    )
    batch = SimpleNamespace(reqs=reqs, sampling_info=info)
    lens = [len(req.origin_input_ids) + len(req.output_ids) + len(new) for req, new in zip(reqs, late, strict=True)]
    plan = SimpleNamespace(width=N, prefix_len_B=torch.tensor(lens) - 1)
    processors = Processors()
    longest = max(map(len, late))
    committed_BN = torch.tensor([[*new, *[0] * longest][: max(longest, 1)] for new in late])
    processors.remember(batch, committed_BN, torch.tensor([len(new) for new in late]))
    logits_TV = torch.zeros(4 * N, V)
    processors.apply(batch, plan, tokens_BN, logits_TV)
    return logits_TV.view(4, N, V)


@pytest.mark.parametrize("late", [[[]] * 4, [[7, 8], [1], [1, 2, 3], [9]]], ids=["seen", "late"])
def test_a_processor_reads_the_text_at_its_slot(late: list[list[int]]):
    """No bigram twice: what is banned at a slot follows from the text up to it."""
    torch.manual_seed(0)
    reqs = [Request([1, 2, 3], [7, 8, 7]) for _ in range(4)]
    tokens_BN = torch.randint(0, 4, (4, N)) + 6
    logits_BNV = processed(reqs, late, tokens_BN)
    for b in (0, 3):
        for slot in range(N):
            text = [1, 2, 3, 7, 8, 7, *late[b], *tokens_BN[b, 1 : slot + 1].tolist()]
            banned = {after for before, after in pairwise(text) if before == text[-1]}
            assert set(logits_BNV[b, slot].isinf().nonzero().flatten().tolist()) == banned
    assert set(logits_BNV[1].isinf().nonzero()[:, 1].tolist()) == {5, 6}
    assert not logits_BNV[2].any()
    assert reqs[0].output_ids.tolist() == [7, 8, 7]


def test_the_text_is_not_fetched_unless_it_is_read(monkeypatch):
    monkeypatch.setattr(Processors, "_texts", lambda *args: pytest.fail("the host waited"))
    info = info_of(
        [{}],
        has_custom_logit_processor=True,
        custom_params=[{"token_ids": [5], "__req__": Request([1], [2])}],
        custom_logit_processor=entries((DisallowedTokensLogitsProcessor(), [0])),
    )
    batch = SimpleNamespace(reqs=[Request([1], [2])], sampling_info=info)
    logits_TV = torch.zeros(N, V)
    Processors().apply(batch, SimpleNamespace(width=N), torch.zeros(1, N), logits_TV)
    assert logits_TV[:, 5].isinf().all()


# -- greedy -----------------------------------------------------------------------------------------------------------


def test_a_greedy_batch_takes_the_argmax_alone():
    """No sampler, no row of parameters repeated."""

    def sample(*args: Any, **kwargs: Any) -> None:
        pytest.fail("sampled")

    choice = Choice.__new__(Choice)
    choice.sampler, choice.ranks = sample, SimpleNamespace(sync=lambda site, tokens: tokens)
    choice.penalties, choice.processors = SimpleNamespace(apply=lambda *args: None), Processors()
    info = info_of([{"top_k": 1}, {"top_k": 1}])
    logits_TV = torch.randn(2 * N, V)
    want_BN = logits_TV.argmax(-1).view(2, N)
    target = SimpleNamespace(output=SimpleNamespace(next_token_logits=logits_TV), grammar_tree=None)
    batch = SimpleNamespace(sampling_info=info, return_logprob=False)
    assert torch.equal(choice.choose(batch, None, torch.zeros(2, N), target, None), want_BN)
