"""Negative controls of the distribution test: the wrong acceptance rules must fit the worker's function signatures."""

import importlib
import inspect
import sys
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from sglang.srt.sampling.sampling_batch_info import SamplingBatchInfo

from sglang_dflash.engine.stages import build
from sglang_dflash.engine.stages.choice import Choice

SPOILER = "tests.server.wrong_acceptance.sitecustomize"


def test_a_spoilt_acceptance_fits_the_worker(monkeypatch: pytest.MonkeyPatch) -> None:
    edits = {}
    monkeypatch.setitem(sys.modules, "after_loading", SimpleNamespace(edit_after_loading=edits.update))
    monkeypatch.setenv("WRONG_ACCEPTANCE", "any")
    monkeypatch.delitem(sys.modules, SPOILER, raising=False)  # importing the module registers the edit
    spoiler = importlib.import_module(SPOILER)
    spoiler.RULES["any"] = any_draft
    ((module, spoil),) = edits.items()
    assert module == build.__name__

    parameters = list(inspect.signature(Choice._sample).parameters)
    monkeypatch.setattr(build, "ACCEPT", build.ACCEPT)  # restored after the test
    monkeypatch.setattr(Choice, "_sample", Choice._sample)
    spoil(build)
    assert list(inspect.signature(Choice._sample).parameters) == parameters
    tokens_BN, prefix_len_B = torch.tensor([[3, 1, 0]]), torch.zeros(1, dtype=torch.int64)
    info = SamplingBatchInfo(
        temperatures=torch.ones(1, 1), top_ps=torch.ones(1), top_ks=torch.ones(1), min_ps=torch.zeros(1),
        is_all_greedy=False, is_any_greedy=False, need_top_p_sampling=False, need_top_k_sampling=False,
        need_min_p_sampling=False, vocab_size=4,
    )  # fmt: skip
    choice: Any = SimpleNamespace(sampler=lambda *args, **others: torch.tensor([0, 2, 1]))
    target_T, _ = Choice._sample(choice, torch.eye(3, 4), info, torch.arange(3)[None])
    target_BN = target_T[None]
    sampled, greedy = (build.ACCEPT.on_cpu(tokens_BN, target_BN, prefix_len_B) for _ in range(2))
    assert sampled.n_accepted_B.tolist() == [2], "after sampling, the wrong rule decides"
    assert greedy.n_accepted_B.tolist() == [0]


def any_draft(
    tokens_BN: torch.Tensor, target_BN: torch.Tensor, again_BN: torch.Tensor, probs_BNV: torch.Tensor
) -> torch.Tensor:
    return tokens_BN.roll(-1, dims=1)
