"""Wiring between stages and SGLang: the width, the engine, and the order in which things are made."""

from contextlib import nullcontext
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from sglang_dflash_kernels.accept import accept_ref

from sglang_dflash.host import results
from sglang_dflash.stages import engines
from sglang_dflash.stages.ranks import OneGroup
from sglang_dflash.stages.verifier import Verifier, WidthEngine
from sglang_dflash.step import Plan, Target
from tests.unit.stages.test_verifier import plan_of


def narrow_plan(n_requests: int, drafted: int, width: int) -> Plan:
    """A step that drafts blocks of `drafted` tokens and verifies `width` of each."""
    return plan_of(n_requests, width)._replace(drafted=plan_of(n_requests, drafted).verified)


def test_rows_of_a_narrow_step_lie_as_far_apart_as_it_is_wide(monkeypatch: pytest.MonkeyPatch) -> None:
    """Log-probabilities, the scheduler's stride and the cap of a request's counts."""
    asked: list[int] = []
    monkeypatch.setattr(results, "compute_spec_logprobs", lambda *args, chain_stride: asked.append(chain_stride))
    plan, tokens_BN = narrow_plan(2, drafted=8, width=4), torch.zeros(2, 4, dtype=torch.int64)
    accepted = accept_ref(tokens_BN, tokens_BN, plan.prefix_len_B)
    run = SimpleNamespace(
        logits_output=None, can_run_graph=False, expert_distribution_metrics=None, routed_experts_output=None,
        indexer_topk_output=None,
    )  # fmt: skip
    batch: Any = SimpleNamespace(return_logprob=True)
    result = results.result_of(batch, plan, Target(run, None, None), accepted)
    assert asked == [4]
    assert result.speculative_num_draft_tokens == 4
    assert result.cap_lens.tolist() == [4, 4]


class Commits:
    """A state that counts its commits."""

    def __init__(self) -> None:
        self.n = 0

    def commit(self, *args: object) -> None:
        self.n += 1


def test_the_engine_that_verified_commits() -> None:
    states = {width: Commits() for width in (1, 4, 8)}
    runner = SimpleNamespace(attn_backend=None, decode_cuda_graph_runner=None, device="cuda", forward=None)
    made = {width: WidthEngine("backend", None, state, {}) for width, state in states.items()}
    verifier = Verifier(SimpleNamespace(model_runner=runner), made, OneGroup(), on_host=False)
    verifier.commit(None, narrow_plan(1, drafted=8, width=4), torch.ones(1))
    assert {width: state.n for width, state in states.items()} == {1: 0, 4: 1, 8: 0}


def test_graphs_are_captured_with_the_state_attached(monkeypatch: pytest.MonkeyPatch) -> None:
    """Captured before that, they would run without it."""
    order: list[str] = []

    class Graphs:
        capture_bs = (1, 2)

        def __init__(self, runner: object, **_: object) -> None:
            order.append("captured")

    backend = SimpleNamespace()
    runner: Any = SimpleNamespace(
        _get_attention_backend=lambda **_: order.append("backend") or backend,
        prefill_attention_backend_str="fa3",
        decode_attention_backend_str="fa3",
        kv_index_translator=SimpleNamespace(bind_and_verify_backends=lambda backends: order.append("bound")),
    )
    state: Any = SimpleNamespace(attach=lambda to: order.append("attached"))
    monkeypatch.setattr(engines, "get_spec", lambda: SimpleNamespace(override=lambda **_: nullcontext()))
    monkeypatch.setattr(engines, "capturing", lambda sizes: nullcontext())
    monkeypatch.setattr(engines, "routing_of", lambda runner: {})
    captured: Any = Graphs.__new__(Graphs)
    engines._build_engine(runner, state, 4, captured)
    assert order == ["backend", "bound", "attached", "captured"]
