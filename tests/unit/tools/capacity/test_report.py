"""Capacity report: reading of configs, sizes of known models, output as text and JSON, and the table of memory.md."""

import json
import struct
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM, LlamaConfig, Qwen3MoeConfig

from sglang_dflash.flags import Worker
from sglang_dflash.tools.capacity import geometry, options
from sglang_dflash.tools.capacity import known_models as models
from sglang_dflash.tools.capacity import report as capacity_report
from sglang_dflash.tools.capacity.division import GIB, RadixStates
from sglang_dflash.tools.capacity.geometry import Config, read_draft, read_target
from sglang_dflash.tools.check.__main__ import main as check
from tests.tools.tables import capacity as capacity_table

ROOT = Path(__file__).parents[4]
ASSETS = ROOT / "sglang_dflash" / "assets"
HYBRID = json.loads((ASSETS / "tiny" / "target" / "config.json").read_text())


def write(folder: Path, config: dict[str, Any]) -> str:
    folder.mkdir(exist_ok=True)
    (folder / "config.json").write_text(json.dumps(config))
    return str(folder)


def draft_bytes(name: str) -> int:
    draft = read_draft(name)
    return draft.split_bytes + draft.whole_bytes


@pytest.mark.parametrize("pair", ["tiny", "tiny_dense"])
def test_parameters_equal_those_of_the_checkpoint(pair, tmp_path):
    folder = ASSETS / pair / "target"
    counted = read_target(str(folder))
    assert counted.weights_from == "headers of the safetensors files"
    computed = read_target(write(tmp_path, json.loads((folder / "config.json").read_text())))
    assert computed.weights_from == "computed from config.json"
    assert computed.weight_bytes == counted.weight_bytes
    for draft in (ASSETS / pair).glob("draft*"):
        (file,) = draft.glob("*.safetensors")
        assert draft_bytes(str(draft)) == geometry._header_bytes(file)


def test_only_linear_layers_are_split_and_quantized():
    """Count the weights of attention and MLP in the tiny DFlash 2 draft: two bytes each in bf16, one in fp8.

    Ranks do not split its other matrices, and fp8 does not apply to them.
    """
    draft = read_draft(str(ASSETS / "tiny" / "draft2"))
    config = json.loads((ASSETS / "tiny" / "draft2" / "config.json").read_text())
    hidden, head_dim = config["hidden_size"], config["head_dim"]
    q, kv = config["num_attention_heads"] * head_dim, config["num_key_value_heads"] * head_dim
    layer = 2 * hidden * (q + kv) + 3 * hidden * config["intermediate_size"]
    assert draft.split_bytes == 2 * config["num_hidden_layers"] * layer
    quantized = read_draft(str(ASSETS / "tiny" / "draft2"), "fp8")
    assert quantized.split_bytes * 2 == draft.split_bytes
    assert quantized.whole_bytes == draft.whole_bytes


def drafter_parameters(name: str) -> int:
    """Count the parameters of the target checkpoint's MTP layer, which SGLang does not load under DFLASH."""
    config = Config(models.find(name, models.TARGETS).config, name)
    hidden = config.count("hidden_size")
    return geometry._attention(config) + geometry._mlp(config, 0) + 2 * hidden + 2 * hidden * hidden + 3 * hidden


@pytest.mark.parametrize(
    ("name", "published_bytes", "digits", "with_drafter"),
    [
        ("Qwen3-Coder-Next", 2 * 79_674_391_296, 0, False),
        ("Qwen3.6-35B-A3B", 71_903_645_408, 0, True),
        ("Qwen3.6-27B", 55.56e9, 5e6, True),
    ],
)
def test_known_targets_have_their_published_size(name, published_bytes, digits, with_drafter):
    drafter = 2 * drafter_parameters(name) if with_drafter else 0
    assert read_target(name).weight_bytes + drafter == pytest.approx(published_bytes, rel=0, abs=digits)


