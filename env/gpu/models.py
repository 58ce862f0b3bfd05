"""Folders of the target and draft whose steps are measured: the shapes of Qwen3.5-27B and its draft, or tiny ones.

The target has no weights on disk (`--load-format dummy`). The plugin reads the draft from disk, so the draft's random
weights are written.
"""

import json
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from sglang_dflash.pairs.tiny import pairs as tiny
from sglang_dflash.pairs.tiny.pairs import Pair
from sglang_dflash.tools.capacity.known_models import DRAFTS, TARGETS

TARGET, DRAFT = "Qwen/Qwen3.5-27B", "z-lab/Qwen3.5-27B-DFlash"
# Fields of Qwen3.5's config.json that the package's table of models lacks.
ROPE = {
    **{"rope_type": "default", "rope_theta": 10_000_000.0, "partial_rotary_factor": 0.25},
    **{"mrope_interleaved": True, "mrope_section": [11, 11, 10]},
}
DRAFT_ROPE = {"rope_type": "default", "rope_theta": 10_000_000.0}
POSITIONS = 32768


def target_config(*, small: bool) -> dict[str, Any]:
    """Return the target's config.json. Its embedding and head are one matrix, so that three servers need less memory.

    Args:
        small: use the tiny hybrid target's shapes.
    """
    config = json.loads((tiny.HYBRID.target / "config.json").read_text())
    if small:
        return config | {"tie_word_embeddings": True}
    known = dict(TARGETS[TARGET].config["text_config"])
    every = known["full_attention_interval"]
    kinds = [
        "full_attention" if i % every == every - 1 else "linear_attention" for i in range(known["num_hidden_layers"])
    ]
    more = {"layer_types": kinds, "max_position_embeddings": POSITIONS, "rope_parameters": ROPE}
    return config | known | more | {"tie_word_embeddings": True, "eos_token_id": known["vocab_size"] - 1}


def draft_config(*, small: bool) -> dict[str, Any]:
    config = json.loads((tiny.HYBRID.draft / "config.json").read_text())
    if small:
        return config
    known = dict(DRAFTS[DRAFT].config)
    known["dflash_config"] = {**known["dflash_config"], "block_size": known["block_size"]}
    return config | known | {"max_position_embeddings": POSITIONS, "rope_parameters": DRAFT_ROPE}


def draft_shapes(config: Mapping[str, Any]) -> Iterator[tuple[str, tuple[int, ...]]]:
    """Yield name and shape of every weight of a draft."""
    hidden, inner, width = config["hidden_size"], config["intermediate_size"], config["head_dim"]
    heads, kv_heads = config["num_attention_heads"] * width, config["num_key_value_heads"] * width
    yield "fc.weight", (hidden, hidden * len(config["dflash_config"]["target_layer_ids"]))
    for name in ("hidden_norm", "norm"):
        yield f"{name}.weight", (hidden,)
    layer = {
        "input_layernorm": (hidden,), "post_attention_layernorm": (hidden,), "self_attn.q_proj": (heads, hidden),
        "self_attn.k_proj": (kv_heads, hidden), "self_attn.v_proj": (kv_heads, hidden), "self_attn.q_norm": (width,),
        "self_attn.k_norm": (width,), "self_attn.o_proj": (hidden, heads), "mlp.gate_proj": (inner, hidden),
        "mlp.up_proj": (inner, hidden), "mlp.down_proj": (hidden, inner),
    }  # fmt: skip
    for i in range(config["num_hidden_layers"]):
        for name, shape in layer.items():
            yield f"layers.{i}.{name}.weight", shape


def write(folder: Path, *, small: bool) -> Pair:
    """Write both models' configs into `folder`, and the draft's weights if they are missing. Return both folders."""
    pair = Pair(folder / "target", folder / "draft")
    configs = target_config(small=small), draft_config(small=small)
    for path, config in zip(pair, configs, strict=True):
        path.mkdir(parents=True, exist_ok=True)
        (path / "config.json").write_text(json.dumps(config, indent=1) + "\n")
    weights = pair.draft / "model.safetensors"
    if not weights.exists():
        write_random(weights, dict(draft_shapes(configs[1])))
    return pair


def write_random(path: Path, shapes: Mapping[str, tuple[int, ...]]) -> None:
    """Write random bf16 weights. Large matrices repeat a pattern of random numbers, which is fast to make."""
    import torch
    from safetensors.torch import save_file

    torch.manual_seed(0)
    pattern = (torch.randn(1 << 22) * 0.02).to(torch.bfloat16)
    tensors = {}
    for name, shape in shapes.items():
        n = torch.Size(shape).numel()
        tensors[name] = pattern.repeat(-(-n // len(pattern)))[:n].reshape(shape).clone()
    part = path.with_name(path.name + ".part")
    save_file(tensors, part, metadata={"format": "pt"})
    part.replace(path)
