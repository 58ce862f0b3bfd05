"""One training loop for targets and drafts: AdamW, warm-up and cosine, checkpoints that resume exactly, a progress bar.

Whatever is random at step s must be drawn from a generator seeded with (seed, s). The loop then keeps no generator
state, and a run that was interrupted is, step for step, the one that was not: same weights, same log.

Weights and moments are fp32, also where the forward computes in bf16. With several processes the caller's loss sees to
the gradients (DistributedDataParallel); here only the first one writes and prints.

Knows nothing of what is trained: it is given a module and a function from the step to its loss.
"""

import json
import math
import os
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn, TimeRemainingColumn
from torch import nn

from sglang_dflash.train.ranks import ALONE, Ranks

Report = dict[str, float | list[float]]

CHECKPOINT, LOG = "checkpoint.pt", "log.jsonl"


@dataclass(frozen=True)
class TrainRecipe:
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

    @property
    def facts(self) -> dict[str, Any]:
        """What the weights depend on."""
        return {name: value for name, value in asdict(self).items() if name not in ("save_every", "report_every")}


def learning_rate(recipe: TrainRecipe, step: int) -> float:
    """Within a cycle, linear warm-up times a cosine from 1 to `final_rate`; `step` counts from 0."""
    for n_steps, peak in recipe.cycles:
        if step < n_steps:
            warmup = min(1.0, (step + 1) / max(1, recipe.warmup_steps))
            cosine = 0.5 * (1 + math.cos(math.pi * step / n_steps))
            return peak * warmup * (recipe.final_rate + (1 - recipe.final_rate) * cosine)
        step -= n_steps
    raise ValueError(f"the recipe ends {step} steps before this one")


def adamw(module: nn.Module, recipe: TrainRecipe) -> torch.optim.AdamW:
    """AdamW that decays matrices and leaves norms, biases and kernels that begin as the identity alone."""
    learned = [(name, p) for name, p in module.named_parameters() if p.requires_grad]
    matrices = [p for name, p in learned if p.ndim >= 2 and not name.endswith("base_kernel")]
    vectors = [p for name, p in learned if p.ndim < 2 or name.endswith("base_kernel")]
    groups = [
        {"params": matrices, "weight_decay": recipe.weight_decay},
        {"params": vectors, "weight_decay": 0.0},
    ]
    return torch.optim.AdamW(groups, lr=recipe.learning_rate, betas=(0.9, 0.95), fused=True)


def differing(found: Mapping[str, Any], wanted: Mapping[str, Any]) -> str:
    """Return the facts that differ, by name: `steps 6, now 7; draft.block_size 8, now 16`; empty if all agree."""
    pairs = {name: (found.get(name, "unset"), wanted.get(name, "unset")) for name in found.keys() | wanted.keys()}
    return "; ".join(_difference(name, was, now) for name, (was, now) in sorted(pairs.items()) if was != now)


def _difference(name: str, was: Any, now: Any) -> str:
    if isinstance(was, dict) and isinstance(now, dict):
        return differing({f"{name}.{key}": was[key] for key in was}, {f"{name}.{key}": now[key] for key in now})
    return f"{name} {was}, now {now}"


@dataclass
class Run:
    """The state of a run between two steps; `step` is the next one."""

    module: nn.Module
    optimizer: torch.optim.Optimizer
    step: int
    losses: list[float]  # since the last report

    def save(self, path: Path, facts: Mapping[str, Any]) -> None:
        """Write one file, replaced whole."""
        partial = path.with_suffix(".partial")
        state = {
            "facts": dict(facts),
            "step": self.step,
            "losses": self.losses,
            "module": self.module.state_dict(),
            "optimizer": self.optimizer.state_dict(),
        }
        torch.save(state, partial)
        os.replace(partial, path)

    def load(self, path: Path, facts: Mapping[str, Any]) -> None:
        """Take over what `path` holds, if it exists.

        Raises ValueError when it was written by a run with other facts.
        """
        if not path.exists():
            return
        device = next(self.module.parameters()).device
        state = torch.load(path, map_location=device, weights_only=True)
        if other := differing(state["facts"], facts):
            raise ValueError(
                f"{path} was written by another run ({other}); "
                "repeat its options to resume, or delete the file to start again"
            )
        self.module.load_state_dict(state["module"])
        self.optimizer.load_state_dict(state["optimizer"])
        self.step, self.losses = state["step"], state["losses"]


