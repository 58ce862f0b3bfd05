"""The checkpoint reader must read the fields of a valid draft, and refuse an invalid one in one sentence."""

import json
from contextlib import nullcontext
from dataclasses import replace
from pathlib import Path
from types import ModuleType
from typing import Any

import httpx
import pytest
import torch
from huggingface_hub.errors import NotASafetensorsRepoError, RevisionNotFoundError, SafetensorsParsingError

from sglang_dflash.engine.draft import checkpoint, files, tensors
from sglang_dflash.engine.draft.mask_row import read_row
from sglang_dflash.errors import NotSupported

ROW = torch.arange(64.0)


@pytest.fixture
def folder(checkpoints: ModuleType, tmp_path: Path) -> Path:
    return checkpoints.write_draft(tmp_path / "draft")


def test_fields_of_a_draft_are_read(folder):
    draft = checkpoint.read(str(folder))
    assert (draft.block_size, draft.mask_token_id, draft.target_layer_ids) == (8, 3, (0, 2))
    assert (draft.num_hidden_layers, draft.hidden_size, draft.intermediate_size) == (2, 64, 96)
    assert (draft.num_attention_heads, draft.num_key_value_heads, draft.head_dim, draft.vocab_size) == (4, 2, 16, 128)
    assert (draft.rms_norm_eps, draft.attention_bias, draft.max_position_embeddings) == (1e-6, False, 512)
    assert (draft.layer_windows, draft.window, draft.sliding_window) == ((None, None), None, None)
    assert draft.feature_size == 128
    assert draft.rope_parameters == {"rope_type": "default", "rope_theta": 10000.0}
    assert (draft.dtype, draft.path) == ("bfloat16", str(folder))


def test_sliding_layers_look_back_and_full_layers_see_their_block(checkpoints, tmp_path):
    folder = checkpoints.write_draft(
        tmp_path, layer_types=["sliding_attention", "full_attention"], sliding_window=32, use_sliding_window=True
    )
    draft = checkpoint.read(str(folder))
    assert (draft.layer_windows, draft.window) == ((32, None), None)
    folder = checkpoints.write_draft(tmp_path, layer_types=["sliding_attention"] * 2, sliding_window=32)
    assert checkpoint.read(str(folder)).window == 32


def test_a_window_narrows_all_layers(folder):
    draft = checkpoint.read(str(folder))
    assert draft.narrowed(None) is draft
    narrow = draft.narrowed(16)
    assert (narrow.layer_windows, narrow.sliding_is_causal) == ((16, 16), False)
    assert narrow.narrowed(32) is narrow
    assert narrow.narrowed(8).layer_windows == (8, 8)
    assert replace(draft, full_is_causal=True).narrowed(16).sliding_is_causal
    mixed = replace(draft, layer_types=("sliding_attention", "full_attention"), sliding_window=32)
    assert replace(mixed, sliding_is_causal=False).narrowed(32).layer_windows == (32, 32)
    for unlike, window in ((mixed, 32), (replace(mixed, sliding_is_causal=False), 33)):
        with pytest.raises(NotSupported, match=f"^a draft window of {window} .* sliding layers of 32 tokens.*; drop"):
            unlike.narrowed(window)


@pytest.mark.parametrize(
    ("given", "rope"),
    [
        ({"rope_theta": 1e6}, {"rope_type": "default", "rope_theta": 1e6}),
        (
            {"rope_parameters": {"rope_type": "linear", "rope_theta": 5.0, "factor": 2.0}},
            {"rope_type": "linear", "rope_theta": 5.0, "factor": 2.0},
        ),
        (
            {"rope_theta": 5.0, "rope_scaling": {"type": "yarn", "factor": 2.0}},
            {"rope_type": "yarn", "rope_theta": 5.0, "factor": 2.0},
        ),
        (
            {
                "rope_parameters": {"rope_type": "default", "rope_theta": 5.0, "rope_dim": 16},
                "rope_scaling": {"type": "default", "mrope_section": [3, 3, 2]},
            },
            {"rope_type": "default", "rope_theta": 5.0},
        ),
    ],
)
def test_rope_fields_of_old_and_new_transformers(given, rope, checkpoints, tmp_path):
    folder = checkpoints.write_draft(tmp_path, **({"rope_parameters": None} | given))
    assert checkpoint.read(str(folder)).rope_parameters == rope


