"""The recipes: each starts what its name says, parses with the plugin live, is accepted by it, and fits its GPUs.

A recipe's command is run as it stands with a stand-in for `python3`; then, as in `test_cli_cards`, SGLang parses it
with local model paths, and the plugin's rules are given the GPU. Published pairs whose configs are known here are
checked against each other as they are.
"""

import json
import re
import subprocess
from collections.abc import Mapping
from dataclasses import replace
from functools import partial
from importlib.util import find_spec
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

from launch import recipe_table
from launch.recipe_table import ARCHITECTURES, FOLDER, GPUS, RECIPES, REHEARSED, TEXT_MODELS, Refused
from sglang_dflash.capacity import known_models as models
from sglang_dflash.capacity.geometry import Config
from sglang_dflash.config import combine
from sglang_dflash.draft import checkpoint
from sglang_dflash.draft.record import Checkpoint
from sglang_dflash.host.arguments import Arguments, TargetFacts
from tests.server.lib import families
from tests.server.lib.families import FAMILIES

DEVICES = {"h200": "sm90", "b200": "sm100"}
DRAFT_BACKENDS = {"h200": "fa3", "b200": "fa4"}
DIVISIBLE = {"num_attention_heads": 8, "num_key_value_heads": 8}  # over every --tp-size of the recipes
PATHS = ("--model-path", "--speculative-draft-model-path")
of_recipes = partial(pytest.mark.parametrize, "recipe", ids=lambda path: path.stem)


@of_recipes(RECIPES)
def test_a_recipe_is_short_and_can_be_run(recipe: Path) -> None:
    text = recipe.read_text()
    assert len(text.splitlines()) <= 15
    assert max(map(len, text.splitlines())) <= 120
    assert recipe.stat().st_mode & 0o111
    assert subprocess.run(["bash", "-n", recipe], check=False).returncode == 0


@pytest.mark.parametrize("gpu", GPUS)
@of_recipes(RECIPES)
def test_a_recipe_parses_and_its_pair_is_accepted(
    recipe: Path, gpu: str, launch: Any, pair: dict[str, str], checkpoints: ModuleType
) -> None:
    flags = recipe_table.launch(recipe, gpu).flags
    target, draft = (flags[path] for path in PATHS)
    assert target.split("/")[1].lower().startswith(recipe.stem)
    block_size = int(flags.get("--speculative-num-draft-tokens", 8))  # without the flag the draft's own
    local = dict(zip(PATHS, (pair["hybrid"], pair["draft"]), strict=True))
    words = [word for flag in (flags | local).items() for word in flag if word]
    ended = launch("parse", *words, env={"FIELDS": json.dumps(["tp_size", "speculative_algorithm"])})
    assert ended.code == 0, ended.err
    parsed = json.loads(ended.out.splitlines()[-1])
    assert parsed["fields"] == {"tp_size": int(flags.get("--tp-size", 1)), "speculative_algorithm": "DFLASH"}
    parsed["arguments"]["accept_thresholds"] = tuple(parsed["arguments"]["accept_thresholds"])
    arguments = replace(Arguments(**parsed["arguments"]), device=DEVICES[gpu])
    tiny = TargetFacts("", "", 64, 128, 4, dtype="bfloat16", recurrent=False)
    some_draft = checkpoint.parse(checkpoints.DRAFT | {"block_size": block_size} | DIVISIBLE, "draft")
    config = combine(arguments, *published(target, draft) or (tiny, some_draft))
    assert (config.block_size, config.draft.block_size) == (block_size, block_size)
    assert config.draft_attention_backend == DRAFT_BACKENDS[gpu]


def published(target: str, draft: str) -> tuple[TargetFacts, Checkpoint] | None:
    """The pair as it was published, where its configs are known here."""
    if target not in models.TARGETS:
        return None
    assert models.draft_of(target) == draft
    config = Config(models.TARGETS[target].config, target)
    sizes = (config.count(name) for name in ("hidden_size", "vocab_size", "num_hidden_layers"))
    recurrent = "linear_attention" in config.layer_kinds()
    read = checkpoint.parse({"mask_token_id": 0} | models.DRAFTS[draft].config, draft)
    return TargetFacts(target, "", *sizes, dtype="bfloat16", recurrent=recurrent), read


