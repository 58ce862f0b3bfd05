"""Sizes of a draft: those that it takes from its target, and those of DFlash 2 and Domino."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True)
class Second:
    """Sizes of a DFlash 2 draft, named as in config.json. The defaults are those of z-lab's published drafts."""

    conv_kernel_size: int = 2
    conv_group_size: int = 16
    selector_rank: int = 256
    selector_top_k: int = 16


@dataclass(frozen=True)
class Rollout:
    """Sizes of Domino's rollout, named as in config.json. The defaults are those of SpecForge's drafts."""

    gru_hidden_dim: int = 1024
    emb_dim: int = 256


def feature_layers(asked: tuple[int, ...] | None, n_layers: int, n_target: int) -> tuple[int, ...]:
    """Return the target layers that give features: `asked`, or one per draft layer, spread over all but the last.

    Raises:
        ValueError: `asked` is not an ascending list of such layers.
    """
    last = n_target - 2
    ids = asked or tuple(sorted({round((i + 1) * last / n_layers) for i in range(n_layers)}))
    if list(ids) != sorted(set(ids)) or ids[-1] > last:
        raise ValueError(
            f"--target-layer-ids {','.join(map(str, ids))} is not an ascending list within 0..{last}, the layers of a "
            f"target of {n_target} that give features; change or drop it"
        )
    return ids


def intermediate_size(fields: Mapping[str, Any]) -> int:
    """Return the draft's intermediate size: the target's, or 3 times the hidden size if all target layers have experts.

    z-lab's drafts of Qwen3.5's mixture-of-experts targets also use 3 times the hidden size.
    """
    return fields.get("intermediate_size") or 3 * fields["hidden_size"]


def check_target(fields: Mapping[str, Any], second: Second | None, draft_vocab_size: int | None = None) -> None:
    """Check that a draft can have the sizes of a target, the fields of its text config.

    Raises:
        ValueError: the target lacks a size, has one layer, or contradicts the sizes of the draft.
    """
    needed = ("num_attention_heads", "num_key_value_heads", "rms_norm_eps")
    if lacking := [name for name in needed if fields.get(name) is None]:
        raise ValueError(f"the target's config has no {lacking[0]}, which the draft would copy; give another target")
    if fields["num_hidden_layers"] < 2:
        raise ValueError("the target has one layer, and a draft reads layers before the last; give a deeper target")
    hidden_size, vocab_size = fields["hidden_size"], fields["vocab_size"]
    if second and hidden_size % second.conv_group_size:
        raise ValueError(
            f"--conv-group-size {second.conv_group_size} does not divide the target's hidden size {hidden_size}; "
            "give a divisor"
        )
    if (draft_vocab_size or 0) > vocab_size:
        raise ValueError(
            f"--draft-vocab-size {draft_vocab_size} exceeds the target's vocabulary of {vocab_size}; give less"
        )
    if second and second.selector_top_k > vocab_size:
        raise ValueError(
            f"--selector-top-k {second.selector_top_k} exceeds the target's vocabulary of {vocab_size}; give less"
        )
