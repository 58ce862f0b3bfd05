"""Penalty counts must equal counts in plain lists, as requests are prefilled, decoded, ended and retracted."""

from array import array
from random import Random
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from sglang.srt.sampling.penaltylib.repetition_penalty import apply_scaling_penalties
from sglang.srt.sampling.sampling_params import SamplingParams
from sglang_dflash_kernels.accept import accept_ref

from sglang_dflash.engine.stages.penalties import Penalties, asks, stop_tokens
from tests.fixtures.sequential import penalised

V, N = 7, 4
PARAMS: list[dict[str, Any]] = [
    {},
    {"frequency_penalty": 0.7},
    {"presence_penalty": -1.5},
    {"repetition_penalty": 1.6},
    {"min_new_tokens": 5},
    {"frequency_penalty": -0.4, "presence_penalty": 0.9, "repetition_penalty": 0.8, "min_new_tokens": 9},
]


class Request:
    """Stand-in for SGLang's `Req`. `text` has all output tokens, `output_ids` only those that the host has received."""

    def __init__(self, params: dict[str, Any], prompt_len: int) -> None:
        self.params = params
        self.sampling_params = SamplingParams(**params, stop_token_ids={2})
        self.origin_input_ids, self.output_ids = array("q", [0] * prompt_len), array("q")
        self.eos_token_ids = {1}
        self.tokenizer = SimpleNamespace(additional_stop_token_ids=None, eos_token_id=3)
        self.text: list[int] = []
        self.ended, self.retraction_count = False, 0

    def finished(self) -> bool:
        return self.ended

    def wanted(self, logits_V: torch.Tensor, text: list[int]) -> torch.Tensor:
        return torch.tensor(penalised(logits_V, text, self.params, stops=(1, 2, 3)))


def batch_of(reqs: list[Request]) -> Any:
    scales = any(req.sampling_params.repetition_penalty != 1.0 for req in reqs)
    info = SimpleNamespace(acc_additive_penalties=None, acc_scaling_penalties=torch.ones(1) if scales else None)
    return SimpleNamespace(reqs=reqs, device="cpu", sampling_info=info)


def prefill(penalties: Penalties, reqs: list[Request]) -> None:
    """Prefill as SGLang does: its sampler applies all penalties with two tensors, one to add and one to scale by."""
    for req in reqs:
        req.output_ids = array("q", req.text)  # a waiting request has no step in flight, so the host has all tokens
    batch = batch_of(reqs)
    penalties.begin(batch)
    logits_BV = torch.randn(len(reqs), V)
    want_BV = torch.stack([req.wanted(x_V, req.text) for req, x_V in zip(reqs, logits_BV, strict=True)])
    if batch.sampling_info.acc_additive_penalties is not None:
        logits_BV += batch.sampling_info.acc_additive_penalties
    if batch.sampling_info.acc_scaling_penalties is not None:
        scale_BV = batch.sampling_info.acc_scaling_penalties
        logits_BV = torch.where(logits_BV < 0, logits_BV * scale_BV, logits_BV / scale_BV)
    torch.testing.assert_close(logits_BV, want_BV)
    anchor_B = torch.randint(V, (len(reqs),))
    penalties.count_anchors(reqs, anchor_B)
    for req, anchor in zip(reqs, anchor_B.tolist(), strict=True):
        req.text.append(anchor)


def decode(penalties: Penalties, reqs: list[Request]) -> None:
    """Run one step. `output_ids` stay unchanged, as if the host had not received the step's tokens."""
    tokens_BN = torch.randint(V, (len(reqs), N))
    tokens_BN[:, 0] = torch.tensor([req.text[-1] for req in reqs])
    prefix_len_B = torch.tensor([len(req.origin_input_ids) + len(req.text) - 1 for req in reqs])
    logits_TV = torch.randn(len(reqs) * N, V)
    want_TV = logits_TV.clone()
    for b, req in enumerate(reqs):
        for slot in range(N):
            text = [*req.text, *tokens_BN[b, 1 : slot + 1].tolist()]
            want_TV[b * N + slot] = req.wanted(logits_TV[b * N + slot], text)
    penalties.apply(batch_of(reqs), SimpleNamespace(prefix_len_B=prefix_len_B), tokens_BN, logits_TV)
    torch.testing.assert_close(logits_TV, want_TV)
    target_BN = tokens_BN.roll(-1, 1).where(torch.rand(len(reqs), N) < 0.7, torch.randint(V, (len(reqs), N)))
    accepted = accept_ref(tokens_BN, target_BN, prefix_len_B)
    penalties.count(reqs, accepted)
    for req, n, committed in zip(reqs, accepted.n_committed_B.tolist(), accepted.committed_BN.tolist(), strict=True):
        req.text += committed[:n]