def test_unused_rotary_fields_of_the_target_are_ignored(checkpoints, tmp_path):
    rope = {"rope_type": "default", "rope_theta": 1e7}
    copied = {"partial_rotary_factor": 0.25, "mrope_section": [3, 3, 2], "mrope_interleaved": True, "rope_dim": 16}
    folder = checkpoints.write_draft(tmp_path, rope_parameters=rope | copied)
    assert checkpoint.read(str(folder)).rope_parameters == rope


def test_tensors_may_have_the_model_prefix_and_rotary_tables(checkpoints, folder):
    shapes = {f"model.{name}": shape for name, shape in checkpoints.draft_shapes().items()}
    checkpoints.write_tensors(folder, shapes | {"model.layers.0.self_attn.rotary_emb.inv_freq": [8]})
    assert checkpoint.read(str(folder)).num_hidden_layers == 2


def test_another_prefix_is_refused_by_name(checkpoints, folder):
    checkpoints.write_tensors(
        folder, {f"draft_model.{name}": shape for name, shape in checkpoints.draft_shapes().items()}
    )
    refused(
        folder, r"fc\.weight is stored as draft_model\.fc\.weight; save the draft without the prefix 'draft_model\.'"
    )


@pytest.mark.parametrize("file", ["model.safetensors", "older.safetensors"])
def test_a_tensor_that_is_stored_twice_is_refused(checkpoints, folder, file):
    """If files have two values of a tensor, the server and another reader may load different ones."""
    shapes = checkpoints.draft_shapes()
    checkpoints.write_tensors(
        folder, {"model.norm.weight": [64]} | (shapes if file == "model.safetensors" else {}), file
    )
    refused(folder, rf"norm\.weight is stored in .*, and as (model\.)?norm\.weight in .*{file}; remove one of them")


def test_dtypes_of_torch_and_of_older_transformers(checkpoints, tmp_path):
    folder = checkpoints.write_draft(tmp_path, dtype=None, torch_dtype="torch.float16")
    assert checkpoint.read(str(folder)).dtype == "float16"


def test_a_bias_has_the_width_of_its_projection(folder):
    """The draft has 4 heads and 2 KV heads, here of width 32, and a hidden size of 64."""
    draft = replace(checkpoint.read(str(folder)), attention_bias=True, head_dim=32)
    shapes = tensors.expected_shapes(draft)
    widths = {name: shapes[f"layers.1.self_attn.{name}_proj.bias"] for name in "qkvo"}
    assert widths == {"q": (128,), "k": (64,), "v": (64,), "o": (64,)}


def test_shards_are_found_through_their_index(checkpoints, folder):
    shapes = checkpoints.draft_shapes()
    names = sorted(shapes)
    halves = {"model-1.safetensors": names[:9], "model-2.safetensors": names[9:]}
    for file, half in halves.items():
        checkpoints.write_tensors(folder, {name: shapes[name] for name in half}, file)
    index = {"weight_map": {name: file for file, half in halves.items() for name in half}}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))
    (folder / "model.safetensors").unlink()
    assert checkpoint.read(str(folder)).num_hidden_layers == 2
    (folder / "model-2.safetensors").unlink()
    with pytest.raises(
        ValueError, match=r"model-2\.safetensors cannot be read as safetensors .* fetch the draft again"
    ):
        checkpoint.read(str(folder))


