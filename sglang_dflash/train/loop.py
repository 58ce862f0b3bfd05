"""Training loop for targets and drafts: AdamW, warm-up and cosine, checkpoints that resume exactly, a progress bar.

The caller must draw all random numbers of step s from a generator seeded with (seed, s). The loop therefore stores no
generator state, and a resumed run equals an uninterrupted one in weights and log. Runs with a time limit are the
exception, see `schedule.ByTime`.

Weights and AdamW's moments are fp32, even if the forward runs in bf16. With several processes, the caller's loss must
average the gradients over the processes (DistributedDataParallel). Only the first process writes and prints.

The loop is independent of the model: it takes a module, and a function that returns a step's loss.
"""

import json
import os
import time
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn, TimeRemainingColumn
from torch import nn

from sglang_dflash.train.ranks import ALONE, Ranks
from sglang_dflash.train.schedule import BySteps, ByTime, Decay, Schedule

Report = dict[str, float | list[float]]

CHECKPOINT, LOG = "checkpoint.pt", "log.jsonl"
GROWING = ("steps", "minutes")  # settings that a resumed run may raise; the learning rate then follows the new length


@dataclass(frozen=True)
class TrainRecipe:
    """Schedule and optimiser settings: one cosine cycle, or several."""

    steps: int  # number of steps of the first cycle; not used if there is a time limit
    learning_rate: float  # peak of the first cycle
    more_cycles: tuple[tuple[int, float], ...] = ()  # (number of steps, peak learning rate) of each further cycle
    warmup_steps: int = 50  # per cycle
    final_rate: float = 0.02  # learning rate at a cycle's end, as a fraction of the peak
    weight_decay: float = 0.1  # applies to matrices only
    max_grad_norm: float = 1.0
    save_every: int = 200
    report_every: int = 100
    minutes: float | None = None  # time limit, evaluations included; None: the run ends after its steps
    save_seconds: float | None = None  # a checkpoint is also due this long after the last one

    @property
    def schedule(self) -> Schedule:
        decay = Decay(self.warmup_steps, self.final_rate)
        if self.minutes is not None:
            return ByTime(60 * self.minutes, self.learning_rate, decay)
        return BySteps(((self.steps, self.learning_rate), *self.more_cycles), decay)

    @property
    def facts(self) -> dict[str, Any]:
        """Return the settings on which the weights depend."""
        free = ("save_every", "report_every", "save_seconds", "minutes" if self.minutes is None else "steps")
        return {name: value for name, value in asdict(self).items() if name not in free}


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


def grown(found: Mapping[str, Any], wanted: Mapping[str, Any]) -> dict[str, Any]:
    """Return the settings of `GROWING` that are larger now. Runs of several cycles may not grow."""
    if wanted.get("more_cycles"):
        return {}
    known = [name for name in GROWING if found.get(name) is not None and wanted.get(name) is not None]
    return {name: wanted[name] for name in known if wanted[name] > found[name]}


@dataclass
class Run:
    """State of a run between two steps; `step` is the number of the next step, from 0."""

    module: nn.Module
    optimizer: torch.optim.Optimizer
    step: int
    losses: list[float]  # one per step since the last report
    seconds: float = 0.0  # time used until this step, on the first process's clock

    def save(self, path: Path, facts: Mapping[str, Any]) -> None:
        """Write the state to `path`, replacing the file atomically."""
        partial = path.with_suffix(".partial")
        state = {
            "facts": dict(facts),
            "step": self.step,
            "losses": self.losses,
            "seconds": self.seconds,
            "module": self.module.state_dict(),
            "optimizer": self.optimizer.state_dict(),
        }
        torch.save(state, partial)
        os.replace(partial, path)

    def load(self, path: Path, facts: Mapping[str, Any]) -> None:
        """Restore the state from `path`, if the file exists.

        The length of the run (`GROWING`) may be larger than in the file.

        Raises:
            ValueError: a run with other facts wrote the file.
        """
        if not path.exists():
            return
        device = next(self.module.parameters()).device
        state = torch.load(path, map_location=device, weights_only=True)
        if other := differing(state["facts"] | grown(state["facts"], facts), facts):
            raise ValueError(
                f"{path} was written by another run ({other}); repeat its options to resume, or write to another "
                "folder (`train draft` can start there from this draft, with --start-from)"
            )
        self.module.load_state_dict(state["module"])
        self.optimizer.load_state_dict(state["optimizer"])
        self.step, self.losses = state["step"], state["losses"]
        self.seconds = state.get("seconds", 0.0)  # older checkpoints have none


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


