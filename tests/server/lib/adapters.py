"""LoRA adapters of the tiny targets, and targets with a merged adapter as the reference.

A merged target is paired with the base model's draft, as a served adapter is. The draft uses the target's embedding and
head. Only in `test_adapter_of_a_borrowed_layer_leaves_the_draft_unchanged` do adapters change them.
"""

import json
import shutil
from pathlib import Path
from typing import NamedTuple

import torch
from safetensors.torch import load_file, save_file

from sglang_dflash.pairs.tiny.pairs import Pair

MODULES = {
    "dense": ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"),
    "hybrid": ("gate_proj", "up_proj", "down_proj"),
}
RANKS = {"calm": 4, "wild": 8, "late": 8}  # LoRA rank by adapter; a batch may mix ranks
STRENGTH = {"calm": 0.3, "wild": 0.6, "late": 0.45}  # standard deviation of the change, relative to the matrix's


class Adapter(NamedTuple):
    path: Path  # in PEFT's format
    merged: Pair  # the target with the adapter merged in, the draft unchanged


def write(name: str, pair: Pair, modules: tuple[str, ...], folder: Path) -> Adapter:
    rank, tensors = RANKS[name], dict[str, torch.Tensor]()
    torch.manual_seed(rank + len(name))
    weights = {key: tensor.float() for key, tensor in load_file(pair.target / "model.safetensors").items()}
    for key, weight in weights.items():
        module = key.split(".")[-2]
        if module not in modules:
            continue
        n_in, n_out = weight.shape if module == "embed_tokens" else weight.shape[::-1]
        a, b = torch.randn(rank, n_in), torch.randn(n_out, rank)
        b *= STRENGTH[name] * weight.std() / rank**0.5
        base = f"base_model.model.{key.removesuffix('.weight')}"
        tensors |= {f"{base}.lora_A.weight": a, f"{base}.lora_B.weight": b}
        weights[key] = weight + (b @ a if n_out == weight.shape[0] else (b @ a).T)
    adapter, merged = folder / name, folder / f"{name}-merged"
    adapter.mkdir(parents=True)
    save_file(tensors, adapter / "adapter_model.safetensors")
    config = {"peft_type": "LORA", "task_type": "CAUSAL_LM", "r": rank, "lora_alpha": rank, "bias": "none"}
    config |= {"lora_dropout": 0.0, "target_modules": list(modules), "base_model_name_or_path": str(pair.target)}
    (adapter / "adapter_config.json").write_text(json.dumps(config))
    shutil.copytree(pair.target, merged)
    save_file(weights, merged / "model.safetensors", metadata={"format": "pt"})
    return Adapter(adapter, pair._replace(target=merged))


def flags(adapters: dict[str, Adapter], backend: str = "torch_native") -> tuple[str, ...]:
    """Return flags of a server that starts with these adapters and can load others of `RANKS`."""
    paths = [f"{name}={adapter.path}" for name, adapter in adapters.items()]
    return (
        *("--enable-lora", "--lora-paths", *paths),
        *("--max-lora-rank", str(max(RANKS.values())), "--max-loras-per-batch", "3", "--lora-backend", backend),
    )
