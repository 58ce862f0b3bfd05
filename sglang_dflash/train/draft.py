"""Training of a DFlash draft: the target reads text, and the draft learns to predict the target's next tokens.

For a bf16 target the forward runs in bf16. Weights, gradients and AdamW's moments stay fp32, because bf16 would round
small updates away.
"""

from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from random import Random
from typing import Any, NamedTuple

import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from transformers import PreTrainedModel

from sglang_dflash.engine.draft.record import FULL, Checkpoint
from sglang_dflash.reference.torch import DraftModel
from sglang_dflash.reference.torch.target import check_pair
from sglang_dflash.train.evaluation import Answers, acceptance, n_agreeing
from sglang_dflash.train.features import Read, read_rows, weights_digest
from sglang_dflash.train.loop import Report, TrainRecipe, train
from sglang_dflash.train.objective import Blocks, block_loss, default_gamma, make_blocks, random_anchors
from sglang_dflash.train.ranks import ALONE, Ranks
from sglang_dflash.train.sizes import Rollout, Second, check_target, feature_layers, intermediate_size
from sglang_dflash.train.start import RANDOM, start
from sglang_dflash.train.tokens import Rows

# Number of random tokens that each step scores if it does not score the whole vocabulary. In 50 steps about as many
# tokens are drawn as a vocabulary of 50,000 has, so a token that the draft wrongly prefers is soon scored.
N_OTHERS = 1024

RowsAt = Callable[[int], Rows]  # returns a step's batch, which must depend only on the step


class Data(NamedTuple):
    """Training rows, with held-out rows and prompts for evaluation."""

    rows_at: RowsAt
    held_out: Sequence[Rows]
    prompts: Sequence[torch.Tensor]  # int64 [1, tokens] each, from held-out text
    facts: dict[str, Any]  # settings that the rows depend on
    frequent: torch.Tensor | None = None  # int64, tokens scored in every step; None: the whole vocabulary
    listed: torch.Tensor | None = None  # int64, most frequent tokens, for a reduced vocabulary; may be fewer


@dataclass(frozen=True)
class Settings:
    """Settings of a draft's training and evaluation."""

    n_anchors: int = 32  # blocks per row
    gamma: float | None = None  # decay of the loss weights along the block, in slots; None: `default_gamma`
    seed: int = 0
    start: str = RANDOM  # initial weights, see `start.start`
    eval_tokens: int = 64  # tokens per answer when acceptance is measured


