"""The draft as a user has it: read from a checkpoint, generating with a target, written to a checkpoint."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any, Self

import torch
from transformers import PreTrainedModel

from sglang_dflash.model import checkpoint
from sglang_dflash.model.config import DraftConfig
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
        """Prompt and continuation, [1, prompt + new tokens]: exactly what `target` would say by itself.

        input_ids: int64 [1, prompt]. The result ends with the first of `stop_token_ids`, or after `max_new_tokens`.
        options: the rest of `sglang_dflash.model.generate.Options`.
        Raises ValueError when draft and target do not belong together.
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
        """Load a DFlash v1 checkpoint from a folder or from the Hugging Face hub; nothing of it is executed.

        dtype: None keeps the checkpoint's.
        Raises ValueError for a config or tensors that are not those of a DFlash v1 draft.
        """
        folder = checkpoint.local_folder(source)
        draft = cls(DraftConfig.from_folder(folder))
        tensors = checkpoint.read_tensors(folder, {name: p.shape for name, p in draft.named_parameters()})
        draft.load_state_dict(tensors, assign=True)
        draft.requires_grad_(False)
        return draft.to(device=device, dtype=dtype).eval()

    def save_pretrained(self, folder: str | Path) -> None:
        """Write config.json and model.safetensors, in the dtype the parameters have."""
        checkpoint.write(Path(folder), self.config.to_json(), self.state_dict())
