"""Probe of `sglang-dflash prove`: counts over several steps, and a step's arguments."""

from types import SimpleNamespace
from typing import Any

import pytest
import torch

from sglang_dflash.engine.worker import DFlashWorker
from sglang_dflash.tools.prove.probe import Probe, ProbedWorker


def make_probe() -> Probe:
    runner = SimpleNamespace()
    stages = SimpleNamespace(verifier=SimpleNamespace(engines={}))
    worker: Any = SimpleNamespace(target_runner=runner, draft_runner=runner, device="cpu", stages=stages)
    return Probe(worker)


def step(probe: Probe, tokens_BN: torch.Tensor, logits_TV: torch.Tensor, *, n_changed: int) -> None:
    """Record a step whose target overwrites `n_changed` of the verified tokens."""
    probe.begin((len(tokens_BN), tokens_BN.shape[1]), tokens_BN)
    tokens_BN.view(-1)[:n_changed] += 1
    probe.raw = SimpleNamespace(next_token_logits=logits_TV, hidden_states=None)
    probe.end()


def test_counts_of_a_size_add_up_over_steps() -> None:
    """Steps of one request at width 2 are padded to two requests. NaN is in a padded row, or in a request's row."""
    probe, nan = make_probe(), float("nan")
    finite = torch.zeros(4, 3)
    padded, real = finite.clone(), finite.clone()
    padded[3, 0], real[1, 0] = nan, nan
    for logits_TV, n_changed in ((padded, 2), (real, 0), (padded, 1)):
        step(probe, torch.zeros(1, 2, dtype=torch.int64), logits_TV, n_changed=n_changed)
    step(probe, torch.zeros(2, 2, dtype=torch.int64), finite, n_changed=0)
    narrow, whole = (probe.seen[size].describe() for size in ((1, 2), (2, 2)))
    assert narrow == {"steps": 3, "served": 0, "padded": 6, "changed": 3, "not_finite": 2, "not_finite_real": 1}
    assert whole == {"steps": 1, "served": 0, "padded": 0, "changed": 0, "not_finite": 0, "not_finite_real": 0}


def test_a_probed_step_has_the_arguments_of_a_step(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(DFlashWorker, "decode", lambda self, *args: args)
    worker: Any = ProbedWorker.__new__(ProbedWorker)
    worker.probe = make_probe()
    assert worker.decode("batch", "publish", "barrier") == ("batch", "publish", "barrier")
    ((stage, _),) = worker.probe.times.host_s
    assert stage == "step"