@pytest.mark.parametrize(
    ("changes", "error", "sentence"),
    [
        ({"architectures": None}, NotSupported, "architecture is missing"),
        ({"dflash_config": {"projector_type": "dspark"}}, NotSupported, "projector_type='dspark' is not DFlash"),
        ({"projector_type": "dspark"}, NotSupported, "projector_type='dspark' is not DFlash; give a DFlash draft"),
        ({"projector_type": "mlp"}, NotSupported, "projector_type='mlp' is not DFlash; give a DFlash draft$"),
        (
            {"dflash_config": {"tomorrow": 1}}, NotSupported,
            "tomorrow=1 is not DFlash, but an unknown variant; remove the field if",
        ),
        ({"dflash_config": {"attention_mode": "mla"}}, NotSupported, "'mla' is not gqa; give a DFlash draft$"),
        ({"rope_parameters": {"rope_type": "longrope"}}, NotSupported, "rope_type='longrope' is not one of default,"),
        (
            {"rope_parameters": {"full_attention": {"rope_theta": 1e6}}}, NotSupported,
            r"rope for each kind of layer \(full_attention\), .* write the fields directly into rope_parameters, else",
        ),
        (
            {"rope_scaling": {"type": "yarn", "factor": 2.0}}, ValueError,
            "rope_scaling {'rope_type': 'yarn', 'factor': 2.0} contradicts rope_parameters .*; remove the one",
        ),
        ({"rope_parameters": [1]}, ValueError, r"rope_parameters is \[1\], not an object"),
        ({"rope_parameters": {"rope_theta": "1e6"}}, ValueError, "rope_parameters: rope_theta '1e6' is not a number"),
        ({"rope_parameters": {"type": "yarn"}}, ValueError, "rope_parameters: config.json has no factor; add it"),
        ({"rope_parameters": {"type": "linear", "factor": [2]}}, ValueError, r"factor \[2\] is not a number above 0"),
        ({"rms_norm_eps": "1e-6"}, ValueError, "rms_norm_eps '1e-6' is not a number above 0"),
        ({"dtype": "bf16"}, ValueError, "dtype is 'bf16', not one of bfloat16, "),
        ({"architectures": "DFlashDraftModel"}, ValueError, "architectures is 'DFlashDraftModel', not a list"),
        ({"hidden_act": "gelu"}, NotSupported, "='gelu' is not DFlash .* or 'swigluoai'.; give a DFlash draft$"),
        (
            {"architectures": ["LiLiCorrDraftModel"]}, ValueError,
            "has no lilicorr_candidate_topk; add it to dflash_config$",
        ),
        ({"architectures": ["LlamaForCausalLM"]}, NotSupported, "LlamaForCausalLM, not .*; give a DFlash draft$"),
        (
            {"quantization_config": {"quant_method": "compressed-tensors", "format": "mxfp8-quantized"}}, NotSupported,
            r"is compressed-tensors, mxfp8-quantized with no config_groups: quantized drafts are read in .*; give one "
            r"of these, or the unquantized draft \(--speculative-draft-model-quantization fp8 quantizes it while it lo",
        ),
        ({"quantization_config": {"quant_method": "gptq"}}, NotSupported, "is gptq: quantized drafts are read in"),
        ({"block_size": None}, ValueError, "config.json has no block_size"),
        ({"block_size": "16"}, ValueError, "block_size is '16', not an integer of at least 2"),
        ({"dflash_config": {"target_layer_ids": None}}, ValueError, "json has no dflash_config.target_layer_ids"),
        ({"dflash_config": {"target_layer_ids": [1, 1]}}, ValueError, "do not increase"),
        ({"dflash_config": {"target_layer_ids": "0,2"}}, ValueError, "not a list of layer numbers"),
        ({"layer_types": ["full_attention"]}, ValueError, "layer_types has 1 entries for num_hidden_layers=2"),
        ({"layer_types": ["mamba", "full_attention"]}, NotSupported, "'mamba', .*; give a DFlash draft$"),
        ({"layer_types": ["sliding_attention"] * 2}, ValueError, "config.json has no sliding_window"),
        ({"num_key_value_heads": 3}, ValueError, "num_attention_heads=4 is not a multiple of num_key_value_heads=3"),
        ({"intermediate_size": 128}, ValueError, r"mlp\.gate_proj\.weight has shape \[96, 64\], .*s \[128, 64\]"),
        ({"dflash_config": {"target_layer_ids": [0, 1, 2]}}, ValueError, r"fc\.weight has shape \[64, 128\]"),
        ({"num_hidden_layers": 3, "layer_types": None}, ValueError, r"11 of 36 tensors are missing, .* layers\.2\."),
        (
            {"num_hidden_layers": 1, "layer_types": None}, NotSupported,
            r"11 tensors are not part .* layers\.1\..*; correct config.json",
        ),
        ({"attention_bias": True}, ValueError, r"8 of 33 tensors are missing, .*k_proj\.bias"),
    ],
    ids=lambda value: str(value)[:60] if isinstance(value, dict) else "",
)  # fmt: skip
def test_a_wrong_checkpoint_is_refused_in_one_sentence(changes, error, sentence, checkpoints, tmp_path):
    folder = checkpoints.write_draft(tmp_path / "draft", **changes)
    with pytest.raises(error, match=sentence) as refusal:
        checkpoint.read(str(folder))
    assert type(refusal.value) is error
    assert str(folder) in str(refusal.value)
    assert "\n" not in str(refusal.value)


