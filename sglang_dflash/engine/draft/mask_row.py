"""Embedding of the mask token in a file of its own, `mask_embedding.pt`, as in MiMo's drafts.

The target's own row of this token is untrained. The row in the file replaces it only in the draft's blocks.
"""

from __future__ import annotations

from pathlib import Path
from pickle import UnpicklingError
from typing import TYPE_CHECKING, Any

from sglang_dflash.engine.draft.files import MASK_EMBEDDING, extra_file
from sglang_dflash.engine.draft.record import Checkpoint
from sglang_dflash.errors import NotSupported

if TYPE_CHECKING:
    import torch

MASK_ROW = "mask_embedding"  # name of the row among a draft's tensors
FETCH = "fetch the draft again"


def with_mask_file(config: dict[str, Any], path: str, revision: str | None) -> dict[str, Any]:
    """Return a config with the file's path as `mask_file`, and `has_mask_embedding` if the draft has the file.

    A `mask_file` in config.json is overwritten. The path is "" if the draft has no such file.
    """
    file = extra_file(path, MASK_EMBEDDING, revision)
    return config | {"mask_file": str(file or "")} | ({"has_mask_embedding": True} if file else {})


def read_row(draft: Checkpoint, file: Path) -> torch.Tensor:
    """Return the row in `file`, [H].

    Raises:
        ValueError: the file is damaged, or its row is for another token or has another size.
        NotSupported: the file has a row for every slot of a block.
    """
    import torch

    try:
        stored = torch.load(file, map_location="cpu", weights_only=True)
    except (RuntimeError, UnpicklingError, EOFError) as error:
        raise ValueError(f"{file} cannot be read ({type(error).__name__}); {FETCH}") from None
    fields = stored if isinstance(stored, dict) else {"embedding": stored}
    if fields.get("per_position"):
        raise NotSupported(f"{file} has a row for every slot (per_position), and DFlash has one; give another draft")
    row, token = fields.get("embedding"), fields.get("mask_token_id", draft.mask_token_id)
    if not isinstance(row, torch.Tensor) or row.numel() != draft.hidden_size:
        found = f"has shape {list(row.shape)}" if isinstance(row, torch.Tensor) else "is missing"
        raise ValueError(f"{file}: the embedding {found}, config.json implies [{draft.hidden_size}]; {FETCH}")
    if int(token) != draft.mask_token_id:
        raise ValueError(
            f"{file} is for token {token}, and config.json has mask_token_id {draft.mask_token_id}; {FETCH}"
        )
    return row.flatten()


def write_row(draft: Checkpoint, row_H: torch.Tensor, folder: Path) -> None:
    """Write the row in the layout that `read_row` reads."""
    import torch

    torch.save({"mask_token_id": draft.mask_token_id, "embedding": row_H.detach().cpu()}, folder / MASK_EMBEDDING)
