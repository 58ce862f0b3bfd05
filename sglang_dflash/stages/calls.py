"""The stages of a step, made once when the server starts, and what a step calls of them."""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import torch
from sglang_dflash_kernels.accept import Accepted

from sglang_dflash.stages.choice import Choice
from sglang_dflash.stages.context_kv import ContextKV
from sglang_dflash.stages.copier import Copier
from sglang_dflash.stages.drafter import Drafter
from sglang_dflash.stages.planner import Planner
from sglang_dflash.stages.verifier import Verifier
from sglang_dflash.step import Plan, Target

Accept = Callable[[torch.Tensor, torch.Tensor, torch.Tensor], Accepted]


class Stages(NamedTuple):
    planner: Planner
    drafter: Drafter
    verifier: Verifier
    choice: Choice
    accept: Accept
    context_kv: ContextKV
    copier: Copier

    def calls(self) -> Calls:
        return Calls(
            plan=self.planner.plan,
            draft=self.drafter.draft,
            copy=self.copier.copy,
            verify=self.verifier.verify,
            choose=self.choice.choose,
            accept=self.accept,
            weigh=self.copier.weigh,
            commit=self.verifier.commit,
            append=self.context_kv.append,
        )


class Calls(NamedTuple):
    """What a step calls, in its order. What measures steps puts other calls in their place; a server
    that is not measured runs these."""

    plan: Callable[..., Plan]
    draft: Callable[..., torch.Tensor]
    copy: Callable[[Plan, torch.Tensor], torch.Tensor]
    verify: Callable[..., Target]
    choose: Callable[..., torch.Tensor]
    accept: Accept
    weigh: Callable[[Accepted], None]
    commit: Callable[..., None]
    append: Callable[..., None]
