"""Drafts in the format of the `speculators` library, targets overridden by launch flags, and targets loaded later.

Tokens must equal the target's own. Steps, where compared, must equal those of the PyTorch reference. Users reported
failures with such drafts and targets.
"""

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from sglang_dflash.pairs.tiny.pairs import DENSE, Pair
from tests.fixtures import kinds
from tests.server.lib.families import FAMILIES, NO_WARMUP, write_pair
from tests.server.lib.oracle import Oracle
from tests.server.lib.rehearsals import REHEARSALS
from tests.server.lib.talk import post, tokens_of
from tests.server.lib.variants import VARIANTS

YARN = {"rope_type": "yarn", "rope_theta": 10_000.0, "factor": 2.0, "original_max_position_embeddings": 4096}
CONTEXT = 8192
N_PROMPTS, MAX_NEW_TOKENS = 5, 48


def config_of(folder: Path) -> dict[str, Any]:
    return json.loads((folder / "config.json").read_text())


def as_speculators(folder: Path) -> Path:
    """Write the dense pair's draft in the format of the `speculators` library, with the target's embedding and head.

    Its config has dtype float32, 64 positions and a vocabulary of 1000, less than the target's 1024.
    """
    config, tensors = config_of(DENSE.draft), load_file(DENSE.draft / "model.safetensors")
    config |= {"max_position_embeddings": 64, "dtype": "float32", "vocab_size": 1000}
    of_target = load_file(DENSE.target / "model.safetensors")
    outer, stored = kinds.as_speculators(config, tensors, of_target)
    stored["verifier_norm.weight"] = of_target["model.norm.weight"]
    folder.mkdir()
    save_file({name: tensor.to(torch.float32) for name, tensor in stored.items()}, folder / "model.safetensors")
    (folder / "config.json").write_text(json.dumps(outer | {"draft_vocab_size": 1000}))
    return folder


def as_older_transformers(folder: Path) -> Path:
    """Write the dense pair's draft with another rope, in two files. Some tensor names have a prefix.

    The config has the rope and dtype fields of older Transformers, no model type, and names code that does not exist.
    """
    config, tensors = config_of(DENSE.draft), load_file(DENSE.draft / "model.safetensors")
    rope = config.pop("rope_parameters")
    config |= {"rope_theta": rope["rope_theta"], "rope_scaling": {"type": "yarn", "factor": 4.0}}
    config |= {"torch_dtype": f"torch.{config.pop('dtype')}", "max_position_embeddings": 64}
    config |= {"auto_map": {"AutoConfig": "configuration_dflash.DFlashConfig"}}
    del config["model_type"]
    folder.mkdir()
    files = {"model-1.safetensors": {}, "model-2.safetensors": {}}
    for i, (name, tensor) in enumerate(tensors.items()):
        files[f"model-{1 + i % 2}.safetensors"][f"model.{name}" if i % 3 else name] = tensor
    for file, part in files.items():
        save_file(part, folder / file)
    index = {"metadata": {}, "weight_map": {name: file for file, part in files.items() for name in part}}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))
    (folder / "config.json").write_text(json.dumps(config))
    return folder


