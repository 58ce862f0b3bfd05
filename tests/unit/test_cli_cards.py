"""Command lines of the published drafts' model cards must parse with the plugin loaded, old flag names included.

Model paths are replaced by local ones. There is no GPU, so a line is tested in two steps: SGLang parses it, then
`config.combine` chooses the draft's backend for the GPU that the model card names.
"""

import json
from dataclasses import replace
from types import ModuleType
from typing import Any, NamedTuple

import pytest

from sglang_dflash import flags
from sglang_dflash.engine.config import combine
from sglang_dflash.engine.draft import checkpoint
from sglang_dflash.engine.host.arguments import Arguments, TargetFacts

TARGET = TargetFacts(
    "target", "Qwen3_5ForCausalLM", hidden_size=64, vocab_size=128, n_layers=4, dtype="bfloat16", recurrent=True
)


class Card(NamedTuple):
    line: str
    device: str  # architecture of the model card's GPU
    env: dict[str, str]
    fields: dict[str, Any]
    draft_backend: str
    draft_window: int | None = None


OVERLAP = {"SGLANG_ENABLE_SPEC_V2": "1", "SGLANG_ENABLE_DFLASH_SPEC_V2": "1", "SGLANG_ENABLE_OVERLAP_PLAN_STREAM": "1"}
LONGER = {"SGLANG_ALLOW_OVERWRITE_LONGER_CONTEXT_LEN": "1"}
FA3 = (
    "--model-path {target} --speculative-algorithm DFLASH --speculative-draft-model-path {draft} "
    "--speculative-num-draft-tokens 16 --tp-size 1 --attention-backend fa3 --mem-fraction-static 0.75 "
    "--mamba-scheduler-strategy extra_buffer --trust-remote-code"
)
FA3_FIELDS = {
    "speculative_algorithm": "DFLASH",
    "speculative_num_draft_tokens": 16,
    "tp_size": 1,
    "attention_backend": "fa3",
    "mem_fraction_static": 0.75,
    "mamba_radix_cache_strategy": "extra_buffer",
    "trust_remote_code": True,
    "disable_overlap_schedule": False,
    "speculative_draft_window_size": None,
}
TRTLLM = FA3.replace("fa3", "trtllm_mha --speculative-draft-attention-backend fa4")
FA4 = {"speculative_draft_attention_backend": "fa4"}
TRTLLM_FIELDS = FA3_FIELDS | {"attention_backend": "trtllm_mha"} | FA4
CARDS = {
    "Qwen3.5-27B": Card(FA3, "sm90", {}, FA3_FIELDS, "fa3"),
    "Qwen3.5-27B, overlap": Card(FA3, "sm90", OVERLAP, FA3_FIELDS, "fa3"),
    "Qwen3.5-27B, window": Card(
        FA3 + " --speculative-dflash-draft-window-size 4096", "sm90", {},
        FA3_FIELDS | {"speculative_draft_window_size": 4096}, "fa3", draft_window=4096,
    ),
    "Qwen3.6-35B-A3B": Card(FA3, "sm90", {}, FA3_FIELDS, "fa3"),
    "Qwen3.5-35B-A3B": Card(TRTLLM, "sm100", LONGER, TRTLLM_FIELDS, "fa4"),
    "Qwen3.5-35B-A3B, overview": Card(
        TRTLLM.replace("--mamba-scheduler-strategy extra_buffer ", ""), "sm100", LONGER,
        TRTLLM_FIELDS | {"mamba_radix_cache_strategy": "auto"}, "fa4",
    ),
    "gemma-4-31B-it": Card(
        "--model-path {target} --speculative-algorithm DFLASH --speculative-draft-model-path {draft} "
        "--speculative-num-draft-tokens 16 --tp-size 1 --attention-backend triton "
        "--speculative-draft-attention-backend fa4 --trust-remote-code",
        "sm100", {},
        {"attention_backend": "triton", "mamba_radix_cache_strategy": "auto"} | FA4, "fa4",
    ),
}  # fmt: skip


@pytest.fixture(scope="module")
def draft_16(checkpoints: ModuleType, tmp_path_factory: pytest.TempPathFactory) -> str:
    """Return a draft with blocks of 16, like the published drafts."""
    return str(checkpoints.write_draft(tmp_path_factory.mktemp("cards") / "draft", block_size=16))


