"""Tensors of a draft: the names and shapes that its config implies, and a check of its files against them."""

from collections.abc import Callable, Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any, TypeVar

from sglang_dflash.engine.draft import files as draft_files
from sglang_dflash.engine.draft import lilicorr_fields
from sglang_dflash.engine.draft.mask_row import MASK_ROW
from sglang_dflash.engine.draft.record import Checkpoint
from sglang_dflash.engine.draft.variants import GIVE
from sglang_dflash.errors import NotSupported

Shapes = dict[str, tuple[int, ...]]
Value = TypeVar("Value")
CODEBOOK = "_codebook"  # suffix of the name of a DFlash 2 matrix with one row per token of the vocabulary


def expected_shapes(checkpoint: Checkpoint) -> dict[str, tuple[int, ...]]:
    """Return the shapes of all tensors that a draft with these fields has, by name."""
    hidden, inner = checkpoint.hidden_size, checkpoint.intermediate_size
    shapes: dict[str, tuple[int, ...]] = {
        "fc.weight": (hidden, checkpoint.feature_size),
        "hidden_norm.weight": (hidden,),
        "norm.weight": (hidden,),
    }
    layer = {
        "input_layernorm.weight": (hidden,),
        "post_attention_layernorm.weight": (hidden,),
        **{f"self_attn.{name}": shape for name, shape in _attention_shapes(checkpoint).items()},
        "mlp.gate_proj.weight": (inner, hidden),
        "mlp.up_proj.weight": (inner, hidden),
        "mlp.down_proj.weight": (hidden, inner),
    }
    if checkpoint.has_embed_tokens:
        shapes["embed_tokens.weight"] = (checkpoint.vocab_size or 0, hidden)
    if checkpoint.norms_features:
        shapes |= {f"aux_hidden_norms.{i}.weight": (hidden,) for i in range(len(checkpoint.target_layer_ids))}
    if state := checkpoint.gru_hidden_dim:
        shapes["domino.prefix_gru.weight_ih_l0"] = (3 * state, hidden)
        shapes["domino.prefix_gru.weight_hh_l0"] = (3 * state, state)
        shapes["domino.embed_proj.0.weight"] = (checkpoint.emb_dim, hidden + state)
        shapes["domino.embed_proj.2.weight"] = (checkpoint.vocab_size or 0, checkpoint.emb_dim)
    if checkpoint.lilicorr:
        shapes |= lilicorr_fields.shapes(checkpoint.lilicorr, hidden, checkpoint.block_size)
    if checkpoint.draft_vocab_size:
        shapes["d2t"] = (checkpoint.draft_vocab_size,)
    if taps := checkpoint.conv_kernel_size:
        n_groups = hidden // checkpoint.conv_group_size
        for conv in ("attention_conv", "mlp_conv"):
            layer[f"{conv}.base_kernel"] = (2, taps, hidden)  # before and after the sublayer
            layer[f"{conv}.kernel_projection.weight"] = (2 * taps * n_groups, hidden)
    if rank := checkpoint.selector_rank:
        n_vocab = checkpoint.vocab_size or 0
        shapes |= {f"candidate_selector.{side}{CODEBOOK}": (n_vocab, rank) for side in ("predecessor", "successor")}
        shapes["candidate_selector.hidden_projection.weight"] = (rank, hidden)
    for i in range(checkpoint.num_hidden_layers):
        shapes |= {f"layers.{i}.{name}": shape for name, shape in layer.items()}
    return shapes


def _attention_shapes(checkpoint: Checkpoint) -> Shapes:
    """Return the shapes of the tensors of one layer's attention."""
    hidden, n_heads, head_dim = checkpoint.hidden_size, checkpoint.num_attention_heads, checkpoint.head_dim
    q, kv = n_heads * head_dim, checkpoint.num_key_value_heads * head_dim
    sizes = {"q": (q, hidden), "k": (kv, hidden), "v": (kv, hidden), "o": (hidden, q)}
    shapes: Shapes = {f"{name}_proj.weight": size for name, size in sizes.items()}
    shapes |= {"q_norm.weight": (head_dim,), "k_norm.weight": (head_dim,)}
    if checkpoint.attention_bias:
        shapes |= {f"{name}_proj.bias": (n_rows,) for name, (n_rows, _) in sizes.items()}
    if checkpoint.gating:
        shapes["g_proj.weight"] = (n_heads if checkpoint.gating == "per-head" else q, hidden)
    if checkpoint.attention_sink_bias:
        shapes["attention_sink_bias"] = (n_heads,)
    return shapes


def tensors_of(
    checkpoint: Checkpoint,
    folder: Path,
    read: Callable[[Path], Mapping[str, Value]],
    unpack: Callable[[Iterable[tuple[str, Value]]], Iterable[tuple[str, Value]]] = iter,
) -> dict[str, Value]:
    """Return a directory's tensors in the form and by the names of `expected_shapes`. Unused tensors are left out.

    Args:
        read: a framework's reader of a safetensors file.
        unpack: conversion of quantized weights, see `packed.unpacked`.
    Raises:
        ValueError, NotSupported: see `files.weight_files` and `files.own_names`.
    """
    stored = draft_files.own_names((str(file), read(file)) for file in draft_files.weight_files(folder))
    names = expected_shapes(checkpoint).keys() - {"embed_tokens.weight"} | {MASK_ROW}
    return {name: tensor for name, tensor in apart(checkpoint, unpack(stored.items())) if name in names}


