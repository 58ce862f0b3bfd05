"""Train a DFlash draft for a target: the target reads, the draft learns to guess what it will say.

Knows neither where the rows come from nor what becomes of the draft.
"""

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from random import Random

import torch
from transformers import PreTrainedModel

from sglang_dflash.model.config import FULL, DraftConfig
from sglang_dflash.model.draft import DraftModel
from sglang_dflash.model.target import check_pair
from sglang_dflash.train.loop import Recipe, train
from sglang_dflash.train.objective import (
    Blocks,
    block_logits,
    block_loss,
    default_gamma,
    make_blocks,
    mean_committed,
    random_anchors,
    read_rows,
)
from sglang_dflash.train.tokens import Rows

RowsAt = Callable[[int], Rows]  # the batch of a step; must depend on the step alone


@dataclass(frozen=True)
class DraftRun:
    """One draft in training: everything but the data."""

    draft: DraftModel
    target: PreTrainedModel
    n_anchors: int  # per row
    gamma: float
    seed: int

    def blocks(self, rows: Rows, anchor_seed: str) -> tuple[torch.Tensor, Blocks]:
        """The target's features of the rows, [R, L, C], and random blocks to guess in them."""
        config = self.draft.config
        choices_RL, features_RLC = read_rows(self.target, rows, config.target_layer_ids)
        generator = torch.Generator().manual_seed(Random(anchor_seed).getrandbits(63))
        anchor_RA = random_anchors(rows.is_response_RL, self.n_anchors, generator)
        block_size, mask = config.block_size, config.mask_token_id
        return features_RLC, make_blocks(rows, choices_RL, anchor_RA, block_size=block_size, mask_token_id=mask)

    def logits(self, features_RLC: torch.Tensor, blocks: Blocks) -> torch.Tensor:
        """The draft's logits at the valid labels; a bf16 target is answered in bf16, with fp32 weights kept."""
        half = self.target.dtype == torch.bfloat16
        with torch.autocast(self.draft.device.type, torch.bfloat16, enabled=half):
            return block_logits(self.draft, self.target, features_RLC, blocks)

    def loss(self, rows: Rows, step: int) -> torch.Tensor:
        features_RLC, blocks = self.blocks(rows, f"{self.seed}/{step}")
        return block_loss(self.logits(features_RLC, blocks), blocks, self.gamma)

    @torch.no_grad()
    def report(self, rows: Rows) -> str:
        features_RLC, blocks = self.blocks(rows, "report")
        logits = self.logits(features_RLC, blocks)
        loss, committed = block_loss(logits, blocks, self.gamma), mean_committed(logits, blocks)
        return f"held out: loss {loss:.4f}, committed per step {committed:.2f}"


def draft_config_for(
    target: PreTrainedModel,
    *,
    n_layers: int,
    block_size: int,
    mask_token_id: int,
    target_layer_ids: tuple[int, ...] | None = None,
) -> DraftConfig:
    """A draft shaped like the target's own layers, all of them full attention.

    target_layer_ids: None spreads one feature layer per draft layer over the target, the last layer left out.
    """
    text = target.config.get_text_config()
    fields = text.to_dict()
    theta = (fields.get("rope_parameters") or {}).get("rope_theta", 10_000.0)  # the target's, where it has just one
    n_target = text.num_hidden_layers
    last = n_target - 2
    spread = tuple(sorted({round((i + 1) * last / n_layers) for i in range(n_layers)}))
    return DraftConfig(
        hidden_size=text.hidden_size,
        num_hidden_layers=n_layers,
        num_attention_heads=text.num_attention_heads,
        num_key_value_heads=text.num_key_value_heads,
        head_dim=fields.get("head_dim") or text.hidden_size // text.num_attention_heads,
        intermediate_size=text.intermediate_size,
        vocab_size=text.vocab_size,
        block_size=block_size,
        mask_token_id=mask_token_id,
        target_layer_ids=target_layer_ids or spread,
        num_target_layers=n_target,
        layer_types=(FULL,) * n_layers,
        sliding_window=None,
        is_causal=None,
        rope_parameters={"rope_type": "default", "rope_theta": theta},
        rms_norm_eps=text.rms_norm_eps,
        max_position_embeddings=text.max_position_embeddings,
    )


def train_draft(
    target: PreTrainedModel,
    config: DraftConfig,
    rows_at: RowsAt,
    recipe: Recipe,
    *,
    held_out: Rows,
    out: Path,
    n_anchors: int = 32,
    gamma: float | None = None,
    seed: int = 0,
    stop_after: int | None = None,
) -> DraftModel:
    """Train a draft, resuming what `out` holds, and save it there in the target's dtype; returns it in fp32.

    gamma: decay of the weights along the block, in slots; None takes the paper's for this block size.
    Raises ValueError when config and target do not fit.
    """
    check_pair(config, target)
    torch.manual_seed(seed)
    target.requires_grad_(False).eval()
    draft = initialised(DraftModel(config)).to(target.device)
    run = DraftRun(draft, target, n_anchors, gamma or default_gamma(config.block_size), seed)
    out.mkdir(parents=True, exist_ok=True)

    def report() -> str:
        draft.eval()
        return run.report(held_out.to(target.device))

    def loss_at(step: int) -> torch.Tensor:
        return run.loss(rows_at(step).to(target.device), step)

    checkpoint = out / "checkpoint.pt"
    train(draft, loss_at, recipe, checkpoint=checkpoint, name="draft", report=report, stop_after=stop_after)
    saved = DraftModel(config).to(target.dtype)
    saved.load_state_dict(draft.state_dict())
    saved.save_pretrained(out)
    return draft


def initialised(draft: DraftModel, std: float = 0.02) -> DraftModel:
    """Normal matrices and unit norms, as the targets themselves start."""
    for parameter in draft.parameters():
        if parameter.ndim >= 2:
            torch.nn.init.normal_(parameter, std=std)
    return draft
