"""Launches of a decode step by stage, checked against the budget of `engine/stages/budget.py`. A replay is one launch.

Launches are counted only with the option `streams`, which separates host operations from device operations. A step is
checked only if it replays graphs and all its requests are plain greedy ones (`is_plain`). For other requests, e.g. with
sampling or a grammar, SGLang's code launches more kernels.
"""

from __future__ import annotations

import functools
from collections import Counter
from collections.abc import Callable, Mapping
from operator import attrgetter
from typing import Any

from sglang_dflash.engine.stages import budget
from sglang_dflash.platforms.rehearsal import watch

_step: Counter[str] = Counter()  # number of launches of the current step, by stage
most: Counter[str] = Counter()  # by stage, the largest number of launches in a checked step


class OverBudget(RuntimeError):
    """Error for a decode step that launches more than its budget."""


def install() -> None:
    """Count launches by stage from now on. Call this before stages are created."""
    from sglang_dflash.engine.stages.choice import Choice
    from sglang_dflash.engine.stages.context_kv import ContextKV
    from sglang_dflash.engine.stages.copier import TextCopies
    from sglang_dflash.engine.stages.drafter import Drafter
    from sglang_dflash.engine.stages.planner import Planner
    from sglang_dflash.engine.stages.verifier import Verifier

    methods = {
        "plan": (Planner, "plan"),
        "catch_up": (ContextKV, "before_draft"),
        "draft": (Drafter, "draft"),
        "copy": (TextCopies, "copy"),
        "verify": (Verifier, "verify"),
        "choose": (Choice, "choose"),
        "count": (Choice, "count_tokens"),
        "weigh": (TextCopies, "weigh"),
        "commit": (Verifier, "commit"),
        "append": (ContextKV, "append"),
    }
    for stage, (owner, name) in methods.items():
        setattr(owner, name, counted(stage, attrgetter(name)(owner)))


def hold(worker: Any) -> None:
    """Check the steps of this DFLASH worker against the budget."""
    worker.step_result = counted("result", worker.step_result)
    worker.decode = held(worker, worker.decode)
    worker.describe = with_launches(worker.describe)


def counted(stage: str, method: Callable[..., Any]) -> Callable[..., Any]:
    """Wrap a stage's method so that its launches count for `stage`."""

    @functools.wraps(method)
    def run(*args: Any, **kwargs: Any) -> Any:
        before = watch.n_launched()
        out = method(*args, **kwargs)
        _step[stage] += watch.n_launched() - before
        return out

    return run


def held(worker: Any, decode: Callable[..., Any]) -> Callable[..., Any]:
    """Wrap a worker's `decode` to check the launches of each step that the budget covers.

    If a stage exceeds its budget, the wrapper raises OverBudget, with the launches and limits of such stages.
    """

    @functools.wraps(decode)
    def decode_within_budget(batch: Any, *args: Any) -> Any:
        _step.clear()
        before = watch.n_launched()
        out = decode(batch, *args)
        _step["others"] = watch.n_launched() - before - _step.total()
        if out.can_run_cuda_graph and is_plain(batch):
            require(_step, allowed_of(worker))
        return out

    return decode_within_budget


def is_plain(batch: Any) -> bool:
    """Return whether all requests are greedy and need only tokens, chosen by the target's unchanged logits."""
    info = batch.sampling_info
    penalised = info.penalizer_orchestrator is not None and info.penalizer_orchestrator.is_required
    edits = info.logit_bias is not None or info.has_custom_logit_processor or penalised
    returns = batch.return_logprob or batch.return_hidden_states or info.sampling_mask_batch_indices is not None
    return info.is_all_greedy and not (edits or returns or batch.has_grammar)


def allowed_of(worker: Any) -> dict[str, int]:
    """Return the largest allowed number of emulated launches in a worker's decode step, by stage."""
    draft, backend = worker.config.draft, worker.config.draft_attention_backend
    backends = {"draft": backend, "verify": worker.target_runner.decode_attention_backend_str}
    most = allowed(
        ring=worker.config.draft_window is not None,
        norms=draft.norms_features,
        last=draft.lilicorr is not None,
        planned={stage: budget.PLANS.get(name, 0) for stage, name in backends.items()},
    )
    if draft.sliding_window is not None:
        most["draft"] += budget.WINDOWS.get(backend, 0)
    return most


def allowed(
    *, ring: bool, norms: bool = False, last: bool = False, planned: Mapping[str, int] | None = None
) -> dict[str, int]:
    """Return the largest allowed number of emulated launches in a decode step, by stage.

    Args:
        ring: the draft has a ring buffer.
        norms: the draft norms captured layers and each layer's context.
        last: the draft keeps the context of each request's last token.
        planned: further launches with which an attention backend plans the forward of a stage.
    """
    planned = planned or {}
    return {
        stage: row.emulated
        + (budget.RING.get(stage, 0) if ring else 0)
        + (budget.NORMS.get(stage, 0) if norms else 0)
        + (budget.LAST.get(stage, 0) if last else 0)
        + planned.get(stage, 0)
        for stage, row in budget.LAUNCHES.items()
    }


def require(step: Counter[str], allowed: Mapping[str, int]) -> None:
    """Update `most`. Raise OverBudget if a stage of the step has more launches than `allowed`."""
    for stage, n in step.items():
        most[stage] = max(most[stage], n)
    if over := [f"{stage} {n} (at most {allowed[stage]})" for stage, n in step.items() if n > allowed[stage]]:
        raise OverBudget(f"a decode step launches more than its budget: {', '.join(over)}; see stages/budget.py")


def with_launches(describe: Callable[..., dict[str, Any]]) -> Callable[..., dict[str, Any]]:
    """Wrap a worker's `describe` so that `GET /server_info` also returns `launches` (see `most`)."""

    @functools.wraps(describe)
    def describe_with_launches() -> dict[str, Any]:
        return describe() | {"launches": dict(most)}

    return describe_with_launches
