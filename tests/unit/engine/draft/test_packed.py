"""Quantized weights of draft files must be read as their formats define them, or refused by name.

`tests/fixtures/packing.py` writes the files, partly with the library `compressed_tensors`. The definitions below decode
one weight at a time, from its bits.
"""

import json
import logging
import random
import subprocess
import sys
from collections.abc import Callable, Mapping
from copy import deepcopy
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from sglang.srt.configs.model_config import ModelConfig
from sglang.srt.utils.hf_transformers.config import get_config

from sglang_dflash.engine.draft import checkpoint, files
from sglang_dflash.engine.draft.packed import packing_of, plain_shapes, unpacked
from sglang_dflash.engine.draft.sglang_config import not_quantized, read_draft
from sglang_dflash.errors import NotSupported
from sglang_dflash.pairs.tiny.pairs import DENSE, DENSE_2
from sglang_dflash.reference.torch import DraftModel
from tests.fixtures.packing import FORMATS, quantized, quantized_draft

PLAIN = load_file(DENSE_2.draft / "model.safetensors")


def parsed(form: str) -> Any:
    return packing_of({"quantization_config": FORMATS[form].config}, "the draft")


def read(stored: Mapping[str, torch.Tensor], form: str) -> dict[str, torch.Tensor]:
    return dict(unpacked(stored.items(), parsed(form), torch.float32))


# -- definitions ---------------------------------------------------------------------------------------------------


def e2m1(code: int) -> float:
    """Return the value of 4 bits: sign, two bits of exponent, one of mantissa."""
    sign, exponent, mantissa = -1.0 if code & 8 else 1.0, code >> 1 & 3, code & 1
    return sign * (0.5 * mantissa if exponent == 0 else 2.0 ** (exponent - 1) * (1 + 0.5 * mantissa))


def e4m3(byte: int) -> float:
    """Return the value of 8 bits: sign, four bits of exponent, three of mantissa."""
    sign, exponent, mantissa = -1.0 if byte & 128 else 1.0, byte >> 3 & 15, byte & 7
    return sign * (mantissa * 2.0**-9 if exponent == 0 else 2.0 ** (exponent - 7) * (1 + mantissa / 8))


