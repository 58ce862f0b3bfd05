"""Check that the sizes of a draft fit its target."""

from collections.abc import Iterable

from sglang_dflash.engine.draft.record import Checkpoint

ROWS = ("embed_tokens.weight", "lm_head.weight", "verifier_lm_head.weight")  # tensors with one row per token id


def check_pair(
    draft: Checkpoint, target: str, *, hidden_size: int, vocab_size: int, n_layers: int, gives_last: bool = False
) -> None:
    """Check that hidden size, vocabulary and layers of the draft's config fit the target.

    The draft's `vocab_size` is compared only if a tensor of the draft has one row per token id.

    Args:
        draft: fields of the draft.
        target: the target's name in messages.
        hidden_size, vocab_size, n_layers: sizes of the target.
        gives_last: the output of the target's last layer, before the final norm, is available.
    Raises:
        ValueError: the draft was trained for another target.
    """
    path, n_target_layers, last = draft.path, draft.num_target_layers, draft.target_layer_ids[-1]
    other = "give the draft that was trained for this target"
    if draft.hidden_size != hidden_size:
        raise ValueError(
            f"{path}: hidden_size {draft.hidden_size} is not the target's {hidden_size} ({target}); {other}"
        )
    if draft.selector_rank and draft.vocab_size != vocab_size:
        raise ValueError(
            f"{path}: the codebooks of its selector have {draft.vocab_size} rows (config.json: vocab_size), one for "
            f"every token, and the target's vocabulary has {vocab_size} ({target}); {other}"
        )
    if draft.gru_hidden_dim and (draft.vocab_size or 0) < vocab_size:
        raise ValueError(
            f"{path}: its corrections of logits have {draft.vocab_size} rows (config.json: vocab_size), one for every "
            f"token, and the target's vocabulary has {vocab_size} ({target}); {other}"
        )
    check_borrowed(draft, target, hidden_size=hidden_size, vocab_size=vocab_size)
    if draft.mask_token_id >= vocab_size:
        raise ValueError(
            f"{path}: mask_token_id {draft.mask_token_id} is outside the target's vocabulary of {vocab_size}; "
            f"fix config.json or {other}"
        )
    # Layer i's output is captured at the entry of layer i + 1. Only some of SGLang's models also give the last layer's.
    last_given = n_layers - 1 if gives_last else n_layers - 2
    if last > last_given:
        raise ValueError(
            f"{path}: target_layer_ids end at {last}, and a target of {n_layers} layers ({target}) gives features of "
            f"layers 0..{last_given}; {other}"
        )
    if n_target_layers not in (None, n_layers):
        raise ValueError(
            f"{path}: num_target_layers {n_target_layers} is not the target's {n_layers} ({target}); {other}"
        )


def unused(names: Iterable[str]) -> str:
    """Return a sentence for the log about unused tensors in a draft's files."""
    return f"unused tensors: {', '.join(sorted(names))} (DFlash lacks them, or uses the target's)"


def check_borrowed(draft: Checkpoint, target: str, *, hidden_size: int, vocab_size: int) -> None:
    """Check the shapes of target tensors (embedding, heads, norm) that are stored in the draft's files.

    These tensors are not used, but if their shapes differ from the target's, the draft belongs to another target.

    Args:
        draft: fields of the draft.
        target: the target's name in messages.
        hidden_size, vocab_size: sizes of the target.
    Raises:
        ValueError: a shape differs.
    """
    whole = draft.vocab_size or vocab_size
    (n_tokens,) = draft.borrowed.get("d2t", (whole,))
    if n_tokens != whole:
        raise ValueError(
            f"{draft.path}: d2t has {n_tokens} entries for a vocabulary of {whole}, and config.json has no "
            f"draft_vocab_size; set draft_vocab_size to {n_tokens} if the draft was trained with it"
        )
    rows = dict.fromkeys(ROWS, (vocab_size, hidden_size))
    if draft.draft_vocab_size:
        rows["lm_head.weight"] = draft.draft_vocab_size, hidden_size
    for name, shape in (rows | {"verifier_norm.weight": (hidden_size,)}).items():
        found = draft.borrowed.get(name, shape)
        if found != shape:
            raise ValueError(
                f"{draft.path}: {name} has shape {list(found)}, not the target's "
                f"{list(shape)} ({target}); give the draft that was trained for this target"
            )