def test_a_mask_embedding_of_the_drafts_own_is_found(folder):
    assert not checkpoint.read(str(folder)).has_mask_row
    torch.save({"embedding": ROW, "mask_token_id": 3}, folder / files.MASK_EMBEDDING)
    assert checkpoint.read(str(folder)).has_mask_embedding
    torch.save({"embedding": ROW, "mask_token_id": 4}, folder / files.MASK_EMBEDDING)
    with pytest.raises(ValueError, match="is for token 4"):  # before weights are loaded
        checkpoint.read(str(folder))


def test_a_repositorys_mask_embedding_is_found(folder, monkeypatch: pytest.MonkeyPatch):
    """A repository's config.json does not name the file, so it is looked for by its name."""
    asked = []

    def download(repository: str, name: str, *, revision: str | None) -> str:
        asked.append((repository, name, revision))
        return str(folder / name)

    (folder / files.MASK_EMBEDDING).write_bytes(b"")
    monkeypatch.setattr(files, "hf_hub_download", download)
    config = files.read_config("someone/draft", "v1")
    assert checkpoint.completed(config, "someone/draft", "v1")["has_mask_embedding"]
    assert ("someone/draft", "mask_embedding.pt", "v1") in asked


@pytest.mark.parametrize(
    ("stored", "sentence"),
    [
        ({"embedding": ROW, "mask_token_id": 3}, ""),
        (ROW[None], ""),
        ({"embedding": ROW, "mask_token_id": 4}, "is for token 4, and config.json has mask_token_id 3; fetch"),
        ({"embedding": ROW[1:]}, r"the embedding has shape \[63\], config.json implies \[64\]; fetch"),
        ({"mask_token_id": 3}, "the embedding is missing, config.json implies"),
        ({"embedding": ROW, "per_position": True}, "a row for every slot"),
        (b"no tensor", r"cannot be read \(\w+\); fetch the draft again"),
    ],
    ids=str,
)
def test_the_row_of_a_mask_embedding_is_read(stored: Any, sentence: str, folder: Path) -> None:
    draft, file = replace(checkpoint.read(str(folder)), hidden_size=64, mask_token_id=3), folder / files.MASK_EMBEDDING
    if isinstance(stored, bytes):
        file.write_bytes(stored)
    else:
        torch.save(stored, file)
    with pytest.raises(ValueError, match=sentence) if sentence else nullcontext():
        torch.testing.assert_close(read_row(draft, file), ROW)


@pytest.mark.parametrize(
    ("error", "sentence"),
    [
        (httpx.ProxyError("403"), r"fetched \(ProxyError\); run `hf download o/d --revision v1` on a"),
        (httpx.ConnectError("no route"), r"fetched \(ConnectError\); run `hf download o/d --revision v1` on a"),
        (SafetensorsParsingError("damaged"), r"^o/d: its weights are damaged \(damaged\); give another draft"),
        (
            NotASafetensorsRepoError("none"),
            r"o/d has no model\.safetensors .* `hf download o/d --revision v1`, .* `hf auth",
        ),
    ],
    ids=lambda value: type(value).__name__,
)
def test_a_repository_whose_weights_cannot_be_read_is_refused(error, sentence, monkeypatch):
    def fail(*_: object, **__: object) -> None:
        raise error

    monkeypatch.setattr(files, "_cached_snapshot", lambda *_: None)
    monkeypatch.setattr(files.HfApi, "get_safetensors_metadata", fail)
    with pytest.raises(ValueError, match=sentence):
        files.tensor_headers("o/d", "v1")


