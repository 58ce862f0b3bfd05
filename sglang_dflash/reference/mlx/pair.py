"""Loader of an mlx-lm target and its draft, with a check that the two match."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple

import mlx.core as mx
import mlx.nn as nn
import mlx_lm
from huggingface_hub import hf_hub_download
from mlx_lm.tokenizer_utils import TokenizerWrapper

from sglang_dflash.engine.draft import checkpoint, files, tensors
from sglang_dflash.engine.draft.pair import check_pair
from sglang_dflash.errors import NotSupported
from sglang_dflash.reference.mlx.draft import MLXDraft

# Supported model types. The draft does not scale the target's embeddings, so mlx-lm's model must not scale them either.
FAMILIES = ("llama", "qwen3", "qwen3_moe", "qwen3_next", "qwen3_5", "qwen3_5_moe")
# Text-only model type -> type in FAMILIES that is loaded by the same class of mlx-lm.
TEXT_ONLY = {"qwen3_5_text": "qwen3_5", "qwen3_5_moe_text": "qwen3_5_moe"}


class Pair(NamedTuple):
    """Target and draft, with the target's `embed` (tokens to [..., H]) and `head` ([..., H] to [..., V])."""

    target: nn.Module
    tokenizer: TokenizerWrapper
    draft: MLXDraft
    embed: Callable[[mx.array], mx.array]
    head: Callable[[mx.array], mx.array]


def load(model: str, draft: str) -> Pair:
    """Load a target as mlx-lm does, quantized or not, and its draft: from folders or from the Hugging Face hub.

    Raises:
        NotSupported: the target's family, or the kind of draft, is not supported here.
        ValueError: the draft is invalid, or does not match the target.
        FileNotFoundError: a given folder does not exist or has no config.json, or a model cannot be fetched.
    """
    config = target_config(model)
    kind = TEXT_ONLY.get(config.get("model_type", ""), config.get("model_type"))
    if kind not in FAMILIES:
        raise NotSupported(f"{model}: model_type is {kind!r}; on MLX give a target of type {' or '.join(FAMILIES)}")
    drafting = load_draft(draft)
    text = config | config.get("text_config", {})
    sizes = {"hidden_size": text["hidden_size"], "vocab_size": text["vocab_size"]}
    check_pair(drafting.config, model, **sizes, n_layers=text["num_hidden_layers"])
    target, tokenizer = mlx_lm.load(model, model_config={"model_type": kind, **rope_fields(config)})[:2]
    modules = {path.rsplit(".", 1)[-1]: module for path, module in target.named_modules()}
    embed: Any = modules["embed_tokens"]
    return Pair(target, tokenizer, drafting, embed, modules.get("lm_head", embed.as_linear))


def rope_fields(config: Mapping[str, Any]) -> dict[str, Any]:
    """Return the rotary embedding's fields under the names that Transformers 4 wrote.

    Transformers 5 writes them into `rope_parameters`. mlx-lm's Llama ignores `rope_parameters` and takes theta 10,000.
    """
    rope = config.get("rope_parameters") or {}
    if "rope_theta" in config or "rope_theta" not in rope:
        return {}
    scaling = {} if rope.get("rope_type", "default") == "default" else {"rope_scaling": rope}
    return {"rope_theta": rope["rope_theta"], **scaling}


def target_config(model: str) -> dict[str, Any]:
    folder = Path(model)
    if folder.is_absolute() and not folder.is_dir():
        raise FileNotFoundError(f"there is no folder {model}; give a target's folder or its name on the hub")
    if folder.is_dir():
        if not (folder / "config.json").is_file():
            raise FileNotFoundError(f"{model} has no config.json; give a target's folder")
        return files.read_object(folder / "config.json", "fetch the target again")
    with fetching(model):
        file = Path(hf_hub_download(model, "config.json"))
    return files.read_object(file, "fetch the target again")


@contextmanager
def fetching(source: str) -> Iterator[None]:
    """Raise FileNotFoundError with a cure if `source` cannot be fetched from the hub inside the context."""
    try:
        yield
    except files.NOT_FETCHED as error:
        raise FileNotFoundError(
            f"{source} is no folder and cannot be fetched ({type(error).__name__}); give a checkpoint's folder, or a "
            "name on the hub that this machine can reach. If it is private or gated, run `hf auth login` first"
        ) from error


def load_draft(source: str) -> MLXDraft:
    """Load the draft. Raises the errors of `sglang_dflash.reference.torch.DraftModel.from_pretrained`."""
    with fetching(source):
        folder = files.local_folder(source)
    config = checkpoint.read(str(folder))
    if named := config.unlike_z_lab():
        raise NotSupported(f"{config.path}: {named[0]} is not supported on MLX; give a draft in z-lab's form")
    if config.packing:
        raise NotSupported(f"{source} is quantized ({config.packing.words}); on MLX give the unquantized draft")
    draft = MLXDraft(config)
    draft.load_weights(list(tensors.tensors_of(config, folder, lambda file: mx.load(str(file))).items()))
    return draft
