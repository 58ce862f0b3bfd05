"""Hooks on weights that a trainer pushes to a running server: `/update_weights_from_tensor`, process group, or IPC.

SGLang loads pushed tensors into the models that the request's selector names. By default the selector is "all". Some
tensor names exist in both target and draft, so a push to all models would overwrite the draft. These hooks restrict
such a push to the target. Tensors of the draft are pushed with `"selector": "draft"`.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import msgspec
import torch
from sglang.srt.managers.io_struct import BeginWeightUpdateReqOutput

from sglang_dflash.engine.draft.sglang_model import DFlashDraftModel
from sglang_dflash.engine.draft.weights import NOT_LOADED, QUANTIZED

Outcome = tuple[bool, str]


def to_target_unless_named(stock: Callable[..., Any], manager: Any, request: Any) -> Any:
    """Restrict a push with the selector "all" to the target.

    Hook around `update_weights_from_tensor` and `update_weights_from_distributed` of `SchedulerWeightUpdaterManager`.
    """
    if request.selector == "all":
        request = msgspec.structs.replace(request, selector="target")
    return stock(manager, request)


def quantized_draft_stays(stock: Callable[..., Any], manager: Any, request: Any) -> Any:
    """Refuse an update of the draft, and restrict an update of all models to the target.

    At the end of an update SGLang quantizes the updated models, but the draft is quantized already.

    Hook around `SchedulerWeightUpdaterManager.begin_weight_update`, set for a quantized draft.
    """
    if request.selector == "draft":
        return BeginWeightUpdateReqOutput(success=False, message=QUANTIZED)
    return to_target_unless_named(stock, manager, request)


def refuse_unknown(stock: Callable[..., Outcome], updater: Any, *args: Any, **kwargs: Any) -> Outcome:
    """Return a failure, instead of raising an error, if a pushed tensor does not fit.

    Hook around `WeightUpdater.update_weights_from_tensor`.
    """
    try:
        return stock(updater, *args, **kwargs)
    except NOT_LOADED as error:
        for_draft = isinstance(updater.get_model(), DFlashDraftModel)
        if str(error) == QUANTIZED:
            return False, QUANTIZED
        if isinstance(error, NotImplementedError | torch.OutOfMemoryError):
            return False, str(error)
        model, other = ("draft", "target") if for_draft else ("target", "draft")
        return False, (
            f"the {model} cannot take these tensors ({type(error).__name__}: {error}); push the {other}'s with "
            f'"selector": "{other}", correct others, and push the {model}\'s again: some weights may be replaced'
        )


def draft_stays(stock: Callable[..., Outcome], updater: Any, request: Any) -> Outcome:
    """Update only the target, because IPC has no selector. Hook around `WeightUpdater.update_weights_from_ipc`."""
    if isinstance(updater.get_model(), DFlashDraftModel):
        return True, "Succeeded to update the target; the draft stays: IPC carries the target's tensors."
    return stock(updater, request)