def apart(checkpoint: Checkpoint, tensors: Iterable[tuple[str, Value]]) -> Iterator[tuple[str, Value]]:
    """Yield the tensors in z-lab's form, and the mask token's row of an embedding as `MASK_ROW`.

    Tensors that a file stores fused (`qkv_proj`, `gate_up_proj`) are taken apart by rows. Norms and rotated heads are
    converted.
    """
    for name, tensor in tensors:
        if checkpoint.has_embed_tokens and name == "embed_tokens.weight":
            yield MASK_ROW, tensor[checkpoint.mask_token_id]  # type: ignore[index]
            continue
        first = 0
        for part, n_rows in _parts(checkpoint, name):
            rows: Any = tensor[first : first + n_rows] if n_rows else tensor  # type: ignore[index]
            yield part, converted(checkpoint, part, rows)
            first += n_rows


def converted(checkpoint: Checkpoint, name: str, tensor: Any) -> Any:
    """Return a tensor in z-lab's form: a norm's whole weight, and the dimensions of heads in the order of neox pairs.

    Queries and keys are reordered alike, so attention scores do not change. If only the first dimensions of a head are
    rotated, they are split in two. Each part moves to the beginning of one half of the head, see `rotary.PartRotary`.
    The output projection is multiplied by the scale of the values, so a step need not apply it.
    """
    if name.startswith(lilicorr_fields.HEAD):
        return tensor
    if checkpoint.attention_value_scale != 1.0 and name.endswith("o_proj.weight"):
        return tensor * checkpoint.attention_value_scale
    if checkpoint.use_gemma_norm and name.endswith("norm.weight"):
        tensor = tensor + 1  # the norms of q and k are also reordered
    if not checkpoint.rope_is_neox_style and (".q_" in name or ".k_" in name):
        heads = tensor.reshape(-1, checkpoint.head_dim // 2, 2, *tensor.shape[1:])
        return heads.swapaxes(1, 2).reshape(tensor.shape)
    whole, rotated = checkpoint.head_dim, checkpoint.rotary_width
    if rotated < whole and (".q_" in name or ".k_" in name):
        middle = (rotated + whole) // 2
        halves = (range(rotated // 2), range(rotated, middle)), (range(rotated // 2, rotated), range(middle, whole))
        order = [i for half in halves for part in half for i in part]
        return tensor.reshape(-1, whole, *tensor.shape[1:])[:, order].reshape(tensor.shape)
    return tensor


def apart_shapes(checkpoint: Checkpoint, found: Shapes) -> Shapes:
    """Return the shapes of tensors that are stored fused as shapes of their parts.

    Raises:
        ValueError: a fused tensor has too few or too many rows.
    """
    shapes: Shapes = {}
    for name, shape in found.items():
        parts = _parts(checkpoint, name)
        n_rows = sum(n for _, n in parts)
        if n_rows and shape[:1] != (n_rows,):
            raise ValueError(
                f"{checkpoint.path}: {name} has shape {list(shape)}, config.json implies {n_rows} rows; correct "
                "config.json if it does not describe these files, else fetch the draft again"
            )
        shapes |= {part: (n, *shape[1:]) if n else shape for part, n in parts}
    return shapes


def _parts(checkpoint: Checkpoint, name: str) -> list[tuple[str, int]]:
    """Return names and numbers of rows of the parts of a fused tensor; else the name itself and 0."""
    kv = checkpoint.num_key_value_heads * checkpoint.head_dim
    q, inner = checkpoint.num_attention_heads * checkpoint.head_dim, checkpoint.intermediate_size
    fused = {"qkv_proj": {"q_proj": q, "k_proj": kv, "v_proj": kv}}
    fused["gate_up_proj"] = {"gate_proj": inner, "up_proj": inner}
    for whole, parts in fused.items():
        if f".{whole}." in name:
            return [(name.replace(whole, part), n_rows) for part, n_rows in parts.items()]
    return [(name, 0)]


def check_tensors(checkpoint: Checkpoint, found: Mapping[str, tuple[int, ...]]) -> None:
    """Check that the draft's files contain exactly the tensors that its config implies.

    Args:
        checkpoint: fields of the config.
        found: shapes of the tensors in the files by name (see `packed.plain_shapes`), without the tensors that the
            draft does not use.
    Raises:
        ValueError: a tensor is missing or has another shape.
        NotSupported: there is a tensor that DFlash does not have.
    """
    path, expected = checkpoint.path, expected_shapes(checkpoint)
    missing, extra = sorted(set(expected) - set(found)), sorted(set(found) - set(expected))
    if prefixed := [name for name in extra if missing and name.endswith(f".{missing[0]}")]:
        raise ValueError(
            f"{path}: {missing[0]} is stored as {prefixed[0]}; save the draft without the prefix "
            f"{prefixed[0].removesuffix(missing[0])!r} of its tensors' names"
        )
    if missing:
        raise ValueError(
            f"{path}: {len(missing)} of {len(expected)} tensors are missing, the first is {missing[0]}; "
            "correct config.json if it does not describe these files, else fetch the draft again"
        )
    if extra:
        raise NotSupported(
            f"{path}: {len(extra)} tensors are not part of a DFlash draft, the first is {extra[0]}; "
            f"correct config.json if it does not describe these files, else {GIVE}"
        )
    for name, shape in expected.items():
        if found[name] != shape and name.endswith(CODEBOOK):
            raise ValueError(
                f"{path}: {name} has shape {list(found[name])}, and config.json has vocab_size "
                f"{checkpoint.vocab_size} and selector_rank {checkpoint.selector_rank}: a codebook has a row for every "
                "token of the vocabulary; fix config.json or fetch the draft again"
            )
        if found[name] != shape:
            raise ValueError(
                f"{path}: {name} has shape {list(found[name])}, config.json implies {list(shape)}; "
                "correct config.json if it does not describe these files, else fetch the draft again"
            )
