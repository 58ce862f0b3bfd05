"""Draft model for users: loads a checkpoint, generates with a target, writes a checkpoint."""

import json
from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any, Self

import torch
from safetensors.torch import load_file, save_file
from transformers import PreTrainedModel

from sglang_dflash.engine.draft import checkpoint, files, tensors
from sglang_dflash.engine.draft.mask_row import MASK_ROW, read_row, write_row
from sglang_dflash.engine.draft.packed import unpacked
from sglang_dflash.reference.torch.draft import Draft
from sglang_dflash.reference.torch.generate import Options, spec_steps


class DraftModel(Draft):
    """DFlash draft in PyTorch, for inference and training."""

    def spec_generate(
        self,
        input_ids: torch.Tensor,
        target: PreTrainedModel,
        max_new_tokens: int,
        temperature: float = 0.0,
        stop_token_ids: Sequence[int] = (),
        **options: Any,
    ) -> torch.Tensor:
        """Return prompt and continuation, int64 [1, prompt + new tokens]: exactly the target's own output.

        Args:
            input_ids: int64 [1, prompt].
            max_new_tokens: limit of new tokens; generation ends earlier at the first of `stop_token_ids`.
            options: further fields of `sglang_dflash.reference.torch.generate.Options`.

        Raises:
            ValueError: draft, target, prompt and options do not match.
        """
        chosen = Options(
            max_new_tokens=max_new_tokens, temperature=temperature, stop_token_ids=tuple(stop_token_ids), **options
        )
        new = [token for step in spec_steps(self, target, input_ids, chosen) for token in step.committed]
        return torch.cat([input_ids, input_ids.new_tensor([new])], dim=1)

    @classmethod
    def from_pretrained(
        cls,
        source: str | Path,
        *,
        dtype: torch.dtype | None = None,
        device: torch.device | str = "cpu",
        revision: str | None = None,
    ) -> Self:
        """Load a DFlash checkpoint from a folder or the Hugging Face hub, without executing its code.

        The draft is in eval mode, and its parameters require no gradients.

        Args:
            dtype: dtype of the parameters; None: the checkpoint's.
            revision: revision of a repository; None: its main branch.

        Raises:
            ValueError: config or tensors are not a DFlash draft's.
            OSError: there is no such folder or repository, or the repository cannot be fetched.
        """
        folder = files.local_folder(source, revision)
        stored = checkpoint.read(str(folder))
        unpack = partial(unpacked, packing=stored.packing, dtype=dtype or vars(torch)[stored.dtype])
        converted = replace(stored, use_gemma_norm=False, rope_is_neox_style=True, attention_value_scale=1.0)
        draft = cls(replace(converted, has_embed_tokens=False, has_mask_embedding=stored.has_mask_row))
        # The reference rotates the first dimensions of a head as they are stored. Without `rope_dim` the order is kept.
        rope = {name: value for name, value in stored.rope_parameters.items() if name != "rope_dim"}
        state = tensors.tensors_of(replace(stored, rope_parameters=rope), folder, load_file, unpack)
        if stored.mask_file:
            state[MASK_ROW] = read_row(stored, Path(stored.mask_file)).to(vars(torch)[stored.dtype])
        draft.load_state_dict(state, assign=True)
        draft.requires_grad_(False)
        return draft.to(device=device, dtype=dtype).eval()

    def save_pretrained(self, folder: str | Path, *, dtype: torch.dtype | None = None) -> None:
        """Write config.json and model.safetensors, creating the folder; `dtype`: None for the parameters' own.

        A mask row of the draft's own is written as mask_embedding.pt.
        """
        folder, dtype = Path(folder), dtype or self.dtype
        folder.mkdir(parents=True, exist_ok=True)
        config = replace(self.config, dtype=str(dtype).removeprefix("torch."))
        (folder / "config.json").write_text(json.dumps(config.to_json(), indent=2) + "\n")
        tensors = {
            name.removeprefix("domino."): (tensor.to(dtype) if tensor.is_floating_point() else tensor).contiguous()
            for name, tensor in self.state_dict().items()
        }
        if self.config.has_mask_row:
            write_row(self.config, tensors.pop(MASK_ROW), folder)
        files.write_tensors(folder, tensors, save_file)
