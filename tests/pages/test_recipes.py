"""Recipes: each names the right model, parses in SGLang with the plugin, passes the plugin's checks, and fits its GPUs.

As in `test_cli_cards`, SGLang parses a recipe with local model paths, and the plugin's checks assume the recipe's GPU.
The checks read the configs of the published pair if `known_models` has them, otherwise configs of a tiny stand-in.
"""

import json
import os
import re
import shlex
import sys
import tomllib
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

from sglang_dflash.engine.config import combine
from sglang_dflash.engine.draft import checkpoint
from sglang_dflash.engine.draft.record import Checkpoint
from sglang_dflash.engine.host.arguments import Arguments, TargetFacts
from sglang_dflash.engine.host.target_models import why_no_features
from sglang_dflash.flags import Worker, read
from sglang_dflash.tools import recipe
from sglang_dflash.tools.capacity import known_models as models
from sglang_dflash.tools.capacity import report
from sglang_dflash.tools.capacity.geometry import Config
from sglang_dflash.tools.recipe import GPUS, RECIPES
from tests.fixtures.guide import DOCS, ROOT, source_of_sglang
from tests.server.lib import families
from tests.server.lib.families import FAMILIES
from tests.tools.tables import recipe_table
from tests.tools.tables.recipe_table import NOT_RUN, REHEARSED, TEXT_MODELS
from tests.unit.test_config import ARGUMENTS

DEVICES = {"h200": "sm90", "b200": "sm100"}
DRAFT_BACKENDS = {"h200": "fa3", "b200": "fa4"}
DIVISIBLE = {
    "num_attention_heads": 8,
    "num_key_value_heads": 8,
}  # divisible by every --tp-size of the recipes

ENV = ROOT / "env"
PATHS = ("--model-path", "--speculative-draft-model-path")
of_recipes = pytest.mark.parametrize("name", RECIPES)


@pytest.mark.parametrize(("gpu", "profile"), [("h200", "hopper.sh"), ("b200", "blackwell.sh")])
def test_flags_of_a_gpu_are_those_of_its_profile(gpu: str, profile: str) -> None:
    pairs = tomllib.loads(recipe.FILE.read_text())["gpus"][gpu]
    assert f'DFLASH_FLAGS="{" ".join(flag for flag, _ in pairs)}"' in (ENV / profile).read_text()


@pytest.mark.parametrize("gpu", GPUS)
@of_recipes
def test_a_recipe_parses_and_its_pair_is_accepted(
    name: str, gpu: str, launch: Any, pair: dict[str, str], checkpoints: ModuleType
) -> None:
    flags = recipe_table.flags_of(RECIPES[name], gpu)
    target, draft = (flags[path] for path in PATHS)
    named = target.split("/")[1].lower()
    assert name in named or name.startswith(named)
    block_size = int(flags.get("--speculative-num-draft-tokens", 8))  # default: the draft's own
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
    config = combine(arguments, *published(target, draft) or (tiny, some_draft), read({}))
    assert (config.block_size, config.draft.block_size) == (block_size, block_size)
    assert config.draft_attention_backend == DRAFT_BACKENDS[gpu]


def published(target: str, draft: str) -> tuple[TargetFacts, Checkpoint] | None:
    """Return facts of a published target and its draft's config, or None if `known_models` lacks one of them."""
    if target not in models.TARGETS or draft not in models.DRAFTS:
        return None
    assert models.draft_of(target) == draft
    config = Config(models.TARGETS[target].config, target)
    sizes = (config.count(name) for name in ("hidden_size", "vocab_size", "num_hidden_layers"))
    recurrent = "linear_attention" in config.layer_kinds()
    read = checkpoint.parse({"mask_token_id": 0} | models.DRAFTS[draft].config, draft)
    return TargetFacts(target, "", *sizes, dtype="bfloat16", recurrent=recurrent), read


@pytest.mark.parametrize("gpu", GPUS)
@of_recipes
def test_a_request_fits(name: str, gpu: str) -> None:
    found = recipe_table.fits(recipe_table.flags_of(RECIPES[name], gpu), gpu)
    known = RECIPES[name].target in models.TARGETS and RECIPES[name].draft in models.DRAFTS
    assert (found is not None and found.requests >= 1) == known


def test_every_model_at_hand_has_a_recipe() -> None:
    targets = {one.target for one in RECIPES.values()}
    assert set(models.TARGETS) <= targets
    assert targets - set(models.TARGETS) == set(models.NOT_AT_HAND) - {"Qwen/Qwen3.5-397B-A17B"}


def test_every_flag_has_its_reason() -> None:
    flags = [flag for one in RECIPES.values() for gpu in GPUS for flag in one.flags[gpu][3:]]
    assert flags
    assert not [flag for flag in flags if not flag.why]