def number(parts: Mapping[str, torch.Tensor], row: int, column: int, bits: int) -> float:
    """Return one stored number, before it is scaled."""
    matrix = parts["weight_packed"] if "weight_packed" in parts else parts["weight"]
    if matrix.dtype == torch.int32:  # the first weight is in the lowest bits; an offset makes all positive
        n_fields = 32 // bits
        word = int(matrix[row, column // n_fields]) & 0xFFFFFFFF
        return (word >> bits * (column % n_fields) & (2**bits - 1)) - 2 ** (bits - 1)
    if matrix.dtype == torch.uint8:  # the first weight is in the lower half
        byte = int(matrix[row, column // 2])
        return e2m1(byte >> 4 if column % 2 else byte & 15)
    if matrix.dtype == torch.int8:
        return int(matrix[row, column])
    return e4m3(int(matrix.view(torch.uint8)[row, column]))


def scale_at(parts: Mapping[str, torch.Tensor], block: tuple[int, int], row: int, column: int) -> float:
    scale = parts["weight_scale_inv"] if "weight_scale_inv" in parts else parts["weight_scale"]
    rows, columns = block
    index = (row // rows if rows else 0, column // columns if columns else 0)
    if scale.ndim == 4:
        one = scale[index[0], 0, index[1], 0]
    elif scale.ndim == 2:
        one = scale[index]
    else:
        one = scale.reshape(-1)[index[0]]
    value = float(one)
    if "weight_global_scale" in parts:
        value /= float(parts["weight_global_scale"])
    return value * float(parts.get("weight_scale_2", 1.0))


SHAPES = (3, 256), (130, 160), (256, 384)
# Groups of 4-bit weights are always whole. Blocks of fp8 weights may be cut off at both edges.
CASES = [(form, shape) for form in FORMATS for shape in SHAPES if form != "int4" or shape[1] % 128 == 0]


@pytest.mark.parametrize(("form", "shape"), CASES, ids=str)
def test_weights_equal_their_definition(form: str, shape: tuple[int, int]) -> None:
    block, packing = FORMATS[form].block, parsed(form)
    torch.manual_seed(0)
    weight = torch.randn(shape) * torch.rand(shape[0], 1) * torch.rand(1, shape[1])  # scales differ everywhere
    stored = quantized({"fc.weight": weight}, form)
    (name, found), *others = read(stored, form).items()
    assert (name, others, found.dtype, tuple(found.shape)) == ("fc.weight", [], torch.float32, shape)
    headers = {name: files.Stored(dtype(one), tuple(one.shape)) for name, one in stored.items()}
    assert plain_shapes(headers, packing, "the draft") == {"fc.weight": shape}
    parts = {name.removeprefix("fc."): tensor for name, tensor in stored.items()}
    rows, columns = ({0, 1, n // 2, n - 1, *random.Random(0).sample(range(n), min(n, 40))} for n in shape)
    for row in rows:
        for column in columns:
            expected = number(parts, row, column, packing.bits) * scale_at(parts, block, row, column)
            assert float(found[row, column]) == pytest.approx(expected, rel=1e-6, abs=0), (row, column)
    step = {"I32": 0.08 if packing.bits == 4 else 0.008, "U8": 0.19, "I8": 0.008, "F8_E4M3": 0.04}[packing.dtype]
    assert (found - weight).abs().max() < step * weight.abs().max()


def dtype(tensor: torch.Tensor) -> str:
    names = {torch.int32: "I32", torch.uint8: "U8", torch.float8_e4m3fn: "F8_E4M3", torch.int8: "I8"}
    return names.get(tensor.dtype, "F32")


# -- a draft's files -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("form", FORMATS)
def test_drafts_are_read_whole(form: str, tmp_path: Path) -> None:
    """Every matrix is converted: `fc`, projections, MLP, the convolutions' and the selector's projection."""
    folder = quantized_draft(DENSE_2.draft, tmp_path / "draft", form)
    assert checkpoint.read(str(folder)) == checkpoint.read(str(DENSE_2.draft))
    found = DraftModel.from_pretrained(folder, dtype=torch.float32).state_dict()
    for name, plain in PLAIN.items():
        converted = name.endswith(".weight") and plain.ndim == 2
        assert torch.equal(found[name], plain.float()) == (not converted), name
        assert (found[name] - plain.float()).abs().max() < 0.2 * plain.float().abs().max(), name
    assert found.keys() == PLAIN.keys()


def test_without_a_dtype_a_draft_has_that_of_its_config(tmp_path: Path) -> None:
    folder = quantized_draft(DENSE.draft, tmp_path / "draft", "int4")
    draft = DraftModel.from_pretrained(folder)
    assert {tensor.dtype for tensor in draft.state_dict().values()} == {torch.bfloat16}
    draft.save_pretrained(tmp_path / "saved")
    assert "quantization_config" not in json.loads((tmp_path / "saved" / "config.json").read_text())
    again = DraftModel.from_pretrained(tmp_path / "saved").state_dict()
    assert all(torch.equal(again[name], tensor) for name, tensor in draft.state_dict().items())


@pytest.mark.parametrize("form", ["int4", "fp8-block", "modelopt-nvfp4"])
def test_parts_may_have_any_order_prefix_and_file(form: str, tmp_path: Path) -> None:
    folder = quantized_draft(DENSE_2.draft, tmp_path / "draft", form)
    expected = DraftModel.from_pretrained(folder).state_dict()
    stored = list(load_file(folder / "model.safetensors").items())
    random.Random(0).shuffle(stored)
    (folder / "model.safetensors").unlink()
    index = {}
    for i in range(3):
        part = {f"model.{name}" if j % 2 else name: one for j, (name, one) in enumerate(stored) if j % 3 == i}
        save_file(part, folder / f"model-{i}.safetensors")
        index |= dict.fromkeys(part, f"model-{i}.safetensors")
    (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": index}))
    found = DraftModel.from_pretrained(folder).state_dict()
    assert found.keys() == expected.keys()
    assert all(torch.equal(found[name], tensor) for name, tensor in expected.items())


def test_prefixes_may_differ_between_parts() -> None:
    """SGLang's loader gets names as stored. Some exporters add a prefix to a part of the names."""
    stored = quantized({"fc.weight": torch.randn(2, 128)}, "int4")
    mixed = {f"model.{name}" if i == 1 else name: tensor for i, (name, tensor) in enumerate(stored.items())}
    assert torch.equal(read(mixed, "int4")["fc.weight"], read(stored, "int4")["fc.weight"])


@pytest.mark.parametrize("form", FORMATS)
def test_plain_modules_are_not_converted(form: str, tmp_path: Path) -> None:
    """Writers leave out modules, under names that differ between engines. Dtypes in the files identify them."""
    folder = quantized_draft(DENSE_2.draft, tmp_path / "draft", form, plain=("kernel_projection", "fc", "k_proj"))
    found = DraftModel.from_pretrained(folder, dtype=torch.float32).state_dict()
    for name in ("fc.weight", "layers.0.self_attn.k_proj.weight", "layers.1.mlp_conv.kernel_projection.weight"):
        assert torch.equal(found[name], PLAIN[name].float()), name
    assert not torch.equal(found["layers.0.self_attn.q_proj.weight"], PLAIN["layers.0.self_attn.q_proj.weight"].float())


def test_a_weight_is_converted_when_its_last_part_is_read() -> None:
    """At most the parts of open weights are held, not a whole draft."""
    stored = list(quantized({f"layers.{i}.mlp.up_proj.weight": torch.randn(2, 128) for i in range(3)}, "int4").items())
    n_read = 0

    def pairs() -> Any:
        nonlocal n_read
        for pair in stored:
            n_read += 1
            yield pair

    assert [n_read for _ in unpacked(pairs(), parsed("int4"), torch.bfloat16)] == [3, 6, 9]


def test_scales_of_activations_and_kv_cache_are_named_in_the_log(caplog: pytest.LogCaptureFixture) -> None:
    stored = quantized({"fc.weight": torch.randn(2, 128)}, "nvfp4") | {
        "layers.0.self_attn.k_scale": torch.ones(1), "layers.0.self_attn.v_proj.v_scale": torch.ones(1),
        "layers.0.self_attn.q_norm.weight": torch.ones(4),
    }  # fmt: skip
    with caplog.at_level(logging.INFO):
        assert read(stored, "nvfp4").keys() == {"fc.weight", "layers.0.self_attn.q_norm.weight"}
    assert caplog.messages == ["3 scales of activations or of the KV cache are not used, such as fc.input_global_scale"]


def test_plain_drafts_are_not_touched() -> None:
    pairs = [("model.fc.weight", torch.ones(1)), ("fc.weight_scale", torch.ones(1))]
    assert list(unpacked(pairs, None, torch.float32)) == pairs


# -- wrong files ---------------------------------------------------------------------------------------------------

WRONG: dict[str, tuple[str, Callable[[dict[str, torch.Tensor]], dict[str, Any]], str]] = {
    "no scale": ("int4", lambda stored: {"fc.weight_scale": None}, "fc has weight_.* and weight_.*, but no weight_sc"),
    "no shape": ("int4", lambda stored: {"fc.weight_shape": None}, "fc has weight_.* and weight_.*, but no weight_sh"),
    "no numbers": ("int4", lambda stored: {"fc.weight_packed": None}, "but no weight_packed in the format compressed-"),
    "no scale of fp8": ("fp8-block", lambda stored: {"fc.weight_scale": None}, "fc has weight, but no weight_scale"),
    "no scale of scales": ("nvfp4", lambda stored: {"fc.weight_global_scale": None}, "but no weight_global_scale"),
    "plain numbers": (
        "fp8", lambda stored: {"fc.weight": stored["fc.weight"].bfloat16()}, "fc has weight_scale, but no weight in",
    ),
    "a transposed scale": (
        "int4", lambda stored: {"fc.weight_scale": stored["fc.weight_scale"].T.contiguous()},
        r"fc\.weight of shape \[128, 384\] has weight_scale of shape \[3, 128\], and .* implies \[128, 3\]",
    ),
    "smaller groups": (
        "int4", lambda stored: {"fc.weight_scale": stored["fc.weight_scale"].repeat_interleave(2, 1)},
        r"has weight_scale of shape \[128, 6\], and compressed-tensors, pack-quantized implies \[128, 3\]",
    ),
    "a scale per row": (
        "fp8", lambda stored: {"fc.weight_scale": torch.ones(128)}, r"has weight_scale of shape \[128\], .*s \[1, 1\]",
    ),
    "MXFP4's scales": (
        "nvfp4", lambda stored: {"fc.weight_scale": stored["fc.weight_scale"].view(torch.uint8)},
        "has weight_scale of dtype U8, which is not a float",
    ),
    "a scale of scales per row": (
        "nvfp4", lambda stored: {"fc.weight_global_scale": torch.ones(128)}, r"weight_global_scale of shape \[128\]",
    ),
    "other numbers": (
        "int4", lambda stored: {"fc.weight_packed": stored["fc.weight_packed"].view(torch.uint8)},
        r"fc\.weight is stored as U8 \[128, 192\], and compressed-tensors, pack-quantized has matrices of I32",
    ),
    "one more matrix": (
        "int4", lambda stored: {"fc.weight_packed": stored["fc.weight_packed"][None]}, r"is stored as I32 \[1, 128, 48",
    ),
}  # fmt: skip


def broken(folder: Path, form: str, change: Callable[[dict[str, torch.Tensor]], dict[str, Any]]) -> dict[str, Any]:
    """Change tensors of a quantized draft; None removes a tensor. Returns the tensors."""
    quantized_draft(DENSE.draft, folder, form)
    stored = load_file(folder / "model.safetensors")
    stored = {name: tensor for name, tensor in (stored | change(stored)).items() if tensor is not None}
    save_file(stored, folder / "model.safetensors")
    return stored


@pytest.mark.parametrize("case", WRONG)
def test_wrong_parts_are_refused_by_name(case: str, tmp_path: Path) -> None:
    """The headers suffice to refuse a file. A loader that gets only tensors must refuse them too."""
    form, change, sentence = WRONG[case]
    folder = tmp_path / "draft"
    stored = broken(folder, form, change)
    with pytest.raises(ValueError, match=sentence) as refusal:
        checkpoint.read(str(folder))
    assert str(refusal.value).startswith(f"{folder}: fc")
    assert str(refusal.value).endswith("; correct config.json, or fetch the draft again")
    assert "\n" not in str(refusal.value)
    with pytest.raises(ValueError, match=sentence):
        read(stored, form)


def test_another_shape_is_refused(tmp_path: Path) -> None:
    stored = broken(tmp_path / "draft", "int4", lambda stored: {"fc.weight_shape": torch.tensor([128, 376])})
    with pytest.raises(ValueError, match=r"fc\.weight has weight_shape \[128, 376\], and is stored as \[128, 384\]"):
        read(stored, "int4")
    narrow = {"fc.weight_packed": torch.zeros(128, 24, dtype=torch.int32), "fc.weight_scale": torch.ones(128, 2)}
    broken(tmp_path / "narrow", "int4", lambda stored: narrow)
    with pytest.raises(ValueError, match=r"narrow: fc\.weight has shape \[128, 192\], config\.json implies \[128, 384"):
        checkpoint.read(str(tmp_path / "narrow"))


def test_parts_of_another_format_are_refused(tmp_path: Path) -> None:
    broken(tmp_path / "draft", "int4", lambda stored: {"fc.weight_zero_point": torch.zeros(16, 3, dtype=torch.int32)})
    with pytest.raises(
        NotSupported, match=r"1 tensors are not part of a DFlash draft, the first is fc\.weight_zero_po"
    ):
        checkpoint.read(str(tmp_path / "draft"))


def changed(form: str, *path: str, **fields: Any) -> dict[str, Any]:
    """Return the config of a format with other fields in the object that `path` names."""
    config = deepcopy(FORMATS[form].config)
    inner = config
    for name in path:
        inner = inner[name]
    inner |= fields
    return config


GROUP = ("config_groups", "group_0")
WEIGHTS = (*GROUP, "weights")
REFUSED: dict[str, tuple[dict[str, Any], str]] = {
    "GPTQ": ({"quant_method": "gptq", "bits": 4}, "is gptq: quantized drafts are read in int4, int8, fp8 and NVFP4"),
    "AWQ": ({"quant_method": "awq", "bits": 4}, "is awq: "),
    "bitsandbytes": ({"quant_method": "bitsandbytes", "load_in_4bit": True}, "is bitsandbytes: "),
    "MXFP4": ({"quant_method": "mxfp4"}, "is mxfp4: "),
    "quark": ({"quant_method": "quark"}, "is quark: "),
    "no object": ([1], r"is \[1\] with no config_groups"),
    "no groups": ({"format": "pack-quantized"}, "is pack-quantized with no config_groups: "),
    "MXFP4 of compressed-tensors": (
        changed("nvfp4", *GROUP, format="mxfp4-pack-quantized") | {"format": "mxfp4-pack-quantized"},
        "is compressed-tensors, mxfp4-pack-quantized: ",
    ),
    "zero points": (changed("int4", *WEIGHTS, symmetric=False), r"with symmetric false \(zero points\): "),
    "permuted columns": (changed("int4", *WEIGHTS, actorder="group"), "with actorder group: "),
    "3 bits": (changed("int4", *WEIGHTS, num_bits=3), "pack-quantized with num_bits 3: "),
    "no size of blocks": (changed("fp8-block", *WEIGHTS, block_structure=None), "with blocks of None: "),
    "one size of blocks": ({"quant_method": "fp8", "weight_block_size": [128]}, r"is fp8 with blocks of \[128\]: "),
    "rotations": (changed("int4", transform_config={"config_groups": {"u": {}}}), "with a transform_config: "),
    "sparsity": (
        changed("int4", sparsity_config={"format": "sparse-24-bitmask", "targets": ["Linear"]}),
        "with a sparsity_config: ",
    ),
    "two formats": (
        changed("int4", "config_groups", group_1=FORMATS["fp8"].config["config_groups"]["group_0"]),
        "with several formats of weights: ",
    ),
    "AWQ of ModelOpt": (changed("modelopt-fp8", quant_algo="NVFP4_AWQ"), "is modelopt, NVFP4_AWQ: "),
    "mixed precision of ModelOpt": (
        changed("modelopt-fp8", quant_algo="MIXED_PRECISION"), "is modelopt, MIXED_PRECISION: ",
    ),
}  # fmt: skip


@pytest.mark.parametrize("case", REFUSED)
def test_other_formats_are_refused_by_name(case: str, tmp_path: Path) -> None:
    given, sentence = REFUSED[case]
    folder = quantized_draft(DENSE.draft, tmp_path / "draft", "int4")
    config = json.loads((folder / "config.json").read_text()) | {"quantization_config": given}
    (folder / "config.json").write_text(json.dumps(config))
    for reader in (checkpoint.read, DraftModel.from_pretrained):
        with pytest.raises(NotSupported, match=rf"draft: quantization_config .*{sentence}") as refusal:
            reader(str(folder))
        assert "one of these, or the unquantized draft (--speculative-draft-model-quantization" in str(refusal.value)
        assert "\n" not in str(refusal.value)


@pytest.mark.parametrize("strategy", [None, "group"])
def test_fields_of_writers_that_change_nothing(strategy: str | None) -> None:
    """`actorder: static` only changed the calibration. The strategy may be left to the size of groups."""
    given = changed("int4", *WEIGHTS, actorder="static", strategy=strategy, observer="minmax")
    other = given | {"quantization_status": "frozen", "kv_cache_scheme": {"num_bits": 8}}
    assert packing_of({"compression_config": other}, "") == parsed("int4")
    assert given["config_groups"]["group_0"]["weights"]["group_size"] == 128, "the config was changed"


# -- SGLang --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("form", ["int4", "modelopt-nvfp4-file"])
def test_sglang_builds_plain_layers(form: str, tmp_path: Path) -> None:
    folder = quantized_draft(DENSE.draft, tmp_path / "draft", form)
    config = read_draft(get_config, str(folder), trust_remote_code=False)
    assert config.packing == parsed(form)
    assert not {"quantization_config", "compression_config"} & vars(config).keys()
    json.loads(config.to_json_string())
    model = SimpleNamespace(hf_config=config, is_draft_model=True, model_path=str(folder))
    model._parse_modelopt_quant_config = lambda found: ModelConfig._parse_modelopt_quant_config(model, found)
    stock = ModelConfig._parse_quant_hf_config
    assert bool(stock(model)) == FORMATS[form].own_file, "SGLang would build quantized layers"
    assert not_quantized(stock, model) is None
    model.is_draft_model = False
    assert not_quantized(stock, model) == stock(model)


def test_a_config_precedes_modelopts_file(tmp_path: Path) -> None:
    folder = quantized_draft(DENSE.draft, tmp_path / "draft", "int4")
    (folder / files.MODELOPT_CONFIG).write_text(json.dumps(FORMATS["modelopt-fp8"].config))
    assert checkpoint.read(str(folder)).packing == parsed("int4")


def test_modelopts_file_of_a_repository_is_fetched(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = quantized_draft(DENSE.draft, tmp_path / "draft", "modelopt-nvfp4-file")
    monkeypatch.setattr(files, "hf_hub_download", lambda repository, name, revision: str(folder / name))
    monkeypatch.setattr(files, "_cached_snapshot", lambda *_: folder)
    assert checkpoint.read("someone/draft").packing == parsed("modelopt-nvfp4-file")


def test_the_reader_does_not_import_torch() -> None:
    """It also runs where only MLX is installed."""
    code = "import sys, sglang_dflash.engine.draft.checkpoint; assert not {'torch', 'sglang'} & sys.modules.keys()"
    subprocess.run([sys.executable, "-c", code], check=True)
