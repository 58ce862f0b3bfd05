"""Sizes of a target and a draft for `capacity`, from a Hugging Face config.json.

The size of a target's weights is read from the headers of the safetensors files next to the config. If the files' index
lists an absent file, the index's total is used. Without files and index, the size is computed from the config. The size
of a draft's weights is always computed. Configs without a needed field are rejected. An unknown model family is
rejected only if the size of a target's weights must be computed.
"""

import json
from collections.abc import Mapping
from math import prod
from pathlib import Path
from typing import Any, NamedTuple

from sglang_dflash.engine.draft import checkpoint, tensors
from sglang_dflash.engine.draft import files as draft_files
from sglang_dflash.engine.draft.fields import Fields
from sglang_dflash.engine.memory.sizes import AttentionSizes, RecurrentSizes, fp8_head_bytes
from sglang_dflash.tools.capacity import known_models as models
from sglang_dflash.tools.capacity.division import DraftSizes, TargetSizes
from sglang_dflash.tools.capacity.quantized import has_fp8_kv

ITEMSIZES = {"float32": 4, "bfloat16": 2, "float16": 2}
LOADED_ITEMSIZES = ITEMSIZES | {"float": 4, "half": 2}  # values of --dtype
KV_ITEMSIZES = {"bfloat16": 2, "bf16": 2, "fp8_e4m3": 1, "fp8_e5m2": 1}  # values of --kv-cache-dtype
QUANTIZED_ITEMSIZES: Mapping[str | None, int] = {"fp8": 1}  # bytes per weight of a draft's linear layers, once loaded
CONV_ITEMSIZE = 2  # bytes; SGLANG_MAMBA_CONV_DTYPE is bfloat16 by default
FETCH = "fetch the target again"
HEADERS = "headers of the safetensors files"
LONGEST = 262144  # context tokens if a config has no limit
INDEX = "model.safetensors.index.json"
NO_SIZE = f"put the safetensors files, or {INDEX}, into the folder of config.json"
MTP = "mtp."  # part of the tensor names of a checkpoint's own drafter, which SGLang does not load under DFLASH


class Family(NamedTuple):
    """Properties of the attention weights of a `model_type`."""

    output_gate: bool  # the query projection also computes a gate for the output
    qk_norm: bool


FAMILIES = {
    "llama": Family(output_gate=False, qk_norm=False),
    "qwen3": Family(output_gate=False, qk_norm=True),
    "qwen3_moe": Family(output_gate=False, qk_norm=True),
    "qwen3_next": Family(output_gate=True, qk_norm=True),
    "qwen3_5_text": Family(output_gate=True, qk_norm=True),
    "qwen3_5_moe_text": Family(output_gate=True, qk_norm=True),
}