class Clock:
    """Clock of a run's time in seconds. The time before interruptions counts, the time between the parts does not."""

    def __init__(self, read: Callable[[], float], run: Run, schedule: Schedule, ranks: Ranks) -> None:
        self.read = read
        self.began = read() - run.seconds
        self.saved_at = read()
        self.device = next(run.module.parameters()).device
        self.ranks = ranks if schedule.reads_clock else ALONE  # processes must agree only if the weights depend on it

    def seconds(self) -> float:
        """Return the first process's seconds. All processes must call this together."""
        return self.ranks.from_first(self.read() - self.began, self.device)

    def save_is_due(self, after: float | None) -> bool:
        """Return whether `after` seconds have passed since the start or the last save; None: never."""
        return after is not None and self.read() - self.saved_at >= after

    def saved(self) -> None:
        self.saved_at = self.read()


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
    clock: Callable[[], float] = time.monotonic,
) -> None:
    """Train `module` in place by `recipe`, resuming from a checkpoint in `folder`.

    Args:
        loss_at: returns a step's scalar loss, with gradients. It must depend only on the step and the weights.
        name: text shown in the progress bar and in reports.
        report: called every `recipe.report_every` steps and after the run's last step, to print and log its numbers.
        save: called by the first process before each checkpoint.
        facts: further settings on which the run depends, of plain types. A checkpoint with other settings is rejected.
        ranks: processes of the run. The batch's loss is the mean of the processes' losses.
        stop_after: step after which a checkpoint is written and the run stops early; the schedule is unchanged.
        clock: returns seconds.

    Raises:
        ValueError: the checkpoint belongs to a run with other facts.
    """
    run = Run(module, adamw(module, recipe), step=0, losses=[])
    checkpoint, facts = folder / CHECKPOINT, recipe.facts | dict(facts or {})
    run.load(checkpoint, facts)
    ranks.wait()  # all processes must have read the checkpoint before the first process overwrites it
    log, schedule = Log(folder / LOG, run, ranks), recipe.schedule
    watch = Clock(clock, run, schedule, ranks)

    def is_over() -> bool:
        return schedule.is_over(run.step, run.seconds) or (stop_after is not None and run.step >= stop_after)

    console = Console(highlight=False, quiet=not ranks.is_first)
    columns = (BarColumn(), MofNCompleteColumn(), TimeElapsedColumn(), TimeRemainingColumn())
    if run.step:
        console.print(resumption(name, schedule.place(run.step, run.seconds), is_over=is_over()))
    module.train()
    with Progress(TextColumn("{task.description}"), *columns, console=console) as progress:
        bar = progress.add_task(name, total=schedule.total)
        progress.update(bar, completed=schedule.done(run.step, run.seconds))
        while not is_over():
            run.losses.append(take_step(run, loss_at, recipe.max_grad_norm, schedule, ranks))
            run.seconds = watch.seconds()
            progress.update(bar, completed=schedule.done(run.step, run.seconds))
            if run.step % recipe.report_every == 0 or schedule.is_over(run.step, run.seconds):
                numbers = {"step": run.step, "loss": sum(run.losses) / len(run.losses), **report()}
                console.print(f"{name} {shown(numbers)}", soft_wrap=True)
                log.add(numbers)
                run.losses.clear()
                module.train()
                run.seconds = watch.seconds()
            is_due = run.step % recipe.save_every == 0 or watch.save_is_due(recipe.save_seconds)
            if ranks.is_first and (is_due or is_over()):
                save()
                run.save(checkpoint, facts)
                watch.saved()
    module.eval()


def resumption(name: str, place: str, *, is_over: bool) -> str:
    return f"{name} ended at {place}; a longer run continues it" if is_over else f"{name} resumes from {place}"


def take_step(
    run: Run, loss_at: Callable[[int], torch.Tensor], max_grad_norm: float, schedule: Schedule, ranks: Ranks
) -> float:
    """Update the weights once and return the loss of the whole batch."""
    for group in run.optimizer.param_groups:
        group["lr"] = schedule.rate(run.step, run.seconds)
    loss = loss_at(run.step)
    loss.backward()
    nn.utils.clip_grad_norm_(run.module.parameters(), max_grad_norm)
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
