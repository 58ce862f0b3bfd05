"""A draft against its target, as the sizes of both say it."""

from sglang_dflash.draft.record import Checkpoint


def check_pair(draft: Checkpoint, target: str, *, hidden_size: int, vocab_size: int, n_layers: int) -> None:
    """Check that the draft was trained on features, vocabulary and layers like this target's.

    Args:
        target: its name in messages; the rest is its.
    Raises:
        ValueError: it was not.
    """
    path, n_target_layers, last = draft.path, draft.num_target_layers, draft.target_layer_ids[-1]
    other = "give the draft that was trained for this target"
    if draft.hidden_size != hidden_size:
        raise ValueError(
            f"{path}: hidden_size {draft.hidden_size} is not the target's {hidden_size} ({target}); {other}"
        )
    if draft.vocab_size not in (None, vocab_size):
        raise ValueError(f"{path}: vocab_size {draft.vocab_size} is not the target's {vocab_size} ({target}); {other}")
    if draft.mask_token_id >= vocab_size:
        raise ValueError(
            f"{path}: mask_token_id {draft.mask_token_id} is outside the target's vocabulary of {vocab_size}; "
            f"mend config.json or {other}"
        )
    # The output of layer i is captured at the entry of layer i + 1, so the last layer's cannot be.
    if last >= n_layers - 1:
        raise ValueError(
            f"{path}: target_layer_ids end at {last}, and a target of {n_layers} layers ({target}) gives features of "
            f"layers 0..{n_layers - 2}; {other}"
        )
    if n_target_layers not in (None, n_layers):
        raise ValueError(
            f"{path}: num_target_layers {n_target_layers} is not the target's {n_layers} ({target}); {other}"
        )
