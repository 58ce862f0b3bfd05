"""Quantized weights in a draft's files: their formats, and their conversion to plain tensors while they are read.

A quantized weight is stored as several tensors, for example `fc.weight_packed`, `fc.weight_scale` and
`fc.weight_shape` instead of `fc.weight`. These tensors may be stored in any order, and in different files. The draft is
always computed with plain weights, in the target's dtype, or in fp8 if a flag selects it. So scales of activations and
of the KV cache are not used.

The config names one format for all quantized weights. A plain weight is recognised by its name or its dtype, and is not
converted. So the config's list of plain modules is not needed. This module imports torch only when it converts a
tensor, because the checkpoint reader also runs without torch.
"""

from __future__ import annotations

import logging
import re
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import TYPE_CHECKING, Any, NamedTuple, TypeVar

from sglang_dflash.engine.draft.files import MODELOPT_CONFIG, Stored, extra_file, read_object
from sglang_dflash.errors import NotSupported

if TYPE_CHECKING:
    import torch

logger = logging.getLogger(__name__)

Value = TypeVar("Value")
KEYS = ("quantization_config", "compression_config")
INT, FP4, FP8, INT8 = "I32", "U8", "F8_E4M3", "I8"  # dtypes of stored numbers, named as in safetensors files
STORED_BITS = {INT: 32, FP4: 8, FP8: 8, INT8: 8}  # bits of one stored number, which may hold several weights
# Dtypes of stored numbers. Torch dtypes that are not listed belong to plain weights or to scales.
DTYPES = {"torch.int32": INT, "torch.uint8": FP4, "torch.float8_e4m3fn": FP8, "torch.int8": INT8}
# compressed-tensors' formats: dtype of the stored numbers, bits of a weight, names of a weight's tensors.
NUMBERS = ("weight", "weight_scale")
COMPRESSED: dict[str, tuple[str, tuple[int, ...], tuple[str, ...]]] = {
    "pack-quantized": (INT, (4, 8), ("weight_packed", "weight_scale", "weight_shape")),
    "int-quantized": (INT8, (8,), NUMBERS),
    "float-quantized": (FP8, (8,), NUMBERS),
    "nvfp4-pack-quantized": (FP4, (4,), ("weight_packed", "weight_scale", "weight_global_scale")),
}
WEIGHT_FIELDS = ("num_bits", "strategy", "group_size", "block_structure", "symmetric", "actorder")
OTHER_NAMES = {"weight_scale_inv": "weight_scale"}  # despite its name, weights are multiplied by it
NOT_USED = re.compile(r"(input|output|[qkv])_(global_)?(scale|zero_point)")
READ = "int4, int8, fp8 and NVFP4 of compressed-tensors, fp8 with quant_method fp8, and fp8 and NVFP4 of ModelOpt"


class Packing(NamedTuple):
    """Format of the quantized weights in a draft's files.

    It is a tuple, so that a Transformers config that holds it can be written as JSON.
    """

    words: str  # the format in messages
    dtype: str  # of the stored numbers
    bits: int  # per weight
    block: tuple[int, int]  # rows and columns of a weight that share a scale; 0: all
    parts: tuple[str, ...]  # ends of the names of a weight's tensors, first that of the stored numbers


# -- config.json ---------------------------------------------------------------------------------------------------


def with_modelopt_config(config: dict[str, Any], path: str, revision: str | None) -> dict[str, Any]:
    """Return a config with the content of ModelOpt's own file, if the config does not mention quantized weights.

    Raises:
        ValueError: the file contains no JSON object.
    """
    file = None if any(config.get(key) for key in KEYS) else extra_file(path, MODELOPT_CONFIG, revision)
    return config | {KEYS[0]: read_object(file, "fetch the draft again")} if file else config


def packing_of(config: Mapping[str, Any], path: str) -> Packing | None:
    """Return the format that a config names; None if its weights are not quantized.

    Args:
        path: the draft's name in messages.
    Raises:
        NotSupported: the format cannot be read.
    """
    key = next((key for key in KEYS if config.get(key)), "")
    if not key:
        return None
    found = _object(config[key])
    found = found | _object(found.get("quantization"))  # the object in ModelOpt's hf_quant_config.json
    words = ", ".join(str(found[name]) for name in ("quant_method", "format", "quant_algo") if found.get(name))
    if found.get("quant_algo"):
        packing = _of_modelopt(found, words)
    elif found.get("quant_method") == "fp8":
        packing = _of_block(words, FP8, 8, found.get("weight_block_size") or (0, 0), NUMBERS)
    elif found.get("quant_method") in (None, "compressed-tensors"):
        packing = _of_compressed_tensors(found, words)
    else:
        packing = ""
    if isinstance(packing, Packing):
        return packing
    raise NotSupported(
        f"{path}: {key} is {words or repr(config[key])}{packing and f' with {packing}'}: quantized drafts are read in "
        f"{READ}; give one of these, or the unquantized draft (--speculative-draft-model-quantization fp8 quantizes it "
        "while it loads)"
    )


