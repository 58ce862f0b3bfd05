"""Copies of the tiny targets with quantized weights, in the formats of published checkpoints.

Formats: fp8 with a scale per 128 x 128 block (as Qwen's FP8 checkpoints); int8 with a scale per output channel
(compressed-tensors), with or without the head; 4-bit AWQ in groups of 128.
"""

import json
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file

from sglang_dflash.pairs.tiny.pairs import Pair

PLAIN = ("in_proj_a", "in_proj_b", "lm_head")  # not quantized in fp8 and AWQ: the first two are narrower than a block
FP8_MAX, INT8_MAX, BLOCK = 448.0, 127.0, 128
AWQ_OUTPUTS = (0, 2, 4, 6, 1, 3, 5, 7)  # index of the output in each four-bit field of an int32, lowest field first
Tensors = Iterator[tuple[str, torch.Tensor]]


def fp8_blocks(name: str, weight_NK: torch.Tensor) -> Tensors:
    n, k = (size // BLOCK for size in weight_NK.shape)
    blocks = weight_NK.view(n, BLOCK, k, BLOCK)
    scale = blocks.abs().amax((1, 3)) / FP8_MAX
    yield f"{name}.weight", (blocks / scale[:, None, :, None]).to(torch.float8_e4m3fn).view_as(weight_NK)
    yield f"{name}.weight_scale_inv", scale


def int8_channels(name: str, weight_NK: torch.Tensor) -> Tensors:
    scale = weight_NK.abs().amax(1, keepdim=True) / INT8_MAX
    yield f"{name}.weight", (weight_NK / scale).round().to(torch.int8)
    yield f"{name}.weight_scale", scale


def awq_groups(name: str, weight_NK: torch.Tensor) -> Tensors:
    groups = weight_NK.T.unflatten(0, (-1, BLOCK))  # [G, BLOCK, N]
    low, high = groups.amin(1).clamp(max=0), groups.amax(1).clamp(min=0)
    scale = (high - low) / 15
    zero = (-low / scale).round()
    weight = (groups / scale[:, None] + zero[:, None]).round().clamp(0, 15)
    yield f"{name}.qweight", packed(weight.flatten(0, 1))
    yield f"{name}.qzeros", packed(zero)
    yield f"{name}.scales", scale


def packed(numbers: torch.Tensor) -> torch.Tensor:
    """Pack values below 16: [..., N] -> int32 [..., N / 8], in AWQ's order."""
    eights = numbers.to(torch.int64).unflatten(-1, (-1, 8))[..., AWQ_OUTPUTS]
    word = (eights << torch.arange(8) * 4).sum(-1)
    return word.where(word < 2**31, word - 2**32).to(torch.int32)


INT8_GROUP = {
    "weights": {"num_bits": 8, "type": "int", "strategy": "channel", "symmetric": True, "dynamic": False},
    "input_activations": {"num_bits": 8, "type": "int", "strategy": "token", "symmetric": True, "dynamic": True},
}
COMPRESSED = {"quant_method": "compressed-tensors", "format": "int-quantized"}
FORMATS: dict[str, tuple[Callable[[str, torch.Tensor], Tensors], tuple[str, ...], dict[str, Any]]] = {
    "fp8": (
        fp8_blocks, PLAIN,
        {"quant_method": "fp8", "activation_scheme": "dynamic", "weight_block_size": [BLOCK, BLOCK]},
    ),
    "int8": (
        int8_channels, ("lm_head",),
        COMPRESSED | {"config_groups": {"group_0": INT8_GROUP | {"targets": ["Linear"]}}, "ignore": ["lm_head"]},
    ),
    "int8-head": (
        int8_channels, (),
        COMPRESSED | {"config_groups": {"group_0": INT8_GROUP | {"targets": ["Linear", "re:.*lm_head"]}}, "ignore": []},
    ),
    "awq": (
        awq_groups, PLAIN,
        {"quant_method": "awq", "bits": 4, "group_size": BLOCK, "zero_point": True, "version": "gemm"},
    ),
}  # fmt: skip


def quantized(pair: Pair, form: str, folder: Path) -> Pair:
    """Return `pair` with a copy of its target in `folder` whose linear layers are quantized (`FORMATS[form]`)."""

    write, plain, config_fields = FORMATS[form]
    target = folder / form
    shutil.copytree(pair.target, target)
    tensors: dict[str, torch.Tensor] = {}
    kept = []
    for name, weight in load_file(target / "model.safetensors").items():
        layer = name.removesuffix(".weight")
        if "_proj" in layer or layer == "lm_head":
            if layer.endswith(plain):
                kept.append(layer)
            else:
                tensors |= dict(write(layer, weight.float()))
                continue
        tensors[name] = weight
    save_file({name: tensor.contiguous() for name, tensor in tensors.items()}, target / "model.safetensors")
    config = json.loads((target / "config.json").read_text())
    left_out = {"fp8": "modules_to_not_convert", "awq": "modules_to_not_convert"}.get(form, "ignore")
    config["quantization_config"] = config_fields | {left_out: kept}
    (target / "config.json").write_text(json.dumps(config))
    return pair._replace(target=target)
