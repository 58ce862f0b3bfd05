"""LoRA adapters of the tiny targets, and each merged into its target: what a server with the adapter has to say.

The draft beside a merged target is the base model's all the same, as it is when the target's requests bring adapters:
no adapter touches the embedding or the head that the draft borrows, but where a test asks for one that does.
"""

import json
import shutil
from pathlib import Path
from typing import NamedTuple

import torch
from safetensors.torch import load_file, save_file

from sglang_dflash.tiny.pairs import Pair

MODULES = {
    "dense": ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"),
    "hybrid": ("gate_proj", "up_proj", "down_proj"),
}
RANKS = {"calm": 4, "wild": 8, "late": 8}  # adapters by name; a batch may hold several ranks
STRENGTH = {"calm": 0.3, "wild": 0.6, "late": 0.45}  # of a matrix's own standard deviation


class Adapter(NamedTuple):
    path: Path  # in PEFT's format
    merged: Pair  # the target with it merged in, the draft as it is


def write(name: str, pair: Pair, modules: tuple[str, ...], folder: Path) -> Adapter:
    """A random adapter of all matrices of the target that bear these names."""
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
    """A server with these from the start, and room for others of their kind."""
    paths = [f"{name}={adapter.path}" for name, adapter in adapters.items()]
    return (
        *("--enable-lora", "--lora-paths", *paths),
        *("--max-lora-rank", str(max(RANKS.values())), "--max-loras-per-batch", "3", "--lora-backend", backend),
    )
