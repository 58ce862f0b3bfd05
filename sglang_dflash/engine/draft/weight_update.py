"""Hook on `/update_weights_from_disk` that loads a checkpoint only into the model to which it belongs.

SGLang loads a checkpoint into both target and draft, which have tensors with equal names. If a load fails, SGLang
reloads the same checkpoint, so it cannot restore the old weights. With this hook a DFlash draft's checkpoint is loaded
only into the draft, and any other checkpoint only into the target. A draft that does not fit the served one is rejected
before a tensor changes. If its load fails all the same, the client gets the error, and the server goes on. Answers
depend only on the target. With a new target the old draft still gives exact answers, but its acceptance may change.

Captured graphs read weights in place, so they stay valid for new weights. SGLang's option to capture graphs again
(`recapture_cuda_graph`) is rejected, because SGLang would capture graphs of one width only.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from sglang_dflash.engine.draft import checkpoint
from sglang_dflash.engine.draft.dialects import is_draft
from sglang_dflash.engine.draft.pair import check_borrowed
from sglang_dflash.engine.draft.record import ADDED, RARE, Checkpoint
from sglang_dflash.engine.draft.sglang_model import DFlashDraftModel
from sglang_dflash.engine.draft.weights import NOT_LOADED, QUANTIZED

Update = Callable[..., tuple[bool, str]]
# Fields of a draft that fix how the server is built at its start. A new draft must have equal values.
BUILT = (
    "target_layer_ids", "mask_token_id", "num_hidden_layers", "layer_types", "sliding_window", "hidden_size",
    "intermediate_size", "num_attention_heads", "num_key_value_heads", "head_dim", "rope_parameters", "rms_norm_eps",
    "attention_bias", "sliding_is_causal", "full_is_causal", "norms_features", "gating", "lilicorr", *RARE, *ADDED,
)  # fmt: skip


def own_checkpoint_only(
    served: Checkpoint, *, vocab_size: int, block_size: int, served_is_quantized: bool = False
) -> Callable[..., tuple[bool, str]]:
    """Return a hook around `WeightUpdater.update_weights_from_disk`.

    The hook returns whether the update succeeded, and a sentence for the client.

    Args:
        served: draft with which the server was started.
        vocab_size: size of the target's vocabulary.
        block_size: number of tokens per block on this server.
        served_is_quantized: the served draft was quantized while it loaded.
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
            if served_is_quantized:  # the load would fail, and SGLang's reload would raise the error again
                return False, QUANTIZED
            try:
                new = checkpoint.read(model_path)
                require_like(served, new, vocab_size, block_size)
            except (ValueError, OSError) as error:
                return False, str(error)
            config = updater.get_model().config
            config.packing = new.packing
            config.mask_file = new.mask_file
            try:
                return stock(updater, model_path, *args, **kwargs)
            except NOT_LOADED as error:  # SGLang has loaded the same files twice, with the same error
                return False, (
                    f"the draft in {model_path} was not loaded ({type(error).__name__}: {error}); some weights may be "
                    "replaced: load the served draft again, or restart the server with the new one"
                )
        return stock(updater, model_path, *args, **kwargs)

    return update


def require_like(served: Checkpoint, new: Checkpoint, vocab_size: int, block_size: int) -> None:
    """Check that the new draft has the served draft's values of the fields `BUILT`, and belongs to the same target.

    If the served draft has a tensor with a row per token, also compare `vocab_size`. For a LiLiCorr draft also compare
    `block_size`, which determines shapes. The new draft's blocks must be as long as those of this server, unless the
    served draft was trained for shorter ones.

    Raises:
        ValueError: a value differs, the new draft's blocks are too short, or a target tensor in its files does not fit.
    """
    check_borrowed(new, "that of this server", hidden_size=served.hidden_size, vocab_size=vocab_size)
    if new.n_drafts < min(block_size - 1, served.n_drafts):
        raise ValueError(
            f"{new.path}: block_size is {new.block_size}, and this server drafts blocks of {block_size}; "
            "restart the server with the new draft"
        )
    also = ["vocab_size"] if served.selector_rank or served.gru_hidden_dim else []
    also += ["block_size"] if served.lilicorr else []
    if served.num_target_layers and new.num_target_layers:
        also.append("num_target_layers")
    for name in (*BUILT, *also):
        ours, theirs = vars(served)[name], vars(new)[name]
        if ours != theirs:
            raise ValueError(
                f"{new.path}: {name} is {theirs}, and the draft being served has {ours}; restart the server with the "
                "new draft"
            )
