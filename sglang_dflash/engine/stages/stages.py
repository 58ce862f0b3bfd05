"""Stages of a decode step as one tuple, built when the server starts. `DFlashWorker.decode` calls them."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any, NamedTuple, TypeVar

import torch
from sglang_dflash_kernels.accept import Accepted

from sglang_dflash.engine.stages.choice import Choice
from sglang_dflash.engine.stages.context_kv import ContextKV
from sglang_dflash.engine.stages.copier import Copier
from sglang_dflash.engine.stages.drafter import Drafter
from sglang_dflash.engine.stages.planner import Planner
from sglang_dflash.engine.stages.verifier import Verifier

Accept = Callable[[torch.Tensor, torch.Tensor, torch.Tensor, int], Accepted]
Stage = TypeVar("Stage")


class Stages(NamedTuple):
    """Stages of a decode step."""

    planner: Planner
    drafter: Drafter
    verifier: Verifier
    choice: Choice
    accept: Accept
    context_kv: ContextKV
    copier: Copier


def with_methods(stage: Stage, **methods: Callable[..., Any]) -> Stage:
    """Return a shallow copy of `stage` with some methods replaced, for measurements.

    Without measurements a server has no wrappers around methods. A stage's attributes are not assigned after start-up,
    so copy and original keep sharing all state.
    """
    twin = copy.copy(stage)
    vars(twin).update(methods)
    return twin