class BlockLoss(nn.Module):
    """Loss of a training step as a module's forward, because DistributedDataParallel wraps modules."""

    def __init__(self, draft: DraftModel, gamma: float) -> None:
        super().__init__()
        self.draft = draft
        self.gamma = gamma

    def forward(
        self, target: PreTrainedModel, features_RLC: torch.Tensor, blocks: Blocks, tokens: torch.Tensor | None = None
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Return the blocks' summed loss and the sum of their weights, see `objective.block_loss`."""
        return block_loss(self.draft, target, features_RLC, blocks, self.gamma, tokens=tokens)


class DraftRun:
    """Draft in training, with its target and settings. Methods get the data as arguments."""

    def __init__(
        self,
        draft: DraftModel,
        target: PreTrainedModel,
        settings: Settings,
        *,
        read: Read,
        frequent: torch.Tensor | None = None,
        ranks: Ranks = ALONE,
    ) -> None:
        self.draft = draft
        self.target = target
        self.frequent = frequent
        self.settings = settings
        self.gamma = settings.gamma or default_gamma(draft.config.block_size)
        self.read = read
        self.ranks = ranks
        self.block_loss = BlockLoss(draft, self.gamma)
        self.shared_loss = DistributedDataParallel(self.block_loss) if ranks.n > 1 else self.block_loss

    def blocks(self, rows: Rows, anchor_RA: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, Blocks]:
        """Return the target's argmax after each token, int64 [R, L], features [R, L, C], and the blocks to predict.

        All results are on the target's device.
        """
        rows = rows.to(self.target.device)
        choices_RL, features_RLC = self.read(rows)
        config = self.draft.config
        blocks = make_blocks(
            rows,
            choices_RL,
            anchor_RA.to(self.target.device),
            block_size=config.block_size,
            mask_token_id=config.mask_token_id,
            n_drafts=config.n_drafts,
        )
        return choices_RL, features_RLC, blocks

    def anchors(self, rows: Rows, seed: str) -> torch.Tensor:
        generator = torch.Generator().manual_seed(Random(seed).getrandbits(63))
        return random_anchors(rows.is_response_RL, self.settings.n_anchors, generator)

    def scored(self, step: int) -> torch.Tensor | None:
        """Return the tokens, besides labels, whose logits a step computes, int64: frequent and random tokens.

        None: the step computes the logits of the whole vocabulary.
        """
        if self.frequent is None:
            return None
        generator = torch.Generator().manual_seed(Random(f"scored/{self.settings.seed}/{step}").getrandbits(63))
        others = torch.randint(self.target.config.get_text_config().vocab_size, (N_OTHERS,), generator=generator)
        return torch.cat([self.frequent, others]).to(self.target.device)

    def autocast(self) -> torch.autocast:
        """Return a context that computes in bf16 if the target is bf16."""
        half = self.target.dtype == torch.bfloat16
        return torch.autocast(self.draft.device.type, torch.bfloat16, enabled=half)

    def loss(self, rows: Rows, step: int) -> torch.Tensor:
        """Return this process's part of the batch's loss, a scalar. The mean over processes is the batch's loss.

        Args:
            rows: the whole batch, on the CPU. Each process takes its share of the rows, with all
                anchors of these rows.
        """
        anchor_RA = self.anchors(rows, f"{self.settings.seed}/{step}")
        rank, n = self.ranks.rank, self.ranks.n
        _, features_RLC, blocks = self.blocks(rows.share(rank, n), anchor_RA[rank::n])
        with self.autocast():
            loss, weight = self.shared_loss(self.target, features_RLC, blocks, self.scored(step))
        return loss * n / self.ranks.total(weight).clamp(min=1e-9)

    def facts(self) -> dict[str, Any]:
        """Return the settings on which the weights depend, besides those of the data and the initial weights."""
        return {
            "target": weights_digest(self.target),
            "draft": self.draft.config.to_json(),
            "n_anchors": self.settings.n_anchors,
            "gamma": self.gamma,
            "seed": self.settings.seed,
            "scored": "all" if self.frequent is None else len(self.frequent),
        }

    @torch.no_grad()
    def report(self, data: Data, answers: Answers | None) -> Report:
        """Evaluate on held-out text, with acceptance only if there are answers. Each process evaluates its share."""
        self.draft.eval()
        device, mine = self.target.device, slice(self.ranks.rank, None, self.ranks.n)
        sums, agreeing = torch.zeros(2, device=device), torch.zeros(2, dtype=torch.int64, device=device)
        for rows in data.held_out[mine]:
            choices_RL, features_RLC, blocks = self.blocks(rows, self.anchors(rows, "report"))
            with self.autocast():
                sums += torch.stack(self.block_loss(self.target, features_RLC, blocks))
            agreeing += n_agreeing(rows.to(device), choices_RL)
        loss, weight = self.ranks.total(sums).tolist()
        agrees, asked = self.ranks.total(agreeing).tolist()
        on_text: Report = {"held_out_loss": loss / max(weight, 1e-9), "target_agrees": agrees / max(asked, 1)}
        return on_text | (self.acceptance(answers) if answers else {})

    def acceptance(self, answers: Answers) -> Report:
        """Measure the draft's acceptance in the answers of all processes. `answers` are this process's share."""
        accepted = acceptance(self.ranks.total(answers.n_surviving(self.draft)))
        return {"tokens_per_step": accepted.tokens_per_step, "accepted_at_slot": accepted.at_slot}


def draft_config_for(
    target: PreTrainedModel,
    *,
    n_layers: int,
    block_size: int,
    mask_token_id: int,
    target_layer_ids: tuple[int, ...] | None = None,
    second: Second | None = None,
    rollout: Rollout | None = None,
    draft_vocab_size: int | None = None,
) -> Checkpoint:
    """Return the configuration of a draft whose layers have the target's sizes, all with full attention.

    Args:
        target_layer_ids: feature layers; None: up to one per draft layer, spread over all but the target's last layer.
        second: sizes of a DFlash 2 draft; None: DFlash.
        rollout: sizes of Domino's rollout; None: no rollout.
        draft_vocab_size: number of tokens that can be drafted; None: all.

    Raises:
        ValueError: the target has no such layers or no such mask token, or the sizes contradict each other.
    """
    text = target.config.get_text_config()
    fields = text.to_dict()
    check_target(fields, second, draft_vocab_size)
    # Targets with a RoPE base per layer type have no `rope_theta` here, so 10,000 applies.
    theta = (fields.get("rope_parameters") or {}).get("rope_theta", 10_000.0)
    if not 0 <= mask_token_id < text.vocab_size:
        raise ValueError(
            f"the mask token {mask_token_id} is not within 0..{text.vocab_size - 1}, the target's vocabulary; "
            "give --mask-token-id an id that no text uses"
        )
    config = Checkpoint(
        hidden_size=text.hidden_size,
        num_hidden_layers=n_layers,
        num_attention_heads=text.num_attention_heads,
        num_key_value_heads=text.num_key_value_heads,
        head_dim=fields.get("head_dim") or text.hidden_size // text.num_attention_heads,
        intermediate_size=intermediate_size(fields),
        vocab_size=text.vocab_size,
        block_size=block_size,
        mask_token_id=mask_token_id,
        target_layer_ids=feature_layers(target_layer_ids, n_layers, text.num_hidden_layers),
        num_target_layers=text.num_hidden_layers,
        layer_types=(FULL,) * n_layers,
        rope_parameters={"rope_type": "default", "rope_theta": theta},
        rms_norm_eps=text.rms_norm_eps,
        max_position_embeddings=text.max_position_embeddings,
        draft_vocab_size=None if draft_vocab_size == text.vocab_size else draft_vocab_size,
        **(asdict(second) if second else {}),
        **(asdict(rollout) if rollout else {}),
    )
    check_pair(config, target)
    return config


def train_draft(
    target: PreTrainedModel,
    config: Checkpoint,
    data: Data,
    recipe: TrainRecipe,
    *,
    out: Path,
    settings: Settings,
    dtype: torch.dtype,
    read: Read | None = None,
    saved: Callable[[], None] = lambda: None,
    ranks: Ranks = ALONE,
    stop_after: int | None = None,
) -> DraftModel:
    """Train a draft, resuming from `out`, and return it in fp32. With each checkpoint the draft is also saved in `out`.

    Args:
        dtype: dtype of the saved draft.
        read: function that returns the target's argmax tokens and features; None: the target reads the rows in every
            step.
        saved: called by the first process after each saving of the draft.
    Raises:
        ValueError: `out` contains the checkpoint of another run, or `settings.start` is a draft with other settings.
    """
    torch.manual_seed(settings.seed)
    target.requires_grad_(False).eval()
    draft = DraftModel(config).to(target.device)
    if config.draft_vocab_size and data.listed is not None:  # `start` keeps the list of a draft that has one
        draft.list_tokens(data.listed)
    started = start(draft, target, settings.start)
    run = DraftRun(
        draft,
        target,
        settings,
        read=read or partial(read_rows, target, layer_ids=config.target_layer_ids),
        frequent=data.frequent,
        ranks=ranks,
    )
    prompts = [prompt[0].tolist() for prompt in data.prompts[ranks.rank :: ranks.n]]
    answers = Answers(target, prompts, settings.eval_tokens, config.n_drafts + 1) if data.prompts else None
    out.mkdir(parents=True, exist_ok=True)

    def save() -> None:
        draft.save_pretrained(out, dtype=dtype)
        saved()

    train(
        draft,
        lambda step: run.loss(data.rows_at(step), step),
        recipe,
        folder=out,
        name="draft",
        report=lambda: run.report(data, answers),
        save=save,
        facts=data.facts | run.facts() | {"start": started},
        ranks=ranks,
        stop_after=stop_after,
    )
    ranks.wait()
    return draft
