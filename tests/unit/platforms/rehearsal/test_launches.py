"""The GPU emulation must count launches outside graphs, refuse steps over budget, and parse log lines of ranks."""

from collections import Counter
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from sglang_dflash.engine.stages import budget
from sglang_dflash.platforms.rehearsal import graph, launches, watch
from sglang_dflash.platforms.rehearsal.exchange import STEP_LINE, steps_in
from sglang_dflash.platforms.rehearsal.launches import OverBudget, allowed, counted, held, require, with_launches
from sglang_dflash.platforms.rehearsal.watch import Watch


def n_launched(run: Any) -> int:
    with torch.inference_mode(), Watch():
        before = watch.n_launched()
        run()
        return watch.n_launched() - before


def test_views_and_allocations_are_no_launches() -> None:
    x_BH = torch.ones(4, 6)
    assert n_launched(lambda: x_BH.view(2, 12)[:, 1:].T.expand(11, 2)) == 0
    assert n_launched(lambda: torch.empty_like(x_BH)) == 0


def test_composite_operation_counts_its_parts() -> None:
    """`flatten` copies a strided block: one launch before the product. A linear layer with a bias is one launch."""
    hidden_BDH, weight_VH, bias_V = torch.ones(3, 4, 6)[:, 1:], torch.ones(5, 6), torch.ones(5)
    assert n_launched(lambda: hidden_BDH.flatten(0, 1) @ weight_VH.T) == 2
    # `torch.ones` is the other launch.
    assert n_launched(lambda: torch.nn.functional.linear(torch.ones(2, 6)[:1], weight_VH, bias_V)) == 2


def test_a_kernel_counts_once() -> None:
    kernel = graph.launch(lambda x: (x + 1).relu().sum())
    assert n_launched(lambda: kernel(torch.ones(4))) == 2  # `torch.ones` is the other launch


def test_one_launch_over_budget_is_refused() -> None:
    step = Counter({stage: row.emulated for stage, row in budget.LAUNCHES.items()})
    require(step, allowed(ring=False))
    step["commit"] += 1
    with pytest.raises(OverBudget, match=r"commit 5 \(at most 4\); see stages/budget\.py"):
        require(step, allowed(ring=False))
    step["commit"] -= 1
    step["draft"] += budget.RING["draft"]
    require(step, allowed(ring=True))
    with pytest.raises(OverBudget, match=r"draft 33 \(at most 13\)"):
        require(step, allowed(ring=False))
    require(step, allowed(ring=True, planned={"draft": 19}))


def test_the_largest_number_of_launches_of_all_steps_is_reported(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(launches, "most", Counter())
    for n in (2, 4, 3):
        require(Counter(commit=n), allowed(ring=False))
    assert with_launches(lambda: {"version": "0"})() == {"version": "0", "launches": {"commit": 4}}


@pytest.mark.parametrize("greedy", [True, False], ids=["greedy", "sampled"])
def test_only_plain_greedy_steps_have_a_budget(greedy: bool) -> None:
    """The stage `choose` launches twice, once more than its budget. This is refused only in a greedy step."""
    choose = counted("choose", lambda: torch.ones(4).sum())
    nothing = dict.fromkeys(("logit_bias", "sampling_mask_batch_indices", "penalizer_orchestrator"))
    sampling = SimpleNamespace(is_all_greedy=greedy, has_custom_logit_processor=False, **nothing)
    asked = dict.fromkeys(("return_logprob", "return_hidden_states", "has_grammar"), False)
    batch = SimpleNamespace(sampling_info=sampling, **asked)

    def decode(batch: Any, publish: str, barrier: str) -> SimpleNamespace:
        assert (publish, barrier) == ("publish", "barrier")
        choose()
        return SimpleNamespace(can_run_cuda_graph=True)

    config = SimpleNamespace(
        draft_window=None,
        draft=SimpleNamespace(norms_features=False, lilicorr=None, sliding_window=None),
        draft_attention_backend="fa3",
    )
    worker = SimpleNamespace(config=config, target_runner=SimpleNamespace(decode_attention_backend_str="fa3"))
    with torch.inference_mode(), Watch():
        if greedy:
            with pytest.raises(OverBudget, match=r"choose 2 \(at most 1\)"):
                held(worker, decode)(batch, "publish", "barrier")
        else:
            held(worker, decode)(batch, "publish", "barrier")
    assert launches._step["choose"] == 2


def test_interleaved_lines_of_two_ranks_are_parsed() -> None:
    steps = '{"rows": 16, "broadcast_": 16}', '{"rows": 4}', '{"rows": 1}'
    log = "ready\n{0}{1}{0}{2}\n\nINFO: {0}{3}\nend".format(STEP_LINE, *steps)
    assert steps_in(log) == [{"rows": 16, "broadcast_": 16}, {"rows": 4}, {"rows": 1}]
