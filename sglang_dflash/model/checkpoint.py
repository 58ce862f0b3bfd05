"""Read and write the two files of a DFlash checkpoint: config.json and safetensors.

Knows names and shapes, not what they are for.
"""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from huggingface_hub import snapshot_download
from safetensors import safe_open
from safetensors.torch import save_file

FILES = ["config.json", "*.safetensors"]


def local_folder(source: str | Path) -> Path:
    """The folder itself, or the downloaded files of a repository on the hub; its code is never among them.

    Raises FileNotFoundError when `source` is neither.
    """
    folder = Path(source)
    if folder.is_dir():
        return folder
    if folder.is_absolute() or str(source).count("/") != 1:
        raise FileNotFoundError(f"there is no folder {source}; give a checkpoint's folder or its name on the hub")
    return Path(snapshot_download(str(source), allow_patterns=FILES))


def read_tensors(folder: Path, shapes: Mapping[str, torch.Size]) -> dict[str, torch.Tensor]:
    """All tensors of the folder's safetensors files, checked against the names and shapes a draft must have.

    Raises ValueError when a tensor is missing, not known, or of another shape.
    """
    if (folder / "mask_embedding.pt").exists():
        raise ValueError(f"{folder} trains its own mask embedding, which is not supported; use a DFlash v1 checkpoint")
    tensors: dict[str, torch.Tensor] = {}
    for path in sorted(folder.glob("*.safetensors")):
        with safe_open(path, framework="pt") as file:
            for name in file.keys():  # noqa: SIM118 (the handle is no mapping)
                tensors[name.removeprefix("model.")] = file.get_tensor(name)
    # Some exports store what the config already says.
    tensors = {name: tensor for name, tensor in tensors.items() if not name.endswith("rotary_emb.inv_freq")}
    missing, unknown = sorted(shapes.keys() - tensors.keys()), sorted(tensors.keys() - shapes.keys())
    if missing or unknown:
        raise ValueError(
            f"{folder} does not hold the tensors its config.json describes: missing {missing or 'none'}, "
            f"unknown {unknown or 'none'}; use a complete DFlash v1 checkpoint"
        )
    for name, shape in shapes.items():
        if tensors[name].shape != shape:
            raise ValueError(
                f"{folder}: {name} has shape {list(tensors[name].shape)} but config.json asks for {list(shape)}; "
                "config and weights must come from one training run"
            )
    return tensors


def write(folder: Path, config: Mapping[str, Any], tensors: Mapping[str, torch.Tensor]) -> None:
    """A checkpoint of one safetensors file; the folder is made."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps(config, indent=2) + "\n")
    contiguous = {name: tensor.contiguous() for name, tensor in tensors.items()}
    save_file(contiguous, folder / "model.safetensors", metadata={"format": "pt"})