def _of_modelopt(found: Mapping[str, Any], words: str) -> Packing | str:
    """Return the format, or the reason why it cannot be read; "": the format of this name is not supported."""
    size = found.get("group_size")
    fp4 = FP4, 4, (1, size or 16), ("weight", "weight_scale", "weight_scale_2")
    formats = {
        "FP8": (FP8, 8, (0, 0), NUMBERS),
        "FP8_PER_CHANNEL_PER_TOKEN": (FP8, 8, (1, 0), NUMBERS),
        "FP8_PB_WO": (FP8, 8, (size or 128, size or 128), NUMBERS),
        "NVFP4": fp4,
        "W4A16_NVFP4": fp4,
    }
    given = formats.get(str(found["quant_algo"]).upper())
    return _of_block(words, *given) if given else ""


def _of_compressed_tensors(found: Mapping[str, Any], words: str) -> Packing | str:
    """Return the format, or the reason why it cannot be read; "": the format of this name is not supported."""
    groups = [_object(group) for group in _object(found.get("config_groups")).values()]
    groups = [{**_object(group["weights"]), **group} for group in groups if group.get("weights")]
    if not groups:
        return "no config_groups"
    given = groups[0]
    if any(group.get(name) != given.get(name) for group in groups for name in ("format", *WEIGHT_FIELDS)):
        return "several formats of weights"
    if given.get("symmetric") is False:
        return "symmetric false (zero points)"
    if given.get("actorder") in (True, "group", "dynamic"):
        return f"actorder {given['actorder']}"
    for name, used in (("transform_config", "config_groups"), ("sparsity_config", "targets")):
        if _object(found.get(name)).get(used):
            return f"a {name}"
    dtype, all_bits, parts = COMPRESSED.get(str(given.get("format") or found.get("format")), ("", (), ()))
    bits, size = given.get("num_bits"), given.get("group_size")
    if bits not in all_bits:
        return f"num_bits {bits}" if parts else ""
    strategy = given.get("strategy") or ("tensor" if size is None else "channel" if size == -1 else "group")
    blocks = {"tensor": (0, 0), "channel": (1, 0), "block": given.get("block_structure")}
    return _of_block(words, dtype, bits, blocks.get(str(strategy), (1, size)), parts)


def _of_block(words: str, dtype: str, bits: int, block: Any, parts: tuple[str, ...]) -> Packing | str:
    """Return the format, or the reason why it cannot be read: `block` is not two sizes."""
    match block:
        case [int(n_rows), int(n_columns)] if n_rows >= 0 and n_columns >= 0:
            return Packing(words, dtype, bits, (n_rows, n_columns), parts)
    return f"blocks of {block}"


def _object(value: Any) -> dict[str, Any]:
    return value if isinstance(value, dict) else {}


# -- tensors -------------------------------------------------------------------------------------------------------


def plain_shapes(stored: Mapping[str, Stored], packing: Packing | None, path: str) -> dict[str, tuple[int, ...]]:
    """Return the shapes of the plain tensors by name.

    Args:
        stored: dtypes and shapes in the files, by name.
        path: the draft's name in messages.
    Raises:
        ValueError: a part of a quantized weight is missing, or has another shape or dtype than in the format.
    """
    if packing is None:
        return {name: tensor.shape for name, tensor in stored.items()}

    def shape(weight: str, parts: Mapping[str, Stored]) -> Stored:
        return Stored("", _shape(weight, parts, packing))

    try:
        return {name: plain.shape for name, plain in _joined(stored.items(), packing, lambda one: one, shape)}
    except ValueError as error:
        raise ValueError(f"{path}: {error}; correct config.json, or fetch the draft again") from None


def unpacked(
    tensors: Iterable[tuple[str, torch.Tensor]], packing: Packing | None, dtype: torch.dtype
) -> Iterator[tuple[str, torch.Tensor]]:
    """Yield names and plain tensors. A quantized weight follows as soon as its last part is read.

    Args:
        tensors: names, in any order, and tensors as stored.
        packing: their format; None: all are plain.
        dtype: dtype of the converted weights. Other tensors keep theirs.
    Raises:
        ValueError: see `plain_shapes`.
    """
    if packing is None:
        yield from tensors
        return

    def convert(weight: str, parts: Mapping[str, torch.Tensor]) -> torch.Tensor:
        return _converted(weight, parts, packing).to(dtype)

    not_used = list[str]()
    yield from _joined(tensors, packing, _as_stored, convert, not_used)
    if not_used:
        logger.info("%d scales of activations or of the KV cache are not used, such as %s", len(not_used), not_used[0])