SMALL = {"hidden_size": 16, "intermediate_size": 24, "num_hidden_layers": 4, "vocab_size": 32}
HEADS = {"num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 8, "attention_bias": True}
EXPERTS = {"num_experts": 3, "num_experts_per_tok": 1, "moe_intermediate_size": 20}


@pytest.mark.parametrize(
    "config",
    [
        LlamaConfig(**SMALL, **HEADS, tie_word_embeddings=True),
        Qwen3MoeConfig(**SMALL, **HEADS, **EXPERTS, mlp_only_layers=[1]),
        Qwen3MoeConfig(**SMALL, **HEADS, **EXPERTS, decoder_sparse_step=3),
    ],
    ids=["biases", "a dense layer", "experts in every third layer"],
)
def test_parameters_equal_those_of_transformers(config):
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(config)
    assert geometry.n_parameters(Config(config.to_dict(), "x")) == sum(p.numel() for p in model.parameters())


@pytest.mark.parametrize(
    ("name", "published_bytes", "digits"),
    [
        ("Qwen3.5-27B-DFlash", 3.46e9, 5e6),
        ("Qwen3.6-27B-DFlash", 3.22 * GIB, 0.005 * GIB),
        ("Qwen3.8-27B-DFlash2", 3.85e9, 5e6),
        ("Qwen3.5-122B-A10B-DFlash", 1.5e9, 5e7),
        ("Qwen3-Coder-Next-DFlash", 0.88 * GIB, 0.005 * GIB),
    ],
)
def test_known_drafts_have_their_published_size(name, published_bytes, digits):
    assert draft_bytes(name) == pytest.approx(published_bytes, abs=digits)


SHORT_BLOCKS = {"z-lab/LLaMA3.1-8B-Instruct-DFlash-UltraChat": 10, "z-lab/Qwen3.8-27B-DFlash2": 8}


@pytest.mark.parametrize("name", [*models.TARGETS, *models.DRAFTS])
def test_every_known_model_can_be_read(name):
    if name in models.TARGETS:
        target = read_target(name.upper())
        assert target.source
        assert read_draft(models.draft_of(name.split("/")[-1])).n_heads % 8 == 0
    else:
        assert read_draft(name).block_size == SHORT_BLOCKS.get(name, 16)


def test_the_index_is_used_without_weight_files(tmp_path):
    folder = write(tmp_path, HYBRID | {"quantization_config": {"quant_method": "fp8"}})
    (tmp_path / "model.safetensors.index.json").write_text(json.dumps({"metadata": {"total_size": 12345}}))
    target = read_target(folder)
    assert target.weight_bytes == 12345
    assert target.weights_from == "model.safetensors.index.json, its own drafter included"


def test_a_drafter_in_the_files_is_not_counted(tmp_path):
    folder = write(tmp_path, HYBRID)
    tensors = {"model.norm.weight": [0, 100], "mtp.fc.weight": [100, 900]}
    header = {name: {"dtype": "BF16", "shape": [1], "data_offsets": span} for name, span in tensors.items()}
    text = json.dumps(header | {"__metadata__": {"format": "pt"}}).encode()
    (tmp_path / "model.safetensors").write_bytes(struct.pack("<Q", len(text)) + text)
    assert read_target(folder).weight_bytes == 100


def test_files_count_only_if_the_index_lists_them_and_all_are_there(tmp_path):
    folder, index = write(tmp_path, HYBRID), tmp_path / "model.safetensors.index.json"
    for name, n_bytes in (("model-1", 100), ("consolidated", 900)):
        text = json.dumps({"model.norm.weight": {"dtype": "BF16", "shape": [1], "data_offsets": [0, n_bytes]}}).encode()
        (tmp_path / f"{name}.safetensors").write_bytes(struct.pack("<Q", len(text)) + text)
    files = {"model.norm.weight": "model-1.safetensors"}
    index.write_text(json.dumps({"metadata": {"total_size": 500}, "weight_map": files}))
    assert read_target(folder).weight_bytes == 100
    for absent in ("model-2.safetensors", "folder/model-2.safetensors", ""):
        index.write_text(json.dumps({"metadata": {"total_size": 500}, "weight_map": files | {"x": absent}}))
        assert read_target(folder).weight_bytes == 500


def test_layers_by_interval_equal_layers_by_name():
    by_interval = {key: value for key, value in HYBRID.items() if key != "layer_types"}
    assert Config(by_interval, "x").layer_kinds() == HYBRID["layer_types"]


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        (
            {"model_type": "gemma4"},
            "model_type is 'gemma4', and only llama, qwen3, .* computed; put the safetensors files",
        ),
        ({"hidden_size": None}, "config.json has no hidden_size; add it"),
        ({"num_key_value_heads": "2"}, "num_key_value_heads is '2', not an integer of at least 1"),
        ({"dtype": "float8_e4m3fn"}, "dtype is 'float8_e4m3fn', and only float32, bfloat16, float16"),
        ({"dtype": None}, "dtype is missing, and only float32, .* can be computed; correct dtype in config.json"),
        ({"mamba_ssm_dtype": "fp4"}, "mamba_ssm_dtype is 'fp4'"),
        ({"layer_types": ["sliding_attention"] * 4}, "layers with sliding_attention cannot be computed; launch it"),
        ({"use_sliding_window": True}, "layers with a window cannot be computed"),
        ({"layer_types": ["full_attention"]}, "layer_types has 1 entries for num_hidden_layers 4"),
        ({"layer_types": None, "full_attention_interval": None}, "neither layer_types nor full_attention_interval"),
        (
            {"quantization_config": {"quant_method": "fp8"}},
            "quantized weights; put the safetensors files, or model.safetensors.index.json, into",
        ),
    ],
)
def test_incomplete_configs_are_refused(changes, message, tmp_path):
    with pytest.raises(ValueError, match=message):
        read_target(write(tmp_path, HYBRID | changes))


