"""SGLang's config of a draft: fields as in its config.json, no overrides of the target, and the target's length."""

import json
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
from sglang.srt.utils.hf_transformers.config import get_config
from transformers import PretrainedConfig

from sglang_dflash.engine.draft.sglang_config import as_long_as_the_target, read_draft

YARN = {"rope_type": "yarn", "rope_theta": 10_000.0, "factor": 4.0, "original_max_position_embeddings": 128}


@pytest.fixture
def draft(checkpoints: ModuleType, tmp_path: Path) -> Path:
    return checkpoints.write_draft(tmp_path / "draft")


def read(model: Path, **overrides: Any) -> PretrainedConfig:
    return read_draft(get_config, str(model), trust_remote_code=False, model_override_args=overrides)


@pytest.mark.parametrize(
    "overrides",
    [
        {"rope_scaling": YARN},
        {"rope_parameters": YARN | {"mrope_section": [2, 1, 1]}},
        {"text_config": {"rope_parameters": YARN}},
        {"architectures": ["Qwen3ForCausalLM"]},
        {"block_size": 4, "vocab_size": 7},
    ],
    ids=["rope_scaling", "rope_parameters", "text_config", "architectures", "fields"],
)
def test_overrides_of_the_target_do_not_change_the_draft(overrides, draft):
    assert read(draft, **overrides).to_dict() == read(draft).to_dict()


@pytest.mark.parametrize("trusted", [True, False])
def test_code_that_a_draft_names_is_not_imported(trusted, checkpoints, tmp_path):
    """Drafts name the classes of their trainer. With `--trust-remote-code` SGLang would import them, or fail."""
    folder = checkpoints.write_draft(tmp_path, auto_map={"AutoConfig": "configuration_dflash.DFlashConfig"})
    assert read_draft(get_config, str(folder), trust_remote_code=trusted).architectures == ["DFlashDraftModel"]


def test_fields_equal_those_of_sglangs_reader(draft):
    ours, stock = read(draft).to_dict(), get_config(str(draft), trust_remote_code=False).to_dict()
    given = json.loads((draft / "config.json").read_text())
    dflash, rope = given.pop("dflash_config"), given.pop("rope_parameters")
    assert {name: ours[name] for name in given} == {name: stock[name] for name in given}
    assert ours["dflash_config"] == dflash | {"block_size": ours["block_size"]}
    assert ours["rope_parameters"] == {name: stock["rope_parameters"][name] for name in rope}


def test_a_scaled_rope_keeps_the_length_it_was_trained_for(checkpoints, tmp_path):
    rope = {name: value for name, value in YARN.items() if name != "original_max_position_embeddings"}
    folder = checkpoints.write_draft(tmp_path, rope_parameters=rope)
    assert read(folder).rope_parameters == rope | {"original_max_position_embeddings": 512}


def test_a_target_is_read_with_its_overrides(checkpoints, tmp_path):
    target = checkpoints.write_config(tmp_path, checkpoints.DENSE)
    assert read(target, num_hidden_layers=7).num_hidden_layers == 7
    assert read(target).num_hidden_layers == checkpoints.DENSE["num_hidden_layers"]


def test_sglangs_worker_uses_sglangs_reader(draft, monkeypatch):
    monkeypatch.setenv("SGLANG_DFLASH_WORKER", "stock")
    assert read(draft, block_size=4).block_size == 4


def test_a_refused_draft_is_left_to_sglang(checkpoints, tmp_path):
    folder = checkpoints.write_draft(tmp_path, dflash_config={"markov_rank": 4})
    assert read(folder, vocab_size=7).vocab_size == 7


@pytest.mark.parametrize(("context_length", "positions"), [(None, 512), (256, 512), (4096, 4096)])
@pytest.mark.parametrize("is_draft", [True, False])
def test_a_draft_has_every_position_of_its_target(context_length, positions, is_draft, draft):
    config, derived = read(draft), list[int | None]()
    model_config = SimpleNamespace(hf_config=config, hf_text_config=config, is_draft_model=is_draft)
    as_long_as_the_target(lambda _, length: derived.append(length), model_config, context_length)
    assert derived == [context_length]
    assert config.max_position_embeddings == (positions if is_draft else 512)
