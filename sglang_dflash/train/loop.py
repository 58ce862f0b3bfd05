"""One training loop for targets and drafts: AdamW, warm-up and cosine, checkpoints that resume exactly, a progress bar.

Whatever is random at step s must be drawn from a generator seeded with (seed, s). The loop then keeps no generator
state, and a run that was interrupted ends with the same weights as one that was not.

Knows nothing of what is trained: it is given a module and a function from the step to its loss.
"""

import math
import os
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path

import torch
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn, TimeRemainingColumn
from torch import nn


@dataclass(frozen=True)
class Recipe:
    """How long and how fast to train: one cosine cycle, or several."""

    steps: int
    learning_rate: float
    more_cycles: tuple[tuple[int, float], ...] = ()  # (steps, learning rate) of each
    warmup_steps: int = 50
    final_rate: float = 0.02  # the cosine ends at this share of learning_rate
    weight_decay: float = 0.1  # on matrices only
    max_grad_norm: float = 1.0
    save_every: int = 200
    report_every: int = 100

    @property
    def cycles(self) -> tuple[tuple[int, float], ...]:
        return ((self.steps, self.learning_rate), *self.more_cycles)

    @property
    def total_steps(self) -> int:
        return sum(steps for steps, _ in self.cycles)


def learning_rate(recipe: Recipe, step: int) -> float:
    """Within a cycle, linear warm-up times a cosine from 1 to `final_rate`; `step` counts from 0."""
    for n_steps, peak in recipe.cycles:
        if step < n_steps:
            warmup = min(1.0, (step + 1) / max(1, recipe.warmup_steps))
            cosine = 0.5 * (1 + math.cos(math.pi * step / n_steps))
            return peak * warmup * (recipe.final_rate + (1 - recipe.final_rate) * cosine)
        step -= n_steps
    raise ValueError(f"the recipe ends {step} steps before this one")


def adamw(module: nn.Module, recipe: Recipe) -> torch.optim.AdamW:
    """AdamW that decays matrices and leaves norms and biases alone."""
    matrices = [p for p in module.parameters() if p.requires_grad and p.ndim >= 2]
    vectors = [p for p in module.parameters() if p.requires_grad and p.ndim < 2]
    groups = [
        {"params": matrices, "weight_decay": recipe.weight_decay},
        {"params": vectors, "weight_decay": 0.0},
    ]
    return torch.optim.AdamW(groups, lr=recipe.learning_rate, betas=(0.9, 0.95), fused=True)


class Checkpoint:
    """The state of an interrupted run, in one file that is replaced whole."""

    def __init__(self, path: Path, recipe: Recipe) -> None:
        self.path = path
        self.recipe = asdict(recipe)

    def save(self, step: int, module: nn.Module, optimizer: torch.optim.Optimizer) -> None:
        partial = self.path.with_suffix(".partial")
        state = {
            "step": step,
            "recipe": self.recipe,
            "module": module.state_dict(),
            "optimizer": optimizer.state_dict(),
        }
        torch.save(state, partial)
        os.replace(partial, self.path)

    def load(self, module: nn.Module, optimizer: torch.optim.Optimizer) -> int:
        """Restore module and optimizer in place and return the next step: 0 where nothing was saved.

        Raises ValueError when the file was written under another recipe.
        """
        if not self.path.exists():
            return 0
        device = next(module.parameters()).device
        state = torch.load(self.path, map_location=device, weights_only=True)
        if state["recipe"] != self.recipe:
            raise ValueError(
                f"{self.path} was written under another recipe ({state['recipe']}, now {self.recipe}); "
                "repeat the old options to resume, or delete the file to start again"
            )
        module.load_state_dict(state["module"])
        optimizer.load_state_dict(state["optimizer"])
        return state["step"]


def train(
    module: nn.Module,
    loss_at: Callable[[int], torch.Tensor],
    recipe: Recipe,
    *,
    checkpoint: Path,
    name: str,
    report: Callable[[], str] | None = None,
    stop_after: int | None = None,
) -> None:
    """Train `module` in place by `recipe`, resuming from `checkpoint` when it exists.

    loss_at: step -> scalar loss whose gradient reaches the module; a pure function of the step and the weights.
    report: called every `recipe.report_every` steps and at the end; its text is printed behind the loss.
    stop_after: stop at this step, checkpoint written, as an interruption would (the schedule stays the recipe's).
    """
    optimizer = adamw(module, recipe)
    saved = Checkpoint(checkpoint, recipe)
    first, last = saved.load(module, optimizer), min(recipe.total_steps, stop_after or recipe.total_steps)
    console, losses = Console(highlight=False), []
    columns = (
        TextColumn("{task.description}"),
        BarColumn(),
        MofNCompleteColumn(),
        TimeElapsedColumn(),
        TimeRemainingColumn(),
    )
    module.train()
    with Progress(*columns, console=console) as progress:
        bar = progress.add_task(name, total=recipe.total_steps, completed=first)
        for step in range(first, last):
            for group in optimizer.param_groups:
                group["lr"] = learning_rate(recipe, step)
            loss = loss_at(step)
            loss.backward()
            nn.utils.clip_grad_norm_(module.parameters(), recipe.max_grad_norm)
            optimizer.step()
            optimizer.zero_grad()
            losses.append(loss.item())
            progress.update(bar, completed=step + 1)
            if (step + 1) % recipe.save_every == 0 or step + 1 == last:
                saved.save(step + 1, module, optimizer)
            if (step + 1) % recipe.report_every == 0 or step + 1 == last:
                shown = report() if report else ""
                console.print(f"{name} step {step + 1} loss {sum(losses) / len(losses):.4f} {shown}")
                losses.clear()
                module.train()
    module.eval()
