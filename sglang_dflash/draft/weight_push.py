"""Tensors that a trainer pushes while serving: over `/update_weights_from_tensor`, a process group, or IPC.

SGLang hands them to every model that the request's selector names, and to all of them if it names none. Some names are
the target's and the draft's, so such a push would overwrite the draft. Here it goes to the target alone; tensors of
the draft are pushed with `"selector": "draft"`.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import msgspec

from sglang_dflash.draft.sglang_model import DFlashDraftModel

Outcome = tuple[bool, str]
# Errors of SGLang's models for a name or a shape that they do not have.
NOT_LOADED = (ValueError, KeyError, RuntimeError, AssertionError)


def to_target_unless_named(stock: Callable[..., Any], manager: Any, request: Any) -> Any:
    """AROUND a push of `SchedulerWeightUpdaterManager`: without a selector it is for the target alone."""
    if request.selector == "all":
        request = msgspec.structs.replace(request, selector="target")
    return stock(manager, request)


def refuse_unknown(stock: Callable[..., Outcome], updater: Any, *args: Any, **kwargs: Any) -> Outcome:
    """AROUND `WeightUpdater.update_weights_from_tensor`: what cannot be loaded fails the push, not the server."""
    try:
        return stock(updater, *args, **kwargs)
    except NOT_LOADED as error:
        for_draft = isinstance(updater.get_model(), DFlashDraftModel)
        model, other = ("draft", "target") if for_draft else ("target", "draft")
        return False, (
            f"the {model} cannot take these tensors ({type(error).__name__}: {error}); push the {other}'s with "
            f'"selector": "{other}", and the {model}\'s again: some of its weights may be new'
        )


def draft_stays(stock: Callable[..., Outcome], updater: Any, request: Any) -> Outcome:
    """AROUND `WeightUpdater.update_weights_from_ipc`, which has no selector: what comes is for the target alone."""
    if isinstance(updater.get_model(), DFlashDraftModel):
        return True, "Succeeded to update the target; the draft stays: IPC carries the target's tensors."
    return stock(updater, request)
