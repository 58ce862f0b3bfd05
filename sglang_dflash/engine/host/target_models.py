"""Methods that DFLASH needs, for targets whose SGLang class lacks them.

DFLASH calls a model's `set_dflash_layers_to_capture` to select the features, and `get_input_embeddings()`. A model that
captures features for EAGLE3 may still lack the first method.
"""

from __future__ import annotations

import re
import sys
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from sglang_dflash.engine.host import source
from sglang_dflash.engine.host.names import Name

if TYPE_CHECKING:
    import torch

MINIMAX_M2 = "MiniMaxM2ForCausalLM"
# Architectures whose SGLang class also captures the output of its last layer, before the final norm.
GIVE_LAST = (
    "GptOssForCausalLM",
    "LagunaForCausalLM",
    "Lfm2ForCausalLM",
    "Lfm2MoeForCausalLM",
    "MiMoV2ForCausalLM",
    "MiMoV2FlashForCausalLM",
    "NemotronHForCausalLM",
    "NemotronHPuzzleForCausalLM",
)
SELECT, MODELS = "set_dflash_layers_to_capture", "sglang.srt.models"


def why_no_features(architectures: Sequence[str]) -> str:
    """Return why SGLang's model of a target gives a draft no features; "" if it gives them.

    SGLang serves the first architecture for which it has a class, and uses Transformers' class if it has none.
    """
    for architecture in architectures:
        selects = has_method(architecture)
        if selects is False and architecture != MINIMAX_M2:
            return f"SGLang's {architecture} has no {SELECT}, so it gives a draft no features"
        if selects is not None:
            return ""
    return (
        f"SGLang has no model class for {' or '.join(architectures)}, so it would use Transformers' class, which gives "
        "a draft no features"
    )


def has_method(architecture: str) -> bool | None:
    """Return whether SGLang's class of an architecture selects features; None if there is no such class.

    SGLang's registry imports all models, which takes seconds. Therefore the source is read first, unless the registry
    is imported already or contains models of another package.
    """
    from sglang.srt.environ import envs

    module = module_of(architecture)
    registry_decides = f"{MODELS}.registry" in sys.modules or envs.SGLANG_EXTERNAL_MODEL_PACKAGE.get()
    if module and not registry_decides:
        return not source.problem(Name(module, architecture, SELECT))
    from sglang.srt.models.registry import ModelRegistry

    if not ModelRegistry.is_arch_supported(architecture):
        return None
    return SELECT in dir(ModelRegistry.models[architecture])


def module_of(architecture: str) -> str:
    """Return the module of SGLang that defines the class `architecture`; "" if none does."""
    defines = re.compile(rf"^class {re.escape(architecture)}\b", re.MULTILINE)
    files = (source.root() / MODELS.replace(".", "/")).glob("*.py")
    return next((f"{MODELS}.{file.stem}" for file in files if defines.search(file.read_text())), "")


def complete(architecture: str) -> None:
    """Add missing methods to a target's class. Call this after the target is loaded, before SGLang selects features."""
    if architecture == MINIMAX_M2:
        from sglang.srt.models.minimax_m2 import MiniMaxM2ForCausalLM

        MiniMaxM2ForCausalLM.set_dflash_layers_to_capture = set_dflash_layers_to_capture
        MiniMaxM2ForCausalLM.get_input_embeddings = get_input_embeddings


def set_dflash_layers_to_capture(self: Any, layer_ids: list[int]) -> None:
    """Select the layers, numbered from 0, whose outputs are captured. This uses the model's method for EAGLE3."""
    self.set_eagle3_layers_to_capture(layer_ids)


def get_input_embeddings(self: Any, input_ids: torch.Tensor | None = None) -> Any:
    """Return the embedding layer, or its output for `input_ids`, as in SGLang's other models."""
    embedding = self.model.embed_tokens
    return embedding if input_ids is None else embedding(input_ids)
