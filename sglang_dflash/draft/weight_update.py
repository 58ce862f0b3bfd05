"""Hook on `/update_weights_from_disk`, which loads a checkpoint only into the model that it belongs to.

SGLang loads a checkpoint into all models, but target and draft have tensors with equal names, and a failed load is
rolled back from the checkpoint that failed. So a DFlash draft's checkpoint is loaded only into the draft, any other
only into the target. A draft unlike the served one is rejected before a tensor changes. Answers depend only on the
target: with a new target the old draft remains exact, but its acceptance may change.

Graphs read weights in place, so new weights need no new graphs. SGLang's option to capture again is rejected, because
it would cover only one width.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from sglang_dflash.draft import checkpoint
from sglang_dflash.draft import files as draft_files
from sglang_dflash.draft.dialects import names_draft
from sglang_dflash.draft.pair import check_borrowed
from sglang_dflash.draft.record import SECOND, Checkpoint
from sglang_dflash.draft.sglang_model import DFlashDraftModel

Update = Callable[..., tuple[bool, str]]
# Fields that are fixed at server start, so a new draft must have equal ones.
BUILT = (
    "target_layer_ids", "mask_token_id", "num_hidden_layers", "layer_types", "sliding_window", "hidden_size",
    "intermediate_size", "num_attention_heads", "num_key_value_heads", "head_dim", "rope_parameters", "rms_norm_eps",
    "attention_bias", "sliding_is_causal", *SECOND,
)  # fmt: skip


def own_checkpoint_only(served: Checkpoint, vocab_size: int) -> Callable[..., tuple[bool, str]]:
    """Return a hook that updates one model. AROUND `WeightUpdater.update_weights_from_disk`.

    The hook returns success and a sentence.

    Args:
        served: draft with which the server was started.
        vocab_size: size of the target's vocabulary.
    """

    def update(
        stock: Update, updater: Any, model_path: str, *args: Any, recapture_cuda_graph: bool = False, **kwargs: Any
    ) -> tuple[bool, str]:
        if recapture_cuda_graph:
            return False, "recapture_cuda_graph is not supported with DFLASH; leave it out: weights are loaded in place"
        for_draft = isinstance(updater.get_model(), DFlashDraftModel)
        if for_draft and not is_draft(model_path):
            return True, f"Succeeded to update the target; the draft stays: {model_path} is not a DFlash draft."
        if is_draft(model_path) and not for_draft:
            return True, f"The target stays: {model_path} is a DFlash draft."
        if for_draft:
            try:
                require_like(served, checkpoint.read(model_path), vocab_size)
            except ValueError as error:
                return False, str(error)
        return stock(updater, model_path, *args, **kwargs)

    return update


def is_draft(path: str) -> bool:
    """Return whether the checkpoint's config names a draft; False without a config."""
    try:
        config = draft_files.read_config(path, None)
    except ValueError:
        return False
    return names_draft(config)


def require_like(served: Checkpoint, new: Checkpoint, vocab_size: int) -> None:
    """Check that the new draft fits the parts that were built for the served one, or raise ValueError."""
    check_borrowed(new, "that of this server", hidden_size=served.hidden_size, vocab_size=vocab_size)
    for name in (*BUILT, *(["vocab_size"] if served.selector_rank else [])):
        ours, theirs = vars(served)[name], vars(new)[name]
        if ours != theirs:
            raise ValueError(f"{new.path}: {name} is {theirs}, and the draft being served has {ours}; restart with it")