@pytest.mark.parametrize("gpu", GPUS)
@of_recipes(RECIPES)
def test_a_request_fits(recipe: Path, gpu: str) -> None:
    started = recipe_table.launch(recipe, gpu)
    found = recipe_table.fits(started, gpu)
    known = started.flags["--model-path"] in models.TARGETS
    assert (found is not None and found.requests >= 1) == known


def test_every_model_at_hand_has_a_recipe() -> None:
    targets = {recipe_table.launch(recipe, "h200").flags["--model-path"] for recipe in RECIPES}
    assert set(models.TARGETS) <= targets
    not_at_hand = set(models.NOT_AT_HAND) - {"Qwen/Qwen3.5-397B-A17B"}
    assert targets - set(models.TARGETS) == not_at_hand


def test_further_flags_come_last_and_the_worker_can_be_chosen() -> None:
    recipe = FOLDER / "qwen3.5-27b.sh"
    further = ("--tp-size", "2", "--served-model-name", "two words")
    started = recipe_table.launch(recipe, "h200", *further, env={"SGLANG_DFLASH_WORKER": "stock"})
    assert started.argv[-4:] == list(further)
    assert started.argv[:2] == ["-m", "sglang.launch_server"]
    assert (started.worker, recipe_table.launch(recipe, "h200").worker) == ("stock", "plugin")


@pytest.mark.parametrize("gpu", ["", "h20", "--port"])
def test_another_gpu_is_refused(gpu: str) -> None:
    with pytest.raises(Refused, match=r"^usage: .*qwen3-8b.sh h200\|b200 \[further flags"):
        recipe_table.launch(FOLDER / "qwen3-8b.sh", gpu)


def test_the_readme_has_the_table() -> None:
    table = "\n".join(recipe_table.rows())
    assert table in (FOLDER / "README.md").read_text(), "write `python -m launch.recipe_table` into it"


# -- what the table says is proved, and why the rest is not --------------------------------------------------------


def test_what_is_called_proved_has_a_tiny_checkpoint() -> None:
    assert set(ARCHITECTURES) == {recipe.stem for recipe in RECIPES}
    served = {TEXT_MODELS.get(architecture, architecture) for architecture in ARCHITECTURES.values()}
    rehearsed = {family.model for family in families.REHEARSED.values()}
    assert served == {family.model for family in FAMILIES.values()} | rehearsed
    assert rehearsed == set(REHEARSED)


SIZES = {"num_local_experts": 4, "num_experts_per_tok": 2, "sliding_window": 16, "rms_norm_eps": 1e-6}
GPU_ONLY: Mapping[str, Mapping[str, Any]] = {
    "GptOssForCausalLM": {"model_type": "gpt_oss"},
    # As wide as the others: SGLang reads one width for all layers before it comes to attention.
    "Gemma4ForCausalLM": {"model_type": "gemma4_text", "global_head_dim": 16},
}


@pytest.mark.parametrize("architecture", GPU_ONLY)
def test_sglang_takes_some_targets_with_gpu_attention_only(
    architecture: str, launch: Any, checkpoints: ModuleType, tmp_path: Path
) -> None:
    config = checkpoints.DENSE | SIZES | GPU_ONLY[architecture] | {"architectures": [architecture]}
    folder = checkpoints.write_config(tmp_path, config)
    ended = launch(
        "parse", "--resolve", *("--model-path", str(folder), "--device", "cpu", "--attention-backend", "torch_native")
    )
    assert ended.code == 1
    name = architecture.removesuffix("ForCausalLM")
    assert re.search(rf"AssertionError: {name}.* (only supports|requires one of)", ended.err), ended.err


def test_sglang_itself_cannot_have_minimax_s_features() -> None:
    sglang = find_spec("sglang")
    assert sglang is not None
    assert sglang.origin is not None
    source = (Path(sglang.origin).parent / "srt" / "models" / "minimax_m2.py").read_text()
    assert "class MiniMaxM2ForCausalLM" in source
    assert "set_dflash_layers_to_capture" not in source, "SGLang can capture them now: leave it to SGLang"