def test_printed_command_is_the_one_that_runs(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    asked = ["qwen3.5-122b-a10b", "--gpu", "h200"]
    further = ["--tp-size", "2", "--served-model-name", "two words"]
    assert recipe.main([*asked, "--", *further]) == 0
    out = capsys.readouterr().out
    comments = [line for line in out.splitlines() if line.startswith("#")]
    assert comments[0] == "# Qwen/Qwen3.5-122B-A10B on H200."
    assert re.fullmatch(
        r"# On 2 H200 of 140\.4 GiB, \d+ requests of 8,192 tokens fit at once \(computed\).*", comments[1]
    )
    reasons = [line.removeprefix("#   ").split(": ", 1) for line in comments[2:]]
    assert [name for name, why in reasons if why] == [flag.name for flag in RECIPES[asked[0]].flags["h200"][3:]]
    program, *printed = shlex.split(out.replace("\\\n", " "), comments=True)
    assert program == "python"
    assert printed[-4:] == further  # of equal flags the last one wins
    started: list[list[str]] = []
    monkeypatch.setattr(os, "execv", lambda program, argv: started.append(argv))
    recipe.main([*asked, "--run", "--", *further])
    assert started == [[sys.executable, *printed]]


def test_later_flag_wins() -> None:
    """A recipe's flag overrides that of the GPU, and the recipe's flag for one GPU overrides both."""
    text = """
    gpus = { h200 = [["--page-size 64", "a"], ["--tp-size 1", "b"]], b200 = [["--page-size 1", "c"]] }
    [recipes.one]
    target = "t"
    architecture = "a"
    draft = "d"
    flags = [["--tp-size 2", "e"]]
    flags_h200 = [["--page-size 16", "f"], ["--trust-remote-code", "g"]]
    """
    one = recipe.read(text)["one"]
    assert {gpu: [flag.words for flag in one.flags[gpu][3:]] for gpu in GPUS} == {
        "h200": [("--page-size", "16"), ("--tp-size", "2"), ("--trust-remote-code",)],
        "b200": [("--page-size", "1"), ("--tp-size", "2")],
    }


def test_recipes_are_listed_without_a_name(capsys: pytest.CaptureFixture[str]) -> None:
    assert recipe.main([]) == 0
    out = capsys.readouterr().out
    title, *rows, empty, _ = (line.split() for line in out.splitlines())
    assert empty == []
    assert "sglang-dflash docs recipes" in out
    assert title == ["recipe", "draft", "H200", "B200"]
    cards = [[recipe_table.flags_of(one, gpu).get("--tp-size", "1") for gpu in GPUS] for one in RECIPES.values()]
    assert rows == [[one.name, one.draft, *n] for one, n in zip(RECIPES.values(), cards, strict=True)]
    assert len({n for row in cards for n in row}) > 2  # numbers of GPUs differ between recipes


@pytest.mark.parametrize("name", ["Qwen/Qwen3-8B", "QWEN3-8B", "z-lab/Qwen3-8B-DFlash-b16"])
def test_a_recipe_has_the_names_of_its_models(name: str, capsys: pytest.CaptureFixture[str]) -> None:
    printed = []
    for asked in (name, "qwen3-8b"):
        assert recipe.main([asked, "--gpu", "H200"]) == 0
        printed.append(capsys.readouterr().out)
    assert printed[0] == printed[1]


@pytest.mark.parametrize(
    ("asked", "sentence"),
    [
        (
            "qwen3.5-27b --gpu h200",
            "31 requests of 8,192 tokens fit at once (computed); 39 fit without --mem-fraction-static",
        ),
        ("qwen3.5-27b --gpu h200 -- --mem-fraction-static=0.86", "fit at once (computed)."),
        ("qwen3.5-27b --gpu b200", "On 1 B200 of 179.0 GiB, "),
    ],
)
def test_requests_at_once_are_printed(asked: str, sentence: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert recipe.main(asked.split()) == 0
    assert sentence in capsys.readouterr().out.splitlines()[1]


@pytest.mark.parametrize("asked", ["gpt-oss-120b --gpu b300", "gpt-oss-120b --gpu h200"])
def test_unknown_sizes_give_no_number_of_requests(asked: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert recipe.main(asked.split()) == 0
    assert capsys.readouterr().out.splitlines()[1].startswith("#   --")


@pytest.mark.parametrize(("gpu", "other"), [("h100", "h200"), ("gh200", "h200"), ("b300", "b200")])
def test_a_gpu_has_the_flags_of_its_generation(gpu: str, other: str, capsys: pytest.CaptureFixture[str]) -> None:
    commands = []
    for asked in (gpu, other):
        assert recipe.main(["qwen3-8b", "--gpu", asked]) == 0
        out = capsys.readouterr().out
        assert ("These flags are sized for an H200" in out) == (asked in recipe.SMALLER)
        commands.append([line for line in out.splitlines() if not line.startswith("#")])
    assert commands[0] == commands[1]


COMPUTED = [gpu for gpu, card in recipe.CARDS.items() if card.like not in GPUS]
TOO_LARGE = {("qwen3-coder-next", "rtx3090"), ("qwen3-coder-next", "rtx4090")}
TOO_LARGE |= {("qwen3.5-122b-a10b", gpu) for gpu in ("rtx3090", "rtx4090", "rtx5090")}
KNOWN = [one.name for one in RECIPES.values() if one.target in models.TARGETS and one.draft in models.DRAFTS]


def flags_on(name: str, gpu: str) -> dict[str, str] | None:
    """Return the recipe's flags for a card; None if the card lacks kernels for the weights, or memory."""
    one, device = RECIPES[name], recipe.CARDS[gpu].device
    lacks_kernels = one.devices and device not in one.devices
    if lacks_kernels or (name, gpu) in TOO_LARGE:
        reason = rf"needs kernels that {gpu} \({device}\) lacks; use" if lacks_kernels else f"fits on 8 {gpu}"
        with pytest.raises(ValueError, match=reason):
            recipe.flags_on(one, gpu)
        return None
    return {flag.name: flag.value for flag in recipe.flags_on(one, gpu)}


@pytest.mark.parametrize("gpu", COMPUTED)
@pytest.mark.parametrize("name", KNOWN)
def test_a_command_for_a_card_fits_it_and_is_accepted(name: str, gpu: str) -> None:
    """A draft with sliding layers does not follow the target to FlashInfer, which would wait for the GPU."""
    flags, card = flags_on(name, gpu), recipe.CARDS[gpu]
    if flags is None:
        return
    words = [word for flag in flags.items() for word in flag if word]
    found = report.answer(report.arguments(raises=True).parse_args([*words, "--gpu-memory", str(card.gib)]))
    assert found.results[Worker.PLUGIN].requests >= 1
    arguments = replace(
        ARGUMENTS,
        device=card.device,
        tp_size=int(flags.get("--tp-size", 1)),
        target_backend=flags["--attention-backend"],
        block_size=int(flags["--speculative-num-draft-tokens"]),
    )
    target, draft = published(*(flags[path] for path in PATHS))
    config = combine(arguments, target, draft, read({}))
    slides, other = any(draft.layer_windows), {"8.x": "fa3", "12.x": "fa4"}[card.like]
    assert config.draft_attention_backend == (other if slides else "flashinfer")


@pytest.mark.parametrize(
    ("name", "gpu"),
    [("qwen3-8b", "rtx3090"), ("qwen3.6-27b-awq", "rtx4090"), ("qwen3.6-27b-nvfp4", "rtx5090")],
)
def test_sglang_parses_the_commands_of_small_cards(name: str, gpu: str, launch: Any, pair: dict[str, str]) -> None:
    local = dict(zip(PATHS, (pair["hybrid"], pair["draft"]), strict=True))
    words = [word for flag in (flags_on(name, gpu) | local).items() for word in flag if word]
    ended = launch("parse", *words, env={"FIELDS": json.dumps(["chunked_prefill_size", "mem_fraction_static"])})
    assert ended.code == 0, ended.err
    if gpu == "rtx3090":
        fields = json.loads(ended.out.splitlines()[-1])["fields"]
        assert fields == {"chunked_prefill_size": 2048, "mem_fraction_static": 0.829}


@pytest.mark.parametrize(
    ("asked", "sentence"),
    [
        ("qwen3-8b --gpu rtx4090", r"# +--mem-fraction-static: computed: 1 request of 8,192 tokens at once\n"),
        ("qwen3-8b --gpu rtx4090 --run", ""),
        (
            "gpt-oss-20b --gpu rtx4090",
            "recipe: the sizes of gpt-oss-20b are not known, so its flags for rtx4090 cannot",
        ),
        ("qwen3.6-27b-nvfp4 --gpu rtx3090", r"recipe: nvidia/Qwen3.6-27B-NVFP4 needs kernels that rtx3090 \(sm80\)"),
        ("qwen3.5-122b-a10b --gpu rtx3090", "recipe: no request of qwen3.5-122b-a10b fits on 8 rtx3090"),
    ],
)
def test_a_card_gets_computed_flags_or_a_reason(
    asked: str, sentence: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    started = list[str]()
    monkeypatch.setattr(os, "execv", lambda program, argv: started.extend(argv))
    recipe.main(asked.split())
    printed = capsys.readouterr()
    assert re.search(sentence, printed.out + printed.err)
    assert ("--cuda-graph-max-bs-decode" in started) == ("--run" in asked)


@pytest.mark.parametrize(
    ("asked", "sentence"),
    [
        ("qwen3.5-27b", r"On 1 H100 of 79\.6 GiB, [1-9]\d* requests of 8,192 tokens fit at once \(computed\)\.$"),
        (
            "qwen3.5-35b-a3b",
            r"no request of 8,192 tokens fits \(computed\); set --tp-size 2 in the command, with which \d+ fit\.$",
        ),
        (
            "qwen3.6-35b-a3b",
            r"no request of 8,192 tokens fits \(computed\); set --tp-size 2 in the command, with which \d+ fit\.$",
        ),
        (
            "qwen3-coder-next",
            r"On 2 H100 of 79\.6 GiB, no request .*; set --tp-size 4 in the command, with which \d+ fit\.$",
        ),
        ("qwen3.5-27b -- --quantization fp8", r"fit at once \(computed\)\. Not counted, .*: --quantization\.$"),
        ("qwen3.5-35b-a3b -- --quantization fp8", r"with which \d+ fit\. Not counted, .*: --quantization\.$"),
        ("qwen3-coder-next -- --tp-size 4", r"On 4 H100 of 79\.6 GiB, \d+ requests of 8,192 tokens fit at once"),
        (
            "qwen3-8b -- --tp-size 3",
            r"cannot be computed: .* heads cannot be split over --tp-size 3; give a divisor of 32\.$",
        ),
        (
            "gpt-oss-120b",
            r"This card has 57% of its memory\. If the model does not fit, set a larger --tp-size",
        ),
    ],
)
def test_requests_on_an_h100_are_computed(asked: str, sentence: str, capsys: pytest.CaptureFixture[str]) -> None:
    name, *further = asked.split()
    assert recipe.main([name, "--gpu", "h100", *further]) == 0
    assert re.search(sentence, capsys.readouterr().out.splitlines()[1])


@pytest.mark.parametrize(
    ("argv", "sentence"),
    [
        (
            ["qwen3-8b"],
            "no GPU is named for qwen3-8b; give --gpu with one of a100-80, l40s, rtx3090, rtx4090, rtx5090, ",
        ),
        (["qwen3-8b", "--gpu", "h20"], "invalid choice: 'h20'"),
        (["qwen3-9b", "--gpu", "h200"], "there is no recipe qwen3-9b; did you mean qwen3.5-9b?"),
        (["--gpu", "h200"], "found no NAME; `sglang-dflash recipe` lists all"),
        (["--", "--tp-size", "2"], "found no NAME; `sglang-dflash recipe` lists all"),
        (["zzz", "--gpu", "h200"], "there is no recipe zzz; `sglang-dflash recipe` lists all"),
        (["qwen3-8b", "--gpu", "h200", "--port", "8000"], "--port 8000; flags of the server go after a bare `--`"),
        (["qwen3-8b", "--gpuu", "h200"], "unrecognized arguments: --gpuu h200; did you mean --gpu?"),
    ],
)
def test_wrong_arguments_are_refused(argv: list[str], sentence: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        recipe.main(argv)
    assert sentence in capsys.readouterr().err


def test_the_page_has_the_table() -> None:
    page = (DOCS / "recipes.md").read_text()
    for rows in (recipe_table.rows(), recipe_table.card_rows()):
        assert "\n".join(rows) in page, "run `python -m tests.tools.tables.write`"


# -- levels of evidence in the table --------------------------------------------------------------------------------


def test_served_architectures_have_a_tiny_checkpoint() -> None:
    served = {TEXT_MODELS.get(one.architecture, one.architecture) for one in RECIPES.values()} - NOT_RUN
    rehearsed = {family.model for family in families.REHEARSED.values()}
    assert served == {family.model for family in FAMILIES.values()} | rehearsed
    assert rehearsed == set(REHEARSED)


@pytest.mark.parametrize("architecture", sorted(NOT_RUN))
def test_a_target_that_was_not_run_gives_features(architecture: str) -> None:
    assert why_no_features([architecture]) == ""


SIZES = {"num_local_experts": 4, "num_experts_per_tok": 2, "sliding_window": 16, "rms_norm_eps": 1e-6}
GPU_ONLY: Mapping[str, Mapping[str, Any]] = {
    "GptOssForCausalLM": {"model_type": "gpt_oss"},
    # global_head_dim equals head_dim: SGLang reads one width for all layers before it rejects the attention backend.
    "Gemma4ForCausalLM": {"model_type": "gemma4_text", "global_head_dim": 16},
}


@pytest.mark.parametrize("architecture", GPU_ONLY)
def test_sglang_accepts_some_targets_with_gpu_attention_only(
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


def test_sglang_cannot_capture_features_of_minimax() -> None:
    source = source_of_sglang("srt/models/minimax_m2.py")
    assert "class MiniMaxM2ForCausalLM" in source
    assert "set_dflash_layers_to_capture" not in source, "SGLang can capture them now: leave it to SGLang"