@pytest.fixture(scope="module")
def speculators(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return as_speculators(tmp_path_factory.mktemp("drafts") / "speculators")


@pytest.fixture
def scaled(tmp_path: Path) -> Path:
    """Return a target whose config has the values that `--json-model-override-args` sets below."""
    folder = Path(shutil.copytree(DENSE.target, tmp_path / "target"))
    config = config_of(folder) | {"rope_parameters": YARN, "max_position_embeddings": CONTEXT}
    (folder / "config.json").write_text(json.dumps(config))
    return folder


@pytest.mark.parametrize("emulated", [False, pytest.param(True, marks=pytest.mark.full)], ids=["cpu", "fa3-graphs"])
def test_overrides_of_the_target_leave_the_draft_unchanged(
    speculators: Path, scaled: Path, pool: Any, questions: Callable, emulated: bool
) -> None:
    """`--json-model-override-args` scales the target's rotary embedding only.

    Reloading the draft while serving must not change its steps.
    """
    overrides = json.dumps({"rope_parameters": YARN, "max_position_embeddings": CONTEXT})
    row = REHEARSALS["fa3-graphs-dense"] if emulated else VARIANTS["dense"]
    flags = [*row.flags, "--json-model-override-args", overrides, "--context-length", str(CONTEXT)]
    server = pool.get(target="speculators", pair=Pair(DENSE.target, speculators), flags=flags, env=dict(row.env))
    expected, same, plain = (
        Oracle(pair, None, None).expect(questions(N_PROMPTS, "dense"), MAX_NEW_TOKENS)
        for pair in (Pair(scaled, speculators), Pair(scaled, DENSE.draft), DENSE)
    )
    assert expected.steps == same.steps, "the dialect changes the draft"
    assert expected.steps != plain.steps, "overrides have no effect"
    expected.require_from(server, concurrency=2)
    answer = post(server, "/update_weights_from_disk", {"model_path": str(speculators)})
    assert answer.status_code == 200, answer.text
    expected.require_from(server, concurrency=2)
    log = server.log_text()
    for line in (
        "was trained for 64 positions and serves 8192",
        "has vocab_size 1000 and uses the target's embedding and head of 1024 rows",
        "unused tensors: embed_tokens.weight, lm_head.weight, verifier_norm.weight",
    ):
        assert line in log, line
    pool.drop(server)


@pytest.mark.full
def test_draft_of_older_transformers(pool: Any, questions: Callable, tmp_path: Path) -> None:
    pair = Pair(DENSE.target, as_older_transformers(tmp_path / "draft"))
    flags = ("--trust-remote-code", "--speculative-draft-model-revision", "main", "--served-model-name", "my/model-1")
    server = pool.get(target="older", pair=pair, flags=flags)
    expected, plain = (
        Oracle(one, None, None).expect(questions(N_PROMPTS, "dense"), MAX_NEW_TOKENS) for one in (pair, DENSE)
    )
    assert expected.steps != plain.steps, "the rope has no effect"
    expected.require_from(server, concurrency=1)
    answer = post(server, "/update_weights_from_disk", {"model_path": str(pair.draft)})
    assert answer.status_code == 200, answer.text
    expected.require_from(server, concurrency=1)
    pool.drop(server)


def test_target_without_weights_gets_them_later(pool: Any, plain_torch: Callable) -> None:
    """A trainer may start a server with dummy weights and load the target later.

    The draft is read from its files at launch, and must still be used afterwards.
    """
    server = pool.get(target="dense", flags=["--load-format", "dummy"])
    answer = post(server, "/update_weights_from_disk", {"model_path": str(DENSE.target), "load_format": "auto"})
    assert answer.status_code == 200, answer.text
    server.flush_cache()
    plain_torch(N_PROMPTS, MAX_NEW_TOKENS, "dense").require_from(server, concurrency=1)
    pool.drop(server)


@pytest.mark.full
def test_overrides_of_a_text_config_apply_to_the_target(pool: Any, tmp_path: Path) -> None:
    """A target with vision has its text fields in `text_config`. Its draft's config has them at the top level.

    Overrides of `text_config` must not reach the draft.
    """
    family = FAMILIES["qwen3.5"]
    pair, prompts = write_pair(family, tmp_path)
    rope = config_of(pair.target)["text_config"]["rope_parameters"] | {"rope_theta": 30_000.0}
    overrides = json.dumps({"text_config": {"rope_parameters": rope}})
    flags = (*family.flags, *NO_WARMUP, "--json-model-override-args", overrides)
    texts = []
    for arm in ("off", "plugin"):
        server = pool.get(arm, target="vision", pair=pair, flags=flags)
        answers = server.generate_many(prompts[:N_PROMPTS], concurrency=1, max_new_tokens=MAX_NEW_TOKENS)
        texts.append(tokens_of(answers))
        pool.drop(server)
    assert texts[0] == texts[1]