@given(st.integers(0, 10**6))
@settings(max_examples=60)
def test_random_server_histories_equal_sequential_penalties(seed):
    """Requests arrive, share batches, end and are retracted in any order. Logits equal those of one token per step."""
    random = Random(seed)
    torch.manual_seed(seed)
    penalties = Penalties(V, torch.device("cpu"))
    waiting, running = [], []
    for _ in range(12):
        waiting += [Request(random.choice(PARAMS), random.randint(1, 5)) for _ in range(random.randint(0, 4))]
        match random.choice(["prefill", "decode", "decode", "end", "retract"]):
            case "prefill" if waiting:
                prefill(penalties, waiting)
                running, waiting = running + waiting, []
            case "decode" if running:
                decode(penalties, running)
            case "end" if running:
                running.pop(random.randrange(len(running))).ended = True
            case "retract" if running:
                waiting.append(running.pop(random.randrange(len(running))))
                waiting[-1].retraction_count += 1


def test_a_decode_server_counts_requests_that_another_server_has_prefilled():
    """Such a server never calls `begin`, also not after a retraction, which drops the tokens of the step in flight."""
    penalties = Penalties(V, torch.device("cpu"))
    reqs = [Request(params, 3) for params in PARAMS]
    for req in reqs:
        req.text = [4]
        req.output_ids = array("q", req.text)
    for _ in range(3):
        decode(penalties, reqs)
    for req in reqs:
        del req.text[len(req.text) // 2 :]
        req.output_ids = array("q", req.text)
        req.retraction_count += 1
    decode(penalties, reqs)


def test_a_prompt_in_chunks_is_counted_once():
    penalties, req = Penalties(V, torch.device("cpu")), Request({"frequency_penalty": 1.0}, 3)
    prefill(penalties, [req])
    req.text.clear()  # a token sampled before the prompt's last chunk is no output
    prefill(penalties, [req])
    assert penalties.counts_RV.sum() == 1


def test_rows_are_reused():
    """The table's size follows the number of requests that run at the same time, not the number ever served."""
    penalties = Penalties(V, torch.device("cpu"))
    kept = []  # so that finished requests are not freed
    for _ in range(40):
        reqs = [Request({"presence_penalty": 1.0}, 2) for _ in range(3)]
        prefill(penalties, reqs)
        decode(penalties, reqs)
        for req in reqs:
            req.ended = True
        kept += reqs
    assert len(penalties.counts_RV) == 8
    prefill(penalties, [Request({"presence_penalty": 1.0}, 2) for _ in range(9)])
    assert len(penalties.counts_RV) == 16


def test_requests_without_penalties_allocate_no_counts():
    penalties, reqs = Penalties(V, torch.device("cpu")), [Request({}, 2), Request({}, 3)]
    batch = batch_of(reqs)
    penalties.begin(batch)
    assert batch.sampling_info.acc_additive_penalties is None
    prefill(penalties, reqs)
    decode(penalties, reqs)
    assert penalties.counts_RV.numel() == 0


def test_parameters_are_built_once_per_batch():
    penalties, reqs = Penalties(V, torch.device("cpu")), [Request({"presence_penalty": 1.0}, 2), Request({}, 3)]
    prefill(penalties, reqs)
    _, asking = penalties.last
    decode(penalties, reqs)
    assert penalties.last[1] is asking
    decode(penalties, reqs[:1])
    assert penalties.last[1] is not asking


@pytest.mark.parametrize("params", [*PARAMS, {"min_new_tokens": 1}])
def test_asks_is_true_only_with_a_penalty(params):
    assert asks(Request(params, 1)) == bool(params)


def test_min_new_tokens_suppresses_all_stop_tokens():
    assert stop_tokens(Request({"min_new_tokens": 1}, 1)) == {1, 2, 3}
    assert stop_tokens(Request({"frequency_penalty": 1.0}, 1)) == set()
    bare = Request({"min_new_tokens": 1}, 1)
    bare.sampling_params.stop_token_ids, bare.eos_token_ids, bare.tokenizer.eos_token_id = None, None, None
    assert stop_tokens(bare) == set()


def test_the_scaling_formula_equals_sglangs():
    logits_1V, req = torch.randn(1, V), Request({"repetition_penalty": 1.6}, 1)
    want_V = req.wanted(logits_1V[0], [0, 4])
    apply_scaling_penalties.__wrapped__(logits_1V, torch.tensor([[1.6, 1, 1, 1, 1.6, 1, 1]]))
    torch.testing.assert_close(logits_1V[0], want_V)