@pytest.mark.parametrize(
    ("text", "message"), [("{", "config.json is not JSON"), ("[]", "config.json holds a list, not an object")]
)
def test_malformed_configs_are_refused(text, message, tmp_path):
    (tmp_path / "config.json").write_text(text)
    with pytest.raises(ValueError, match=message):
        read_target(str(tmp_path / "config.json"))


@pytest.mark.parametrize(
    ("name", "message"),
    [
        (
            "openai/gpt-oss-120b",
            "^openai/gpt-oss-120b: its config is not in this package; pass a directory with its config.json$",
        ),
        ("GEMMA-4-31B-it", "^google/gemma-4-31B-it: its config is not in this package"),
        ("no/such-model", "is no directory, no config.json and none of the models known here .*Qwen3.5-27B"),
    ],
)
def test_unknown_models_are_refused(name, message):
    with pytest.raises(ValueError, match=message):
        read_target(name)


ASKED = ["--model", "Qwen3.5-27B", "--gpu-memory", "140.4"]


@pytest.mark.parametrize("text", ["140.4", "140.4GB", "140.4gib", "140.4 G"])
def test_memory_may_have_a_unit(text: str) -> None:
    options = capacity_report.arguments().parse_args(["--model", "Qwen3.5-27B", "--gpu-memory", text])
    assert options.gpu_memory == 140.4


def test_the_report_as_text(capsys):
    assert capacity_report.main(ASKED) == 0
    out = " ".join(capsys.readouterr().out.split())
    assert "Qwen3.5-27B + z-lab/Qwen3.5-27B-DFlash, 1 x 140.4 GiB (computed)" in out
    assert "target K and V per token 65,536 B 65,536 B" in out
    assert "per request for its block 41.02 MiB 2.29 GiB" in out
    assert "SGLang's DFLASH: 9 requests at once, bounded by recurrent state; 16 with --mamba-full-memory-ratio" in out
    assert "(P: computed, not measured)" in out


def test_as_json(capsys):
    assert capacity_report.main([*ASKED, "--json", "--context", "131072", "--mem-fraction", "0.85"]) == 0
    document = json.loads(capsys.readouterr().out)
    assert document["level"] == "P: computed"
    assert document["workers"]["stock"]["bound"] == "KV tokens"
    assert document["serving"]["mem_fraction"] == 0.85
    ours = document["workers"]["plugin"]
    assert ours["requests"] == min(ours["limits"].values())
    assert all(n > ours["requests"] for n in ours["lifts"].values())


LAUNCH = (
    "--speculative-draft-model-path z-lab/Qwen3.5-27B-DFlash --mem-fraction-static 0.75 --attention-backend fa3 "
    "--speculative-algorithm DFLASH --mamba-scheduler-strategy extra_buffer --trust-remote-code --tp-size 1 "
    "--speculative-num-draft-tokens 16 --served-model-name=x"
)


def test_launch_flags_can_be_pasted(capsys):
    """SGLang's flag names are accepted as aliases, and flags that do not affect memory are ignored."""
    asked = [*ASKED, "--mem-fraction", "0.75", "--json"]
    assert capacity_report.main(asked) == 0
    short = json.loads(capsys.readouterr().out)
    pasted = ["--model-path", "Qwen3.5-27B", "--gpu-memory", "140.4", "--json", *LAUNCH.split()]
    assert check(pasted) == 0
    long = json.loads(capsys.readouterr().out)
    assert short["workers"] == long["workers"]
    assert check([*pasted, "--disable-radix-cache"]) == 0
    assert json.loads(capsys.readouterr().out)["serving"]["radix"] == RadixStates.OFF


