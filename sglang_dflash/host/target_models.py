"""Methods that DFLASH needs and that SGLang's model classes of some targets lack.

DFLASH calls a model's `set_dflash_layers_to_capture` to select the features, and `get_input_embeddings()`. A model that
captures features for EAGLE3 may still lack the first method.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import torch

MINIMAX_M2 = "MiniMaxM2ForCausalLM"


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