def test_a_refusing_proxy_is_no_traceback(monkeypatch):
    def fail(*_: object, **__: object) -> None:
        raise httpx.ProxyError("403 Forbidden")

    monkeypatch.setattr(files, "hf_hub_download", fail)
    with pytest.raises(ValueError, match=r"o/d is no directory and cannot be fetched \(ProxyError\)"):
        files.read_config("o/d", None)


def test_null_for_the_layer_types_counts_as_missing(folder):
    config = json.loads((folder / "config.json").read_text()) | {"layer_types": None}
    (folder / "config.json").write_text(json.dumps(config))
    assert checkpoint.read(str(folder)).layer_windows == (None, None)


def test_a_missing_revision_is_named(monkeypatch):
    def fail(*_: object, **__: object) -> None:
        raise RevisionNotFoundError("v9", response=httpx.Response(404, request=httpx.Request("GET", "http://hub")))

    monkeypatch.setattr(files, "hf_hub_download", fail)
    with pytest.raises(ValueError, match=r"^o/d has no revision v9; correct --speculative-draft-model-revision$"):
        files.read_config("o/d", "v9")


def refused(path: Path, sentence: str) -> None:
    with pytest.raises(ValueError, match=sentence):
        checkpoint.read(str(path))


def test_broken_draft_folders_are_refused(folder):
    weights = folder / "model.safetensors"
    whole = weights.read_bytes()
    weights.write_bytes(whole[:-100])
    refused(folder, "cannot be read as safetensors")
    weights.rename(folder / "pytorch_model.bin")
    refused(folder, r"has no \*\.safetensors, but pytorch_model\.bin; convert these to safetensors")
    (folder / "pytorch_model.bin").unlink()
    refused(folder, r"no \*\.safetensors; fetch the draft's weights")
    index = folder / "model.safetensors.index.json"
    for content in ("{}", '{"weight_map": {"fc.weight": 1}}'):
        index.write_text(content)
        refused(folder, r"index\.json has no weight_map from tensors to files; fetch the draft again")
    index.write_text('{"weight_map": ')
    refused(folder, r"index\.json is not JSON .* fetch the draft again")
    for content in (b'{"architectures": ', b"\xef\xbb\xbf{}", "{}".encode("utf-16")):
        (folder / "config.json").write_bytes(content)
        refused(folder, r"config\.json is not JSON .* fetch the draft again")
    (folder / "config.json").write_text("[]")
    refused(folder, "holds a list, not an object")
    refused(folder / "config.json", r"is a file; give the draft's directory")
    (folder / "config.json").unlink()
    refused(folder, r"has no config\.json")


def test_a_missing_draft_is_refused():
    refused(Path("no-such-owner/no such draft"), "no such draft is no directory and cannot be fetched .* give a direct")


@pytest.mark.parametrize(
    ("path", "cure"),
    [
        ("{}/drafft", r"; did you mean {}/draft\?"),
        ("{}/target", r"; give a directory, or the id of a repository such as z-lab/Qwen3-8B-DFlash-b16"),
        ("/no/such/draft", "; give a directory, or the id"),
        ("./draft", "; give a directory, or the id"),
        ("a/b/c", "; give a directory, or the id"),
    ],
)
def test_a_path_is_not_taken_for_a_name_on_the_hub(path, cure, tmp_path):
    (tmp_path / "draft").mkdir()
    (tmp_path / "draft.txt").touch()
    path = path.format(tmp_path)
    with pytest.raises(
        ValueError, match=f"--speculative-draft-model-path {path} is no directory{cure.format(tmp_path)}"
    ):
        files.read_config(path, None)
