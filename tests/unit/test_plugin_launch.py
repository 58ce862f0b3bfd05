"""Bad input to SGLang's launch command must end the launch with one clear sentence and a non-zero exit status.

Every launch here fails in SGLang's launch entry point, before it starts processes.
"""

import json
import os
import re
import subprocess
import sys
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import pytest

CPU = (
    "--model-path {target} --device cpu --attention-backend torch_native --speculative-algorithm DFLASH "
    "--speculative-draft-model-path {draft} --max-total-tokens 1024 --disable-radix-cache --port 31061"
)
ATTENTION_DP = "--tp-size 2 --dp-size 2 --enable-dp-attention --enable-dp-lm-head"


class Bad(NamedTuple):
    """An expected sentence, and the flags, draft, environment and target that cause it."""

    sentence: str
    flags: str = ""
    draft: dict[str, Any] | None = None
    env: dict[str, str] | None = None
    target: str = "hybrid"


def dflash(**fields: Any) -> dict[str, Any]:
    return {"dflash_config": fields}


BAD = {
    # flags
    "block much longer than trained": Bad(
        "ValueError: block size 64 is not within 2..32: {draft} was trained for blocks of 8 tokens (config.json: "
        "block_size); set --speculative-num-draft-tokens or --speculative-dflash-block-size to 8 or less, or drop both",
        "--speculative-num-draft-tokens 64",
    ),
    "block of one": Bad("ValueError: block size 1 is not within 2..32", "--speculative-num-draft-tokens 1"),
    "old and new block flags differ": Bad(
        "ValueError: Both --speculative-num-draft-tokens and --speculative-dflash-block-size are set but they differ",
        "--speculative-num-draft-tokens 4 --speculative-dflash-block-size 8",
    ),
    "window below the block": Bad(
        "ValueError: --speculative-draft-window-size 4 is smaller than the block of 8; give at least 8",
        "--speculative-dflash-draft-window-size 4",
    ),
    "width above 32": Bad(
        "ValueError: SGLANG_DFLASH_WIDTHS: 33 is not within 1..32", env={"SGLANG_DFLASH_WIDTHS": "4,33"}
    ),
    "width beyond the block": Bad(
        "NotSupported: SGLANG_DFLASH_WIDTHS: 17 exceeds the block of 8 (only n-gram copies extend a block, and they "
        "are off: SGLANG_DFLASH_COPY=off); remove 17, or unset the variable",
        env={"SGLANG_DFLASH_WIDTHS": "4,17", "SGLANG_DFLASH_COPY": "off"},
    ),
    "widths of a Mamba2 target": Bad(
        "NotSupported: SGLANG_DFLASH_WIDTHS=4: this server verifies only whole blocks (SGLang locates the recurrent "
        "states of this target by the block size); set the variable to 8, or unset it",
        env={"SGLANG_DFLASH_WIDTHS": "4"},
        target="mamba2",
    ),
    "widths with attention data parallelism": Bad(
        "NotSupported: SGLANG_DFLASH_WIDTHS=4: this server verifies only whole blocks (attention data "
        "parallelism supports no other width); set the variable to 8, or unset it",
        ATTENTION_DP,
        env={"SGLANG_DFLASH_WIDTHS": "4"},
    ),
    "lossy acceptance": Bad(
        "NotSupported: --speculative-accept-threshold-single 0.9 would change the output distribution; drop the flag",
        "--speculative-accept-threshold-single 0.9",
    ),
    "memory saver without a copy of the draft": Bad(
        "NotSupported: --enable-memory-saver without a copy of the draft's weights is not supported with DFLASH (a "
        "release of the weights would lose the draft); add --enable-draft-weights-cpu-backup, or "
        "--enable-weights-cpu-backup, which also keeps the target's",
        "--enable-memory-saver",
    ),
    "linear replay of states": Bad(
        "NotSupported: --enable-linear-replayssm-spec is not supported with DFLASH", "--enable-linear-replayssm-spec"
    ),
    "embeddings": Bad("NotSupported: --is-embedding is not supported with DFLASH", "--is-embedding"),
    "pools sized after capture": Bad(
        "NotSupported: SGLANG_ENABLE_POST_CAPTURE_KV_SIZING=1 is not supported with a draft window of 64 tokens",
        "--speculative-draft-window-size 64",
        env={"SGLANG_ENABLE_POST_CAPTURE_KV_SIZING": "1"},
    ),
    "KV cache with heads first": Bad(
        "NotSupported: SGLANG_USE_HND_KVCACHE=1 is not supported with DFLASH", env={"SGLANG_USE_HND_KVCACHE": "1"}
    ),
    "draft backend of another device": Bad(
        "NotSupported: --speculative-draft-attention-backend fa4: it does not run on cpu (sm90, sm100, sm110, sm120 "
        "only); use torch_native",
        "--speculative-draft-attention-backend fa4",
    ),
    "fp8 draft cache": Bad(
        "NotSupported: no attention backend of this plugin can use a draft KV cache of fp8_e4m3 on cpu",
        "--speculative-draft-kv-cache-dtype fp8_e4m3",
    ),
    "heads that cannot be split": Bad("ValueError: {draft}: 4 heads and 2 KV heads cannot be split", "--tp-size 3"),
    "heads that the ranks of a group cannot split": Bad(
        "ValueError: {draft}: 4 heads and 2 KV heads cannot be split over 3 ranks (--tp-size 6, 2 groups of "
        "data-parallel attention); set --tp-size or --attn-dp-size so that the ranks of a group are 1 or 2 or 4",
        "--tp-size 6 --dp-size 2 --enable-dp-attention --enable-dp-lm-head",
    ),
    "a window below the block, with disaggregation": Bad(
        "ValueError: --speculative-draft-window-size 7 is smaller than the block of 8; give at least 8",
        "--disaggregation-mode prefill --speculative-draft-window-size 7 --speculative-num-draft-tokens 4",
    ),
    "a draft without weights": Bad(
        "NotSupported: --speculative-draft-load-format dummy is not supported with DFLASH (with random weights "
        "hardly any draft token would be accepted); drop the flag: the draft is loaded from its files even with "
        "--load-format dummy",
        "--load-format dummy --speculative-draft-load-format dummy",
    ),
    "unknown strategy under its old name": Bad(
        "argument --mamba-scheduler-strategy: invalid choice: 'ring'", "--mamba-scheduler-strategy ring"
    ),
    "the target's Transformers class": Bad(
        "NotSupported: --model-impl transformers is not supported with DFLASH (only SGLang's own model classes give "
        "features to a draft); drop the flag",
        "--model-impl transformers",
    ),
    "a target without a class in SGLang": Bad(
        "NotSupported: {target}: SGLang has no model class for SmolLM3ForCausalLM, so it would use Transformers' "
        "class, which gives a draft no features; serve this target without DFLASH",
        target="smollm3",
    ),
    "a target whose class selects no features": Bad(
        "NotSupported: {target}: SGLang's Qwen2ForCausalLM has no set_dflash_layers_to_capture, so it gives a draft "
        "no features; serve this target without DFLASH",
        target="qwen2",
    ),
    # environment
    "misspelt variable": Bad(
        "ValueError: SGLANG_DFLASH_WROKER is not a variable of sglang-dflash", env={"SGLANG_DFLASH_WROKER": "stock"}
    ),
    "unknown worker": Bad(
        "ValueError: SGLANG_DFLASH_WORKER='ours' is not one of plugin, stock; set one of them, or unset it",
        env={"SGLANG_DFLASH_WORKER": "ours"},
    ),
    "unknown switch value": Bad(
        "ValueError: SGLANG_ENABLE_SPEC_V2='maybe' is not one of 0, false, no, n, 1, true, yes, y; set one of them",
        env={"SGLANG_ENABLE_SPEC_V2": "maybe"},
    ),
    "a switch of the stock worker": Bad(
        "ValueError: SGLANG_DFLASH_EAGER_DRAFT_SAMPLER affects only SGLang's built-in worker",
        env={"SGLANG_DFLASH_EAGER_DRAFT_SAMPLER": "1"},
    ),
    # the draft
    "DSpark": Bad(
        "NotSupported: {draft}: architecture is DSparkDraftModel, not DFlashDraftModel or DFlash2DraftModel; serve it "
        "with --speculative-algorithm DSPARK",
        draft={"architectures": ["DSparkDraftModel"]},
    ),
    "a model that is no draft": Bad(
        "NotSupported: {draft}: architecture is Qwen3ForCausalLM, not DFlashDraftModel or DFlash2DraftModel",
        draft={"architectures": ["Qwen3ForCausalLM"], "dflash_config": {}},
    ),
    "mask token outside": Bad(
        "ValueError: {draft}: mask_token_id 999 is outside the target's vocabulary of 128",
        draft=dflash(mask_token_id=999),
    ),
    "features of the last layer": Bad(
        "ValueError: {draft}: target_layer_ids end at 3, and a target of 4 layers",
        draft=dflash(target_layer_ids=[0, 3]),
    ),
    "another target's codebooks": Bad(
        "a codebook has a row for every token of the vocabulary; fix config.json or fetch the draft again",
        draft={"architectures": ["DFlash2DraftModel"], "vocab_size": 96} | dflash(selector_rank=8, selector_top_k=4),
    ),
    "another target's depth": Bad(
        "ValueError: {draft}: num_target_layers 36 is not the target's 4",
        draft={"num_target_layers": 36},
        target="dense",
    ),
    "a reduced vocabulary without its list": Bad(
        "ValueError: {draft}: 1 of 26 tensors are missing, the first is d2t; correct config.json",
        draft=dflash(draft_vocab_size=64),
    ),
}