def _joined(
    tensors: Iterable[tuple[str, Value]],
    packing: Packing,
    as_stored: Callable[[Value], Stored],
    join: Callable[[str, Mapping[str, Value]], Value],
    not_used: list[str] | None = None,
) -> Iterator[tuple[str, Value]]:
    """Yield names and tensors, in which `join(weight, parts)` replaces the parts of each quantized weight.

    Names of scales that are not used are appended to `not_used`.
    """
    waiting: dict[str, dict[str, Value]] = {}
    for name, tensor in tensors:
        module, _, part = name.removeprefix("model.").rpartition(".")
        part = OTHER_NAMES.get(part, part)
        if NOT_USED.fullmatch(part):
            if not_used is not None:
                not_used.append(name)
        elif part not in packing.parts or (part == "weight" and as_stored(tensor).dtype not in STORED_BITS):
            yield name, tensor
        else:
            parts = waiting.setdefault(module, {})
            parts[part] = tensor
            if len(parts) == len(packing.parts):
                yield f"{module}.weight", join(f"{module}.weight", waiting.pop(module))
    for module, parts in waiting.items():
        missing = next(part for part in packing.parts if part not in parts)
        raise ValueError(f"{module} has {' and '.join(parts)}, but no {missing} in the format {packing.words}")


def _as_stored(tensor: torch.Tensor) -> Stored:
    dtype = str(tensor.dtype)
    return Stored(DTYPES.get(dtype, dtype), tuple(tensor.shape))


def _shape(weight: str, parts: Mapping[str, Stored], packing: Packing) -> tuple[int, int]:
    """Return the shape of the plain weight, after checking the dtypes and shapes of its parts."""
    numbers = parts[packing.parts[0]]
    if numbers.dtype != packing.dtype or len(numbers.shape) != 2:
        raise ValueError(
            f"{weight} is stored as {numbers.dtype} {list(numbers.shape)}, and {packing.words} has matrices of "
            f"{packing.dtype}"
        )
    n_rows, n_columns = numbers.shape
    shape = n_rows, n_columns * STORED_BITS[packing.dtype] // packing.bits
    wanted = {"weight_scale": _n_scales(shape, packing), "weight_shape": (2,)}
    for part in packing.parts[1:]:
        found = parts[part]
        if _without_ones(found.shape) != _without_ones(wanted.get(part, ())):
            raise ValueError(
                f"{weight} of shape {list(shape)} has {part} of shape {list(found.shape)}, and {packing.words} implies "
                f"{list(wanted.get(part, ()))}"
            )
        if part != "weight_shape" and found.dtype in (INT, FP4, INT8):
            raise ValueError(f"{weight} has {part} of dtype {found.dtype}, which is not a float ({packing.words})")
    return shape


def _n_scales(shape: tuple[int, int], packing: Packing) -> tuple[int, int]:
    """Return the numbers of scales along the rows and the columns of a weight."""
    n_rows, n_columns = (-(-length // size) if size else 1 for length, size in zip(shape, packing.block, strict=True))
    return n_rows, n_columns


def _without_ones(shape: tuple[int, ...]) -> tuple[int, ...]:
    """Return the shape without sizes of 1. Writers differ in these, as [N] and [N, 1] for one scale per row."""
    return tuple(size for size in shape if size != 1)


def _converted(weight: str, parts: Mapping[str, torch.Tensor], packing: Packing) -> torch.Tensor:
    """Return the plain weight in fp32."""
    from compressed_tensors.compressors import unpack_fp4_from_uint8, unpack_from_int32

    shape = _shape(weight, {part: _as_stored(tensor) for part, tensor in parts.items()}, packing)
    if "weight_shape" in parts and tuple(parts["weight_shape"].tolist()) != shape:
        raise ValueError(f"{weight} has weight_shape {parts['weight_shape'].tolist()}, and is stored as {list(shape)}")
    numbers, scale = parts[packing.parts[0]], parts["weight_scale"].float().reshape(_n_scales(shape, packing))
    if packing.dtype == INT:
        numbers = unpack_from_int32(numbers, packing.bits, shape)
    elif packing.dtype == FP4:
        numbers = unpack_fp4_from_uint8(numbers, *shape)
    if "weight_global_scale" in parts:  # compressed-tensors stores the factor that was applied to the scales
        scale = scale / parts["weight_global_scale"].float()
    if "weight_scale_2" in parts:
        scale = scale * parts["weight_scale_2"].float()
    for dim, size in enumerate(packing.block):
        if size:
            scale = scale.repeat_interleave(size, dim).narrow(dim, 0, shape[dim])
    return numbers.float().mul_(scale)
