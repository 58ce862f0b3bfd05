"""SGLang's configuration of a draft, built by this plugin's reader.

SGLang reads a draft's `config.json` in several places, and changes it by `--json-model-override-args`, which is meant
for the target. SGLang also rejects a draft with a shorter context length than the target's. With the hooks of this
module SGLang gets the config from `checkpoint.parse`, as `sglang-dflash check` and weight updates do.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import suppress
from typing import Any

from sglang.srt.runtime_context import get_disagg, get_spec
from transformers import PretrainedConfig, Qwen3Config

from sglang_dflash import flags
from sglang_dflash.engine.draft import checkpoint
from sglang_dflash.engine.draft import files as draft_files
from sglang_dflash.engine.draft.dialects import names_draft
from sglang_dflash.engine.draft.record import Checkpoint
from sglang_dflash.flags import Worker


def read_draft(
    stock: Callable[..., PretrainedConfig],
    model: str,
    trust_remote_code: bool,
    revision: str | None = None,
    model_override_args: dict[str, Any] | None = None,
    **kwargs: Any,
) -> PretrainedConfig:
    """Read a DFlash draft's config without override arguments, and leave other models to SGLang.

    Hook around `get_config`.

    SGLang's reader needs a model type, which configs of some trainers lack. With `--trust-remote-code` it also imports
    the classes that a config's `auto_map` names, and their files are often left out of a draft. If this plugin's reader
    rejects a draft, SGLang reads the draft, because another algorithm may serve it. With DFLASH,
    `plugin.resolve` has already rejected it.
    """
    if (ours := own_config(model, revision)) is not None:
        return ours
    return stock(
        model, trust_remote_code=trust_remote_code, revision=revision, model_override_args=model_override_args, **kwargs
    )


def as_long_as_the_target(stock: Callable[..., None], model_config: Any, context_length: int | None) -> None:
    """Set a draft's context length to at least its target's. Hook around `ModelConfig._derive_context_length`.

    SGLang rejects a draft that was trained for fewer positions, although answers stay exact at later positions.
    """
    if model_config.is_draft_model and context_length is not None and is_ours(model_config.hf_config):
        text = model_config.hf_text_config
        text.max_position_embeddings = max(text.max_position_embeddings, context_length)
    stock(model_config, context_length)


def not_quantized(stock: Callable[..., dict[str, Any] | None], model_config: Any) -> dict[str, Any] | None:
    """Return None for a draft, whose quantized weights become plain ones while they load.

    SGLang would find ModelOpt's hf_quant_config.json in the draft's folder, and build quantized layers. Hook around
    `ModelConfig._parse_quant_hf_config`.
    """
    return None if model_config.is_draft_model and is_ours(model_config.hf_config) else stock(model_config)


def is_ours(config: PretrainedConfig) -> bool:
    """Return whether the config is a DFlash draft's, and this plugin's worker is selected."""
    return names_draft({"architectures": config.architectures}) and flags.current().worker is not Worker.STOCK


def own_config(model: str, revision: str | None) -> PretrainedConfig | None:
    """Return a draft's config from this plugin's reader.

    None: the model is not a DFlash draft, SGLang's own worker is selected, or the reader rejects the file.
    """
    if flags.current().worker is Worker.STOCK:
        return None
    with suppress(ValueError):
        config = draft_files.read_config(model, revision)
        if names_draft(config):
            return sglang_config(checkpoint.parse(checkpoint.completed(config, model, revision), model))
    return None


def as_served(draft: Checkpoint) -> Checkpoint:
    """Return the draft with the windows that its layers have on this server, see `fit.layers`."""
    keeps_all = get_disagg().disaggregation_mode != "null"
    return draft.narrowed(get_spec().speculative_draft_window_size if keeps_all else None)


def sglang_config(draft: Checkpoint) -> PretrainedConfig:
    """Return the draft's fields as a Transformers config, with what SGLang does not pass to the model's loader.

    This is the files' format of quantized weights as `packing`, and the file of the mask token's row as `mask_file`.

    The config has no `quantization_config`, because SGLang would build quantized layers. For a scaled rope without
    `original_max_position_embeddings`, Transformers sets this field to `max_position_embeddings`. So the rope keeps its
    trained length when `as_long_as_the_target` raises `max_position_embeddings` later.
    """
    config = Qwen3Config.from_dict(draft.to_json())
    config._name_or_path, config.packing = draft.path, draft.packing
    config.mask_file = draft.mask_file
    return config
