"""Methods that the plugin adds to SGLang's target models."""

import sys
from typing import Any

import pytest
import torch

from sglang_dflash.host import target_models


class Model:
    """Stand-in for MiniMax-M2: it captures features only for EAGLE3, and `get_input_embeddings` requires token ids."""

    def __init__(self) -> None:
        self.model = torch.nn.Module()
        self.model.embed_tokens = torch.nn.Embedding(4, 2)
        self.captured: list[int] = []

    def set_eagle3_layers_to_capture(self, layer_ids: list[int]) -> None:
        self.captured = layer_ids

    def get_input_embeddings(self, input_ids: torch.Tensor) -> torch.Tensor:
        return self.model.embed_tokens(input_ids)


def test_minimax_gets_its_missing_methods(monkeypatch: pytest.MonkeyPatch) -> None:
    module: Any = type(torch)("sglang.srt.models.minimax_m2")
    module.MiniMaxM2ForCausalLM = type("MiniMaxM2ForCausalLM", (Model,), {})
    monkeypatch.setitem(sys.modules, module.__name__, module)
    target_models.complete("LlamaForCausalLM")
    assert not hasattr(module.MiniMaxM2ForCausalLM, "set_dflash_layers_to_capture")
    target_models.complete("MiniMaxM2ForCausalLM")
    model = module.MiniMaxM2ForCausalLM()
    model.set_dflash_layers_to_capture([0, 2])
    assert model.captured == [0, 2]
    assert model.get_input_embeddings() is model.model.embed_tokens
    ids = torch.tensor([1, 3])
    assert torch.equal(model.get_input_embeddings(ids), model.model.embed_tokens(ids))