def parse(launch: Any, line: str, env: dict[str, str], fields: list[str], *flags: str) -> dict[str, Any]:
    ended = launch("parse", *flags, *line.split(), env=env | {"FIELDS": json.dumps(fields)})
    assert ended.code == 0, ended.err
    return json.loads(ended.out.splitlines()[-1])


@pytest.mark.parametrize("name", CARDS)
@pytest.mark.parametrize("target", ["hybrid", "dense"])
def test_a_cards_command_line_resolves_as_documented(name, target, launch, pair, draft_16):
    card = CARDS[name]
    line = card.line.format(target=pair[target], draft=draft_16)
    parsed = parse(launch, line, card.env, list(card.fields))
    assert parsed["fields"] == card.fields
    assert (parsed["flags"]["worker"], parsed["flags"]["overlap"]) == ("plugin", True)
    parsed["arguments"]["accept_thresholds"] = tuple(parsed["arguments"]["accept_thresholds"])
    arguments = replace(Arguments(**parsed["arguments"]), device=card.device)
    config = combine(arguments, TARGET, checkpoint.read(draft_16), flags.read(card.env))
    assert (config.block_size, config.draft_attention_backend) == (16, card.draft_backend)
    assert config.draft_window == card.draft_window


def test_block_8_of_the_cards_tables_runs_with_a_16_draft(launch, pair, draft_16):
    line = FA3.format(target=pair["hybrid"], draft=draft_16).replace("tokens 16", "tokens 8")
    parsed = parse(launch, line, {}, ["speculative_num_draft_tokens"])
    arguments = replace(Arguments(**parsed["arguments"]), device="sm90", accept_thresholds=(1.0, 1.0))
    config = combine(arguments, TARGET, checkpoint.read(draft_16), flags.read({}))
    assert (config.block_size, config.draft.block_size) == (8, 16)


CPU = (
    "--model-path {target} --device cpu --attention-backend torch_native --speculative-algorithm DFLASH "
    "--speculative-draft-model-path {draft} --max-total-tokens 1024 --disable-radix-cache "
)
RESOLVED = ["speculative_num_draft_tokens", "speculative_draft_attention_backend", "disable_overlap_schedule"]


@pytest.mark.parametrize(
    ("env", "overlap_off"),
    [
        ({}, False),
        (OVERLAP, False),
        ({"SGLANG_ENABLE_SPEC_V2": "0"}, True),
        ({"SGLANG_ENABLE_DFLASH_SPEC_V2": "false"}, True),
    ],
)
def test_old_overlap_switches_reach_the_resolved_arguments(env, overlap_off, launch, pair):
    line = CPU.format(target=pair["dense"], draft=pair["draft"])
    fields = parse(launch, line, env, RESOLVED, "--resolve")["fields"]
    assert fields == dict(zip(RESOLVED, (8, "torch_native", overlap_off), strict=True))


def test_a_smaller_block_reaches_the_resolved_arguments(launch, pair):
    line = CPU.format(target=pair["hybrid"], draft=pair["draft"]) + "--speculative-dflash-block-size 4"
    assert parse(launch, line, {}, RESOLVED, "--resolve")["fields"]["speculative_num_draft_tokens"] == 4


def test_the_stock_worker_skips_the_plugins_checks(launch, pair):
    """SGLang only warns of a block longer than the trained one. The plugin refuses it."""
    line = CPU.format(target=pair["dense"], draft=pair["draft"]) + "--speculative-num-draft-tokens 12"
    stock = {"SGLANG_DFLASH_WORKER": "stock"}
    assert parse(launch, line, stock, RESOLVED, "--resolve")["fields"]["speculative_num_draft_tokens"] == 12


def test_a_draft_may_be_a_repository(launch, pair, checkpoints, hub):
    """A draft given as a repository is read and checked in the cache of the Hugging Face client."""
    checkpoints.write_cached(hub, "z-lab/Tiny-DFlash", block_size=6)
    line = CPU.format(target=pair["dense"], draft="z-lab/Tiny-DFlash")
    assert parse(launch, line, {}, RESOLVED, "--resolve")["fields"]["speculative_num_draft_tokens"] == 6


def test_a_repository_without_its_weights_is_refused(launch, pair, checkpoints, hub):
    (checkpoints.write_cached(hub, "z-lab/Half-DFlash") / "model.safetensors").unlink()
    line = CPU.format(target=pair["dense"], draft="z-lab/Half-DFlash")
    ended = launch("parse", "--resolve", *line.split())
    assert ended.code == 1
    assert "z-lab/Half-DFlash: its weights are not here and cannot be fetched" in ended.last_line
