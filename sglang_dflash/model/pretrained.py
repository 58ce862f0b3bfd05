"""The draft for users: loading from a checkpoint, generating with a target, writing a checkpoint."""

import json
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, Self

import torch
from safetensors.torch import load_file, save_file
from transformers import PreTrainedModel

from sglang_dflash.draft import checkpoint, files
from sglang_dflash.model.draft import Draft
from sglang_dflash.model.generate import Options, spec_steps


class DraftModel(Draft):
    def spec_generate(
        self,
        input_ids: torch.Tensor,
        target: PreTrainedModel,
        max_new_tokens: int,
        temperature: float = 0.0,
        stop_token_ids: Sequence[int] = (),
        **options: Any,
    ) -> torch.Tensor:
        """Return prompt and continuation, [1, prompt + new tokens]: exactly the target's own output.

        `input_ids`: int64 [1, prompt]. The result ends with the first of `stop_token_ids`, or after `max_new_tokens`.
        `options`: further fields of `sglang_dflash.model.generate.Options`. Raises ValueError if draft and target do
        not match.
        """
        chosen = Options(
            max_new_tokens=max_new_tokens, temperature=temperature, stop_token_ids=tuple(stop_token_ids), **options
        )
        new = [token for step in spec_steps(self, target, input_ids, chosen) for token in step.committed]
        return torch.cat([input_ids, input_ids.new_tensor([new])], dim=1)

    @classmethod
    def from_pretrained(
        cls, source: str | Path, *, dtype: torch.dtype | None = None, device: torch.device | str = "cpu"
    ) -> Self:
        """Load a DFlash checkpoint from a folder or from the Hugging Face hub; nothing of it is executed.

        `dtype`: None keeps the checkpoint's. Raises ValueError if config or tensors are not a DFlash draft's, and
        FileNotFoundError if `source` is neither a checkpoint's folder nor a repository.
        """
        folder = files.local_folder(source)
        draft = cls(checkpoint.read(str(folder)))
        draft.load_state_dict(files.read_tensors(folder, load_file), assign=True)
        draft.requires_grad_(False)
        return draft.to(device=device, dtype=dtype).eval()

    def save_pretrained(self, folder: str | Path) -> None:
        """Write config.json and model.safetensors, in the parameters' dtype, creating the folder."""
        folder = Path(folder)
        folder.mkdir(parents=True, exist_ok=True)
        config = replace(self.config, dtype=str(self.dtype).removeprefix("torch."))
        (folder / "config.json").write_text(json.dumps(config.to_json(), indent=2) + "\n")
        tensors = {name: tensor.contiguous() for name, tensor in self.state_dict().items()}
        weights = folder / "model.safetensors"
        save_file(tensors, weights, metadata={"format": "pt"})
        weights.chmod((folder / "config.json").stat().st_mode)  # safetensors makes it readable to its owner alone
