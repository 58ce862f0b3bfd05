"""Methods of SGLang's target models that DFLASH needs: those that are missing, and those that the plugin adds."""

import sys
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from sglang_dflash.engine.host import target_models


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


REGISTRY = "sglang.srt.models.registry"
LACKS = "SGLang's {} has no set_dflash_layers_to_capture, so it gives a draft no features"
UNKNOWN = (
    "SGLang has no model class for {}, so it would use Transformers' class, which gives a draft no features"
)  # fmt: skip


@pytest.fixture
def registry(monkeypatch: pytest.MonkeyPatch) -> Any:
    """Return a stand-in for SGLang's registry of models, which is not imported yet."""
    monkeypatch.delitem(sys.modules, REGISTRY, raising=False)
    monkeypatch.delenv("SGLANG_EXTERNAL_MODEL_PACKAGE", raising=False)
    models = {"Qwen3ForCausalLM": object, "OwnForCausalLM": Featured}
    module: Any = type(torch)(REGISTRY)
    module.ModelRegistry = SimpleNamespace(models=models, is_arch_supported=models.__contains__)
    return module


class Featured:
    def set_dflash_layers_to_capture(self, layer_ids: list[int]) -> None: ...


@pytest.mark.parametrize(
    ("architectures", "why"),
    [
        (["Qwen3ForCausalLM"], ""),
        (["Qwen3_5MoeForConditionalGeneration"], ""),  # a base class has the method
        (["MiniMaxM2ForCausalLM"], ""),  # the plugin adds the method
        (["Qwen2ForCausalLM"], LACKS.format("Qwen2ForCausalLM")),
        (["Qwen2ForCausalLM", "Qwen3ForCausalLM"], LACKS.format("Qwen2ForCausalLM")),
    ],
)
def test_sglangs_source_shows_which_targets_give_features(registry: Any, architectures: list[str], why: str) -> None:
    assert target_models.why_no_features(architectures) == why
    assert REGISTRY not in sys.modules, "importing all of SGLang's models takes seconds"


@pytest.mark.parametrize(
    ("architectures", "why"),
    [
        (["SmolLM3ForCausalLM"], UNKNOWN.format("SmolLM3ForCausalLM")),
        (["AForCausalLM", "BForCausalLM"], UNKNOWN.format("AForCausalLM or BForCausalLM")),
        (["OwnForCausalLM"], ""),
        (["SmolLM3ForCausalLM", "OwnForCausalLM"], ""),
    ],
)
def test_the_registry_is_read_for_other_architectures(
    registry: Any, monkeypatch: pytest.MonkeyPatch, architectures: list[str], why: str
) -> None:
    monkeypatch.setitem(sys.modules, REGISTRY, registry)
    assert target_models.why_no_features(architectures) == why


def test_a_class_is_found_by_its_whole_name() -> None:
    assert target_models.module_of("Qwen3ForCausalLM") == "sglang.srt.models.qwen3"
    assert target_models.module_of("Qwen3ForCausal") == ""


def test_a_registry_that_is_imported_decides(registry: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """Another package may have replaced SGLang's class."""
    monkeypatch.setitem(sys.modules, REGISTRY, registry)
    assert target_models.why_no_features(["Qwen3ForCausalLM"]) == LACKS.format("Qwen3ForCausalLM")


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
