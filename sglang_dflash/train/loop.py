"""Training loop for targets and drafts: AdamW, warm-up and cosine, checkpoints that resume exactly, a progress bar.

The caller must draw all random numbers of step s from a generator seeded with (seed, s). The loop therefore stores no
generator state, and a resumed run equals an uninterrupted one in weights and log.

Weights and AdamW's moments are fp32, even if the forward runs in bf16. With several processes, the caller's loss must
average the gradients over the processes (DistributedDataParallel). Only the first process writes and prints.

The loop is independent of the model: it takes a module, and a function that returns a step's loss.
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
    """Schedule and optimiser settings: one cosine cycle, or several."""

    steps: int  # number of steps of the first cycle
    learning_rate: float  # peak of the first cycle
    more_cycles: tuple[tuple[int, float], ...] = ()  # (number of steps, peak learning rate) of each further cycle
    warmup_steps: int = 50  # per cycle
    final_rate: float = 0.02  # learning rate at a cycle's end, as a fraction of the peak
    weight_decay: float = 0.1  # applies to matrices only
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
        """Return the settings on which the weights depend."""
        return {name: value for name, value in asdict(self).items() if name not in ("save_every", "report_every")}


def learning_rate(recipe: TrainRecipe, step: int) -> float:
    """Return the learning rate at `step`, counted from 0.

    In each cycle the rate is the peak, times a linear warm-up, times a cosine from 1 to `final_rate`.
    """
    done = 0
    for n_steps, peak in recipe.cycles:
        if (at := step - done) < n_steps:
            warmup = min(1.0, (at + 1) / max(1, recipe.warmup_steps))
            cosine = 0.5 * (1 + math.cos(math.pi * at / n_steps))
            return peak * warmup * (recipe.final_rate + (1 - recipe.final_rate) * cosine)
        done += n_steps
    raise ValueError(f"the recipe has {done} steps, counted from 0; there is no step {step}")


def adamw(module: nn.Module, recipe: TrainRecipe) -> torch.optim.AdamW:
    """Return AdamW with weight decay on matrices, but not on norms, biases and the `base_kernel` of convolutions."""
    learned = [(name, p) for name, p in module.named_parameters() if p.requires_grad]
    matrices = [p for name, p in learned if p.ndim >= 2 and not name.endswith("base_kernel")]
    vectors = [p for name, p in learned if p.ndim < 2 or name.endswith("base_kernel")]
    groups = [
        {"params": matrices, "weight_decay": recipe.weight_decay},
        {"params": vectors, "weight_decay": 0.0},
    ]
    return torch.optim.AdamW(groups, lr=recipe.learning_rate, betas=(0.9, 0.95), fused=True)


def differing(found: Mapping[str, Any], wanted: Mapping[str, Any]) -> str:
    """Return the settings that differ, as text: `steps 6, now 7; draft.block_size 8, now 16`; empty if all agree."""
    pairs = {name: (found.get(name, "unset"), wanted.get(name, "unset")) for name in found.keys() | wanted.keys()}
    return "; ".join(_difference(name, was, now) for name, (was, now) in sorted(pairs.items()) if was != now)


def _difference(name: str, was: Any, now: Any) -> str:
    if isinstance(was, dict) and isinstance(now, dict):
        return differing({f"{name}.{key}": was[key] for key in was}, {f"{name}.{key}": now[key] for key in now})
    return f"{name} {was}, now {now}"


@dataclass
class Run:
    """State of a run between two steps; `step` is the number of the next step, from 0."""

    module: nn.Module
    optimizer: torch.optim.Optimizer
    step: int
    losses: list[float]  # one per step since the last report

    def save(self, path: Path, facts: Mapping[str, Any]) -> None:
        """Write the state to `path`, replacing the file atomically."""
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
        """Restore the state from `path`, if the file exists.

        Raises:
            ValueError: a run with other facts wrote the file.
        """
        if not path.exists():
            return
        device = next(self.module.parameters()).device
        state = torch.load(path, map_location=device, weights_only=True)
        if other := differing(state["facts"], facts):
            raise ValueError(
                f"{path} was written by another run ({other}); repeat its options to resume, or write to another "
                "folder (`train draft` can start there from this draft, with --start-from)"
            )
        self.module.load_state_dict(state["module"])
        self.optimizer.load_state_dict(state["optimizer"])
        self.step, self.losses = state["step"], state["losses"]


class Log:
    """Log with a line of JSON per report. A resumed run first drops the lines of steps that it will repeat."""

    def __init__(self, path: Path, run: Run, ranks: Ranks) -> None:
        self.path = path
        self.writes = ranks.is_first
        if self.writes:
            lines = path.read_text().splitlines(keepends=True) if path.exists() else []
            whole = [line for line in lines if line.endswith("\n")]  # an interrupted run may leave part of a line
            path.write_text("".join(line for line in whole if json.loads(line)["step"] <= run.step))

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
    save: Callable[[], None] = lambda: None,
    facts: Mapping[str, Any] | None = None,
    ranks: Ranks = ALONE,
    stop_after: int | None = None,
) -> None:
    """Train `module` in place by `recipe`, resuming from a checkpoint in `folder`.

    Args:
        loss_at: returns a step's scalar loss, with gradients. It must depend only on the step and the weights.
        name: text shown in the progress bar and in reports.
        report: called every `recipe.report_every` steps and after the recipe's last step, to print and log its numbers.
        save: called by the first process before each checkpoint.
        facts: further settings on which the run depends, of plain types. A checkpoint with other settings is rejected.
        ranks: processes of the run. The batch's loss is the mean of the processes' losses.
        stop_after: step after which a checkpoint is written and the run stops early; the schedule is unchanged.

    Raises:
        ValueError: the checkpoint belongs to a run with other facts.
    """
    run = Run(module, adamw(module, recipe), step=0, losses=[])
    checkpoint, facts = folder / CHECKPOINT, recipe.facts | dict(facts or {})
    run.load(checkpoint, facts)
    ranks.wait()  # all processes must have read the checkpoint before the first process overwrites it
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
                save()
                run.save(checkpoint, facts)
    module.eval()


def take_step(run: Run, loss_at: Callable[[int], torch.Tensor], recipe: TrainRecipe, ranks: Ranks) -> float:
    """Update the weights once and return the loss of the whole batch."""
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
    """Format a report: `step 100 · loss 1.2345 · accepted_at_slot .91 .80`."""
    parts = []
    for name, value in report.items():
        if isinstance(value, list):
            parts.append(f"{name} {' '.join(f'{v:.2f}'.removeprefix('0') for v in value)}")
        else:
            parts.append(f"{name} {value}" if isinstance(value, int) else f"{name} {value:.4f}")
    return " · ".join(parts)