def test_a_misspelt_option_is_refused(capsys):
    for words, cure in (
        ("--mem-fraction-statick 1", "; did you mean --mem-fraction-static?"),
        ("80", ""),
        ("-- --x", ""),
    ):
        with pytest.raises(SystemExit, match="2"):
            capacity_report.main([*ASKED, *words.split()])
        assert f"unrecognized arguments: {words}{cure}\n" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("words", "sentence"),
    [
        ("--tp 0", "'0' is not a whole number above 0"),
        ("--page-size 1.5", "'1.5' is not a whole number above 0"),
        ("--gpu-memory -3", "'-3' is not a number above 0"),
        ("--mem-fraction 80", "'80' is not between 0 and 1"),
        ("--mem-fraction x", "'x' is not a number above 0"),
    ],
)
def test_impossible_values_are_refused(words, sentence, capsys):
    with pytest.raises(SystemExit, match="2"):
        capacity_report.main([*ASKED, *words.split()])
    assert capsys.readouterr().err.endswith(f"{sentence}\n")


def computed(*words: str) -> capacity_report.Report:
    return capacity_report.answer(options.arguments().parse_args([*ASKED, *words]))


def test_flags_that_are_not_counted_are_named(capsys):
    given = ["--enable-lora", "--lora-paths", "a=b", "c=d", "--dp-size=2", "--kv-cache-dtype", "mxfp8"]
    named = "Not counted, but may change these numbers: --enable-lora, --lora-paths, --dp-size, --kv-cache-dtype mxfp8."
    graphs = ["--chunked-prefill-size", "4096", "--cuda-graph-bs-decode", "1", "2"]
    default = "Not counted: --chunked-prefill-size, --cuda-graph-bs-decode. SGLang's default for"
    assert capacity_report.main([*ASKED, *given, *graphs]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert named in lines
    assert any(line.startswith(default) for line in lines)
    assert computed(*given, *graphs, "--mem-fraction-static", "0.8").not_counted == [named]
    assert capacity_report.document(computed(*given))["not_counted"] == [named]
    without = [word for name in options.WITHOUT_EFFECT for word in (name, "x")]
    assert computed(*without) == computed()


def test_flags_that_change_the_division_are_counted():
    """A type of one byte halves the target's K and V. A float32 model has weights, K and V twice as large."""
    plain, eight_bit, draft_only, wide = (
        computed(*words.split())
        for words in ("", "--kv-cache-dtype fp8_e4m3", "--speculative-draft-kv-cache-dtype fp8_e4m3", "--dtype float32")
    )
    for worker, now in plain.results.items():
        (target, draft), kv = (now.target_bytes_per_token, now.draft_bytes_per_token), "bytes_per_token"
        sizes = [
            (report.results[worker].target_bytes_per_token, report.results[worker].draft_bytes_per_token)
            for report in (eight_bit, draft_only, wide)
        ]
        assert sizes == [(target // 2, draft), (target, draft), (2 * target, 2 * draft)], kv
        assert all("--speculative-draft-kv-cache-dtype fp8" in one.not_counted[0] for one in (eight_bit, draft_only))
        assert wide.results[worker].target_weights == 2 * now.target_weights
        assert wide.results[worker].draft_weights == 2 * now.draft_weights
    few = computed("--max-total-tokens", "20001", "--page-size", "64", "--max-mamba-cache-size", "40")
    for worker, result in few.results.items():
        assert (result.n_tokens, result.n_states) == (312 * 64, 40)
        assert result.limits["recurrent state"] == 40 // RadixStates.EXTRA_BUFFER
        assert dict(capacity_report.lifts(few, worker)).keys() == {"without --max-total-tokens"}
    short = " ".join(capacity_report.sentences(few))
    assert "bounded by KV tokens; 8 without --max-total-tokens." in short


def test_page_size_and_memory_fraction_follow_other_flags():
    def pages(*words: str) -> int:
        return computed(*words).serving.page_size

    assert (pages(), pages("--attention-backend", "fa3")) == (1, 1)
    assert pages("--attention-backend", "fa3", "--speculative-draft-attention-backend", "trtllm_mha") == 64
    assert pages("--attention-backend", "trtllm_mha", "--page-size", "32") == 32
    assert pages("--attention-backend", "trtllm_mha", "--page-size", "8") == 64
    for card_gib, sizes in ((139, (1, 64)), (179, (128, 128))):
        fa4 = ("--attention-backend", "fa4", "--gpu-memory", str(card_gib))
        assert (pages(*fa4), pages(*fa4, "--page-size", "64")) == sizes
    assert computed("--max-running-requests", "8").serving.mem_fraction > computed().serving.mem_fraction
    assert computed("--speculative-draft-model-quantization", "unquant").results == computed().results


def test_limits_that_bind_are_the_cure():
    report = computed("--max-total-tokens", "24700", "--max-mamba-cache-size", "15")
    assert "after dropping --max-total-tokens and --max-mamba-cache-size." in " ".join(
        capacity_report.sentences(report)
    )


def test_a_pointer_of_git_lfs_is_no_weight_file(tmp_path):
    folder = write(tmp_path, HYBRID)
    (tmp_path / "model.safetensors").write_text("version https://git-lfs.github.com/spec/v1")
    with pytest.raises(ValueError, match="cannot be read as safetensors"):
        read_target(folder)


def test_quantized_weights_keep_their_size(tmp_path):
    folder = write(tmp_path, HYBRID | {"quantization_config": {"quant_method": "fp8"}})
    (tmp_path / "model.safetensors.index.json").write_text(json.dumps({"metadata": {"total_size": 12345}}))
    assert read_target(folder, 4).weight_bytes == 12345
    assert read_target(folder, 4).attention.itemsize == 4


@pytest.mark.parametrize(
    ("words", "states"),
    [
        ("", RadixStates.EXTRA_BUFFER),
        ("--mamba-radix-cache-strategy auto --disable-overlap-schedule", RadixStates.NO_BUFFER),
        ("--disable-overlap-schedule --page-size 64", 4),
        ("--disable-overlap-schedule --attention-backend fa4", RadixStates.NO_BUFFER),
        ("--mamba-radix-cache-strategy extra_buffer --disable-overlap-schedule", 4),
        ("--mamba-radix-cache-strategy no_buffer --disable-overlap-schedule", RadixStates.NO_BUFFER),
        ("--disable-radix-cache --disable-overlap-schedule", RadixStates.OFF),
    ],
)
def test_states_per_request_follow_the_schedule(words, states):
    assert computed(*words.split()).serving.radix == states


@pytest.mark.parametrize(
    ("file", "content", "sentence"),
    [
        ("model.safetensors.index.json", b"{", r"index\.json is not JSON .*; fetch the target again"),
        ("model.safetensors.index.json", b"{}", r"index\.json has no metadata\.total_size; fetch the target again"),
        (
            "model.safetensors",
            struct.pack("<Q", 3) + b"{\xff",
            "cannot be read as safetensors .*; fetch the target again",
        ),
    ],
)
def test_damaged_weight_files_are_refused(file, content, sentence, tmp_path):
    folder = write(tmp_path, HYBRID)
    (tmp_path / file).write_bytes(content)
    with pytest.raises(ValueError, match=sentence):
        read_target(folder)


def test_flags_of_a_small_card_are_suggested(capsys):
    """Qwen3-8B does not fit on 24 GB with SGLang's defaults, which leave 7 GB free."""
    asked = ["--model", "Qwen3-8B", "--gpu-memory", "23.6"]
    flags = (
        "--mem-fraction-static 0.829 --chunked-prefill-size 2048 --max-running-requests 8 --cuda-graph-max-bs-decode 8"
    )
    assert capacity_report.main(asked) == 1
    assert f"fits, bounded by weights; 1 with {flags} or " in capsys.readouterr().out
    assert capacity_report.main([*asked, *flags.split()]) == 0
    assert "sglang-dflash: 1 requests at once" in capsys.readouterr().out


def test_a_small_card_with_recurrent_states_gets_their_ratio_too():
    asked = ["--model", "Qwen3.6-27B-NVFP4", "--gpu-memory", "31.4", "--json"]
    found = capacity_report.answer(options.arguments().parse_args(asked))
    flags = next(flag for flag in dict(capacity_report.lifts(found, Worker.PLUGIN)) if flag.startswith("--mem"))
    assert "--mamba-full-memory-ratio" in flags
    assert capacity_report.main([*asked, *flags.split()]) == 0


@pytest.mark.parametrize(
    ("quantization", "file", "is_fp8"),
    [
        ({"quant_method": "modelopt", "kv_cache_scheme": {"type": "float", "num_bits": 8}}, None, True),
        ({"quant_method": "modelopt", "kv_cache_scheme": {"type": "float", "num_bits": 4}}, None, False),
        ({"quant_method": "compressed-tensors", "kv_cache_scheme": {"type": "float", "num_bits": 8}}, None, False),
        ({"quant_method": "fp8", "kv_cache_quant_algo": "FP8"}, None, True),
        ({"quant_method": "modelopt"}, {"quantization": {"kv_cache_quant_algo": "FP8"}}, True),
        ({"quant_method": "awq"}, None, False),
    ],
)
def test_fp8_keys_and_values_of_a_checkpoint_are_counted(quantization, file, is_fp8, tmp_path):
    folder = write(tmp_path, HYBRID | {"quantization_config": quantization})
    (tmp_path / "model.safetensors.index.json").write_text(json.dumps({"metadata": {"total_size": 12345}}))
    if file:
        (tmp_path / "hf_quant_config.json").write_text(json.dumps(file))
    target = read_target(folder)
    assert (target.attention.itemsize, target.itemsize) == (1 if is_fp8 else 2, 2)


def test_a_draft_keeps_its_dtype_beside_fp8_keys_and_values():
    nvfp4, bf16 = (computed("--model", f"Qwen3.6-27B{suffix}", "--page-size", "1") for suffix in ("-NVFP4", ""))
    assert nvfp4.target.attention.itemsize == 1
    assert nvfp4.draft == bf16.draft
    assert computed("--model", "Qwen3.6-27B-NVFP4", "--kv-cache-dtype", "bf16").target.attention.itemsize == 2


def test_promised_lifts_hold(capsys):
    """With each printed flag the capacity equals the number printed next to it."""
    for changes in ([], ["--context", "65536"], ["--gpu-memory", "60"], ["--max-running-requests", "4"]):
        asked = [*ASKED, "--mem-fraction", "0.85", "--json", *changes]
        capacity_report.main(asked)
        promised = json.loads(capsys.readouterr().out)["workers"]
        assert promised["plugin"]["lifts"]
        for worker, result in promised.items():
            for flag, n in result["lifts"].items():
                capacity_report.main([*asked, *flag.split()])
                assert json.loads(capsys.readouterr().out)["workers"][worker]["requests"] == n, flag


def test_a_window_does_not_hide_that_more_requests_may_run(capsys):
    """Each request that may run takes memory, for its ring and its token history, also if it does not run."""
    asked = ["--model", "Qwen3-8B", "--gpu-memory", "140.4", "--window", "4096", "--json"]
    capacity_report.main(asked)
    ((flag, n),) = json.loads(capsys.readouterr().out)["workers"]["plugin"]["lifts"].items()
    assert flag == f"--max-running-requests {n}"
    for more, fit in ((0, True), (1, False)):
        capacity_report.main([*asked, "--max-running-requests", str(n + more)])
        found = json.loads(capsys.readouterr().out)["workers"]["plugin"]["requests"]
        assert (found == n + more) == fit


def test_states_in_half_precision(capsys):
    capacity_report.main([*ASKED, "--mamba-ssm-dtype", "bfloat16", "--json"])
    assert json.loads(capsys.readouterr().out)["workers"]["stock"]["requests"] == 18


def test_an_unknown_draft_is_refused(capsys):
    assert capacity_report.main(["--model", str(ASSETS / "tiny" / "target"), "--gpu-memory", "80"]) == 1
    assert capsys.readouterr().err.strip().endswith("tiny/target; give --draft")


def test_too_small_a_card_is_reported(capsys):
    assert capacity_report.main(["--model", "Qwen3.5-122B-A10B", "--gpu-memory", "80"]) == 1
    assert (
        "sglang-dflash: no request of 8,192 tokens fits, bounded by weights; 9 with --tp-size 4."
        in capsys.readouterr().out
    )


def test_check_runs_the_capacity_report(capsys):
    pair = ["--model", str(ASSETS / "tiny" / "target"), "--draft", str(ASSETS / "tiny" / "draft")]
    for memory in (["--gpu-memory", "24"], ["--gpu-memory=24"]):
        assert check([*pair, *memory]) == 0
        assert "requests at once" in capsys.readouterr().out


def test_the_report_needs_neither_sglang_nor_torch():
    code = "import sys; import sglang_dflash.tools.capacity.report; print({'sglang', 'torch'} & set(sys.modules))"
    out = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout
    assert out.strip() == "set()"


def test_the_page_has_the_computed_table():
    page = (ROOT / "sglang_dflash" / "docs" / "memory.md").read_text()
    assert "\n".join(capacity_table.rows()) in page