@pytest.mark.parametrize("name", BAD)
def test_bad_input_ends_the_launch(name, launch, pair, checkpoints, tmp_path):
    bad = BAD[name]
    draft = str(checkpoints.write_draft(tmp_path / "draft", **bad.draft)) if bad.draft else pair["draft"]
    line = f"{CPU} {bad.flags}".format(target=pair[bad.target], draft=draft)
    ended = launch("sglang.launch_server", *line.split(), env=bad.env)
    assert ended.code not in (0, None), ended.err
    assert bad.sentence.format(draft=draft, target=pair[bad.target]) in ended.last_line
    assert "another exception" not in ended.err, "one error, not a chain of them"


OTHERS = (
    "--speculative-num-steps 3 --speculative-eagle-topk 4 --speculative-draft-window-size 64 "
    "--speculative-draft-sink-size 4 --speculative-adaptive --speculative-use-rejection-sampling"
)


@pytest.mark.parametrize("given", [True, False])
def test_flags_of_other_algorithms_are_ignored(given, launch, pair):
    """A framework sets some of them for any algorithm. SGLang's own resolution resets the first two to 1."""
    line = CPU.format(target=pair["hybrid"], draft=pair["draft"])
    line += f" {OTHERS if given else '--speculative-num-steps 1 --speculative-eagle-topk 1'}"
    fields = ["speculative_num_steps", "speculative_eagle_topk", "speculative_adaptive"]
    ended = launch("parse", "--resolve", *line.split(), env={"FIELDS": json.dumps(fields)})
    assert ended.code == 0, ended.err
    assert json.loads(ended.out.splitlines()[-1])["fields"] == dict(zip(fields, (1, 1, False), strict=True))
    ignored = re.findall(r"(--[a-z-]+) is ignored: ", ended.err + ended.out)
    assert ignored == ([word for word in OTHERS.split() if word[0] == "-" and "window" not in word] if given else [])