class Log:
    """One line of JSON per report; lines of steps that a resumed run will take again are dropped."""

    def __init__(self, path: Path, run: Run, ranks: Ranks) -> None:
        self.path = path
        self.writes = ranks.is_first
        if self.writes:
            lines = path.read_text().splitlines(keepends=True) if path.exists() else []
            path.write_text("".join(line for line in lines if json.loads(line)["step"] <= run.step))

    def add(self, report: Mapping[str, Any]) -> None:
        if self.writes:
            with self.path.open("a") as file:
                file.write(json.dumps(report) + "\n")


def train(
    module: nn.Module,
    loss_at: Callable[[int], torch.Tensor],
    recipe: TrainRecipe,
    *,
    folder: Path,
    name: str,
    report: Callable[[], Report] = dict,
    facts: Mapping[str, Any] | None = None,
    ranks: Ranks = ALONE,
    stop_after: int | None = None,
) -> None:
    """Train `module` in place by `recipe`, resuming from the checkpoint in `folder` when there is one.

    loss_at: step -> scalar loss whose gradient reaches the module; a pure function of the step and the weights.
    report: called every `recipe.report_every` steps and at the end; its numbers are printed and logged.
    facts: what else the run depends on, of plain types; a checkpoint made with others is refused.
    ranks: each process has its loss; their mean is the batch's.
    stop_after: stop at this step, checkpoint written, as an interruption would (the schedule stays the recipe's).
    """
    run = Run(module, adamw(module, recipe), step=0, losses=[])
    checkpoint, facts = folder / CHECKPOINT, recipe.facts | dict(facts or {})
    run.load(checkpoint, facts)
    ranks.wait()  # until all have read it
    log = Log(folder / LOG, run, ranks)
    last = min(recipe.total_steps, stop_after or recipe.total_steps)
    console = Console(highlight=False, quiet=not ranks.is_first)
    columns = (BarColumn(), MofNCompleteColumn(), TimeElapsedColumn(), TimeRemainingColumn())
    module.train()
    with Progress(TextColumn("{task.description}"), *columns, console=console) as progress:
        bar = progress.add_task(name, total=recipe.total_steps, completed=run.step)
        while run.step < last:
            run.losses.append(take_step(run, loss_at, recipe, ranks))
            progress.update(bar, completed=run.step)
            if run.step % recipe.report_every == 0 or run.step == recipe.total_steps:
                numbers = {"step": run.step, "loss": sum(run.losses) / len(run.losses), **report()}
                console.print(f"{name} {shown(numbers)}", soft_wrap=True)
                log.add(numbers)
                run.losses.clear()
                module.train()
            if ranks.is_first and (run.step % recipe.save_every == 0 or run.step == last):
                run.save(checkpoint, facts)
    module.eval()


def take_step(run: Run, loss_at: Callable[[int], torch.Tensor], recipe: TrainRecipe, ranks: Ranks) -> float:
    """One update of the weights; returns the loss of the whole batch."""
    for group in run.optimizer.param_groups:
        group["lr"] = learning_rate(recipe, run.step)
    loss = loss_at(run.step)
    loss.backward()
    nn.utils.clip_grad_norm_(run.module.parameters(), recipe.max_grad_norm)
    run.optimizer.step()
    run.optimizer.zero_grad()
    run.step += 1
    return ranks.total(loss).item() / ranks.n


def shown(report: Mapping[str, int | float | list[float]]) -> str:
    """`step 100 · loss 1.2345 · accepted_at_slot .91 .80`"""
    parts = []
    for name, value in report.items():
        if isinstance(value, list):
            parts.append(f"{name} {' '.join(f'{v:.2f}'.removeprefix('0') for v in value)}")
        else:
            parts.append(f"{name} {value}" if isinstance(value, int) else f"{name} {value:.4f}")
    return " · ".join(parts)