class Config(Fields):
    """Fields of a model's config.json; fields of its `text_config` take precedence."""

    def __init__(self, config: Mapping[str, Any], name: str) -> None:
        super().__init__(config, name, "text_config")

    def choice(self, field: str, value: Any, choices: Mapping[str, Any], cure: str = "") -> Any:
        """Return `choices[value]`, or raise a ValueError that names the field and ends with `cure`."""
        if value not in choices:
            found = "missing" if value is None else repr(value)
            raise ValueError(
                f"{self.name}: {field} is {found}, and only {', '.join(choices)} can be computed; "
                f"{cure or f'correct {field} in config.json'}"
            )
        return choices[value]

    @property
    def itemsize(self) -> int:
        """Return the bytes per weight."""
        return self.choice("dtype", self.get("dtype", self.get("torch_dtype")), ITEMSIZES)

    @property
    def is_quantized(self) -> bool:
        return bool(self.whole.get("quantization_config") or self.get("quantization_config"))

    @property
    def family(self) -> Family:
        return self.choice("model_type", self.get("model_type"), FAMILIES, NO_SIZE)

    @property
    def head_dim(self) -> int:
        llama = self.get("model_type") == "llama"  # its config may omit head_dim
        return self.count("head_dim", self.count("hidden_size") // self.count("num_attention_heads") if llama else None)

    def layer_kinds(self) -> list[str]:
        """Return "full_attention" or "linear_attention" for each layer.

        Raises:
            ValueError: a layer has another kind or a window, or the fields are missing or contradict each other.
        """
        n_layers, interval = self.count("num_hidden_layers"), self.count("full_attention_interval", 0, least=0)
        kinds = self.get("layer_types")
        if kinds is None and interval:
            kinds = ["linear_attention" if i % interval else "full_attention" for i in range(1, n_layers + 1)]
        if kinds is None and self.get("linear_num_value_heads"):
            raise ValueError(f"{self.name}: config.json has neither layer_types nor full_attention_interval; add one")
        kinds = kinds or ["full_attention"] * n_layers
        unknown = set(kinds) - {"full_attention", "linear_attention"}
        if unknown or self.get("use_sliding_window"):
            raise ValueError(
                f"{self.name}: layers with {min(unknown, default='a window')} cannot be computed; launch it, "
                "and read SGLang's log: the requests are max_running_requests, or max_total_num_tokens divided by the "
                "tokens of a request if that is less"
            )
        if len(kinds) != n_layers:
            raise ValueError(
                f"{self.name}: layer_types has {len(kinds)} entries for num_hidden_layers {n_layers}; fix config.json"
            )
        return kinds


def read_target(model: str, itemsize: int | None = None) -> TargetSizes:
    """Return the sizes of the target `model`: a directory, a config.json, or a name in `known_models`.

    Args:
        itemsize: bytes per weight as loaded, a value of `LOADED_ITEMSIZES`; None: as in the config, and 2 for float32.
            Quantized weights keep their size.
    Raises:
        ValueError: there is no such model, or its memory cannot be computed.
    """
    folder, found = _find(model, models.TARGETS)
    config = Config(found.config, model)
    weights, weights_from = _weights(folder, config, found.total_size)
    itemsize = itemsize or min(config.itemsize, 2)  # SGLang loads float32 as float16 by default
    if not config.is_quantized:
        weights = weights * itemsize // config.itemsize
    kinds = config.layer_kinds()
    return TargetSizes(
        name=model,
        attention=AttentionSizes(
            kinds.count("full_attention"),
            config.count("num_key_value_heads"),
            config.head_dim,
            1 if has_fp8_kv(config.whole, folder) else itemsize,
        ),
        itemsize=itemsize,
        recurrent=_recurrent(config, kinds.count("linear_attention")),
        n_heads=config.count("num_attention_heads"),
        weight_bytes=weights,
        weights_from=weights_from,
        context_length=config.count("max_position_embeddings", LONGEST),
        fp8_head_bytes=fp8_head_bytes(config.count("vocab_size"), config.count("hidden_size")),
        image_width=Config(vision, model).count("hidden_size") if (vision := config.whole.get("vision_config")) else 0,
        source=found.source,
    )


def read_draft(model: str, quantization: str | None = None, itemsize: int | None = None) -> DraftSizes:
    """Return the sizes of the DFlash draft `model`: a directory, a config.json, or a name in `known_models`.

    The config determines the shapes of all tensors.

    Args:
        quantization: value of `--speculative-draft-model-quantization`, a key of `QUANTIZED_ITEMSIZES`; None: not
            quantized. Scales, at most one per output, are not counted.
        itemsize: bytes per weight as loaded; None: as in the config.
    Raises:
        ValueError: there is no such model, its dtype is unknown, or see `checkpoint.parse`.
        NotSupported: see `checkpoint.parse`.
    """
    config, source, *_ = _find(model, models.DRAFTS)[1]
    draft = checkpoint.parse({"mask_token_id": 0, **config}, model)  # memory does not depend on the id
    itemsize = itemsize or Config(config, model).choice("dtype", draft.dtype, ITEMSIZES)
    sizes = {name: prod(shape) for name, shape in tensors.expected_shapes(draft).items()}
    sizes.pop("embed_tokens.weight", None)  # a server keeps only the mask token's row of this tensor
    n_listed = draft.draft_vocab_size or 0
    split = {name: n for name, n in sizes.items() if name.endswith("_proj.weight")}
    whole = sizes.keys() - split.keys()
    return DraftSizes(
        name=model,
        attention=AttentionSizes(draft.num_hidden_layers, draft.num_key_value_heads, draft.head_dim, itemsize),
        n_heads=draft.num_attention_heads,
        split_bytes=sum(split.values()) * QUANTIZED_ITEMSIZES.get(quantization, itemsize),
        whole_bytes=sum(sizes[name] for name in whole) * itemsize,
        window=draft.window,
        block_size=draft.block_size,
        source=source,
        head_bytes=n_listed * draft.hidden_size * itemsize,
        fp8_head_bytes=fp8_head_bytes(n_listed, draft.hidden_size),
    )


def _find(model: str, known: Mapping[str, models.Model]) -> tuple[Path | None, models.Model]:
    """Return a model's folder (None if it is only known by name), and its config.json with the config's source."""
    path = Path(model)
    file = path / "config.json" if path.is_dir() else path
    if not file.is_file():
        return None, models.find(model, known)
    config = draft_files.read_object(file, "give a model's directory or its config.json")
    return file.parent, models.Model(config, str(file))


def _recurrent(config: Config, n_layers: int) -> RecurrentSizes | None:
    if not n_layers:
        return None
    return RecurrentSizes(
        n_layers=n_layers,
        n_value_heads=config.count("linear_num_value_heads"),
        value_width=config.count("linear_value_head_dim"),
        n_key_heads=config.count("linear_num_key_heads"),
        key_width=config.count("linear_key_head_dim"),
        conv_window=config.count("linear_conv_kernel_dim") - 1,
        conv_itemsize=CONV_ITEMSIZE,
        state_itemsize=config.choice("mamba_ssm_dtype", config.get("mamba_ssm_dtype", "float32"), ITEMSIZES),
    )


# -- weights -------------------------------------------------------------------------------------------------------


def _weights(folder: Path | None, config: Config, total_size: int) -> tuple[int, str]:
    """Return the bytes of the target's weights, and the source of this number as text."""
    if total_size:
        return total_size, "as stated for the published files, their own drafter included"
    if folder and (folder / INDEX).is_file():
        return _of_index(folder / INDEX)
    if files := sorted(folder.glob("*.safetensors")) if folder else []:
        return sum(map(_header_bytes, files)), HEADERS
    if config.is_quantized:
        raise ValueError(f"{config.name}: config.json does not determine the size of quantized weights; {NO_SIZE}")
    return n_parameters(config) * config.itemsize, "computed from config.json"


def _of_index(index: Path) -> tuple[int, str]:
    """Return the bytes of all tensors in the files that `index` lists, or the index's total if a file is absent."""
    content = draft_files.read_object(index, FETCH)
    metadata, names = content.get("metadata"), content.get("weight_map")
    files = {index.parent / str(name) for name in names.values()} if isinstance(names, dict) else set()
    if files and all(map(Path.is_file, files)):
        return sum(map(_header_bytes, files)), HEADERS
    size = metadata.get("total_size") if isinstance(metadata, dict) else None
    if type(size) is not int:
        raise ValueError(f"{index} has no metadata.total_size; {FETCH}")
    return size, f"{index.name}, its own drafter included"


def _header_bytes(file: Path) -> int:
    """Return the bytes of the tensors in a safetensors file, without the checkpoint's own drafter (`MTP`).

    The file begins with its header: eight bytes with the length of the JSON after them.
    """
    with file.open("rb") as stream:
        n_bytes = int.from_bytes(stream.read(8), "little")
        text = stream.read(min(n_bytes, file.stat().st_size))  # a git-lfs pointer begins with text, not with a length
    try:
        header = json.loads(text)
    except (json.JSONDecodeError, UnicodeDecodeError) as error:
        raise ValueError(f"{file} cannot be read as safetensors ({error}); {FETCH}") from None
    spans = [tensor["data_offsets"] for name, tensor in header.items() if "data_offsets" in tensor and MTP not in name]
    return sum(end - start for start, end in spans)


def n_parameters(config: Config) -> int:
    """Return the number of parameters that SGLang loads: language model and image encoder, without MTP layers."""
    hidden = config.count("hidden_size")
    embedding = config.count("vocab_size") * hidden
    tied = config.whole.get("tie_word_embeddings", config.get("tie_word_embeddings", False))
    mixers = {"full_attention": _attention, "linear_attention": _gated_delta_net}
    layers = sum(mixers[kind](config) + _mlp(config, i) + 2 * hidden for i, kind in enumerate(config.layer_kinds()))
    vision = config.whole.get("vision_config")
    return embedding * (1 if tied else 2) + layers + hidden + (_vision(Config(vision, config.name)) if vision else 0)


def _attention(config: Config) -> int:
    hidden, head_dim, family = config.count("hidden_size"), config.head_dim, config.family
    q, kv = config.count("num_attention_heads") * head_dim, config.count("num_key_value_heads") * head_dim
    into = q * (1 + family.output_gate) + 2 * kv
    bias = into + hidden if config.get("attention_bias") else 0
    return hidden * into + q * hidden + bias + 2 * head_dim * family.qk_norm


def _gated_delta_net(config: Config) -> int:
    net = _recurrent(config, 1)
    assert net is not None
    hidden, values = config.count("hidden_size"), net.n_value_heads * net.value_width
    # Input projections: queries, keys, values, the output's gate, and per head a decay and an update rate.
    into = hidden * (net.n_channels + values + 2 * net.n_value_heads)
    return into + net.n_channels * (net.conv_window + 1) + 2 * net.n_value_heads + net.value_width + values * hidden


def _mlp(config: Config, layer: int) -> int:
    hidden = config.count("hidden_size")
    # Transformers 5 writes `num_local_experts` for Qwen3-MoE.
    n_experts = config.count("num_experts", config.count("num_local_experts", 0, least=0), least=0)
    dense = (layer + 1) % config.count("decoder_sparse_step", 1) or layer in config.get("mlp_only_layers", [])
    if dense or not n_experts:
        return 3 * hidden * config.count("intermediate_size")
    shared = config.count("shared_expert_intermediate_size", 0, least=0)
    return n_experts * (3 * hidden * config.count("moe_intermediate_size") + hidden) + (
        3 * hidden * shared + hidden if shared else 0
    )


def _vision(vision: Config) -> int:
    """Return the number of parameters of Qwen3.5's image encoder: patches, positions, blocks and patch merger."""
    width, inner, depth = vision.count("hidden_size"), vision.count("intermediate_size"), vision.count("depth")
    merged = width * vision.count("spatial_merge_size") ** 2
    patch = vision.count("in_channels") * vision.count("temporal_patch_size") * vision.count("patch_size") ** 2
    block = 4 * width * width + 4 * width + 2 * width * inner + inner + width + 4 * width
    merger = 2 * width + merged * merged + merged + (merged + 1) * vision.count("out_hidden_size")
    return (patch + 1) * width + vision.count("num_position_embeddings") * width + depth * block + merger