@pytest.mark.parametrize("backup", ["--enable-weights-cpu-backup", "--enable-draft-weights-cpu-backup"])
def test_each_backup_keeps_the_draft(backup, launch, pair):
    line = CPU.format(target=pair["hybrid"], draft=pair["draft"])
    ended = launch("parse", "--resolve", *line.split(), "--enable-memory-saver", backup)
    assert ended.code == 0, ended.err
    arguments = json.loads(ended.out.splitlines()[-1])["arguments"]
    assert (arguments["memory_saver"], arguments["backs_up_draft"]) == (True, True)


def without(name: str, draft: Path) -> Path:
    (draft / name).unlink()
    return draft


@pytest.mark.parametrize(
    ("spoil", "sentence"),
    [
        (
            lambda draft: draft / "no-such-folder",
            "no-such-folder is no directory; give a directory, or the id of a repository such as",
        ),
        (partial(without, "config.json"), "has no config.json; give a DFlash draft's directory"),
        (partial(without, "model.safetensors"), "has a config.json and no *.safetensors; fetch the draft's weights"),
    ],
    ids=["does not exist", "no config", "no weights"],
)
def test_broken_draft_files_end_the_launch(spoil, sentence, launch, pair, checkpoints, tmp_path):
    """The launch ends before SGLang opens the draft's files. `draft/test_checkpoint.py` tests further faults."""
    draft = spoil(checkpoints.write_draft(tmp_path / "draft"))
    ended = launch("sglang.launch_server", *CPU.format(target=pair["dense"], draft=draft).split())
    assert ended.code not in (0, None), ended.err
    assert sentence in ended.last_line
    assert str(tmp_path) in ended.last_line


def test_a_draft_must_be_named(launch, pair):
    line = CPU.format(target=pair["dense"], draft="").replace("--speculative-draft-model-path ", "")
    ended = launch("sglang.launch_server", *line.split())
    assert ended.code not in (0, None)
    assert ended.last_line.endswith("ValueError: DFLASH needs a draft model; give --speculative-draft-model-path")


def test_a_launch_on_a_cpu_must_name_its_device(launch, pair):
    line = CPU.format(target=pair["dense"], draft=pair["draft"]).replace("--device cpu ", "")
    ended = launch("sglang.launch_server", *line.split())
    assert ended.code not in (0, None)
    assert "ValueError: torch finds no GPU; to serve on this CPU add --device cpu, else" in ended.last_line


@pytest.mark.ci
def test_bad_input_in_a_real_process(pair):
    line = CPU.format(target=pair["hybrid"], draft=pair["draft"]) + " --speculative-num-draft-tokens 64"
    ended = subprocess.run(
        [sys.executable, "-m", "sglang.launch_server", *line.split()],
        env=os.environ | {"CUDA_VISIBLE_DEVICES": "", "OMP_NUM_THREADS": "1"},
        stdout=subprocess.DEVNULL,
        stderr=subprocess.PIPE,
        text=True,
        timeout=300,
    )
    assert ended.returncode == 1
    assert ended.stderr.strip().splitlines()[-1].startswith("ValueError: block size 64 is not within 2..32")
