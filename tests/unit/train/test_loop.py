"""Training loop: resuming, checkpoints, reports and learning rates."""

import json
from dataclasses import replace

import pytest
import torch
from torch import nn

from sglang_dflash.train.loop import CHECKPOINT, LOG, Run, TrainRecipe, adamw, train
from sglang_dflash.train.ranks import Ranks

RECIPE = TrainRecipe(steps=6, learning_rate=0.1, warmup_steps=2, save_every=2, report_every=3)


def make_module() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(4, 8), nn.RMSNorm(8), nn.Linear(8, 1))


def loss_of(module):
    def loss_at(step: int) -> torch.Tensor:
        x = torch.randn(5, 4, generator=torch.Generator().manual_seed(step))
        return (module(x) - x.sum(1, keepdim=True)).square().mean()

    return loss_at


def run(folder, recipe=RECIPE, **options) -> nn.Module:
    folder.mkdir(exist_ok=True)
    module = make_module()
    train(module, loss_of(module), recipe, folder=folder, name="toy", **options)
    return module


def equal(a: nn.Module, b: nn.Module) -> bool:
    return all(torch.equal(p, q) for p, q in zip(a.parameters(), b.parameters(), strict=True))


@pytest.mark.parametrize("stop_after", [1, 2, 3, 5])
def test_an_interrupted_run_equals_an_uninterrupted_one(tmp_path, stop_after):
    """Weights, optimizer moments and every line of the log are equal."""
    run(tmp_path / "cut", stop_after=stop_after)
    assert equal(run(tmp_path / "cut"), run(tmp_path / "whole"))
    cut, whole = (torch.load(tmp_path / name / CHECKPOINT, weights_only=True) for name in ("cut", "whole"))
    torch.testing.assert_close(cut["optimizer"], whole["optimizer"], rtol=0, atol=0)
    assert (tmp_path / "cut" / LOG).read_text() == (tmp_path / "whole" / LOG).read_text()


def test_all_processes_read_the_checkpoint_before_it_is_overwritten(tmp_path, monkeypatch):
    order = []
    monkeypatch.setattr(Run, "load", lambda *_: order.append("read"))
    monkeypatch.setattr(Ranks, "wait", lambda _: order.append("wait"))
    monkeypatch.setattr(Run, "save", lambda *_: order.append("write"))
    run(tmp_path, stop_after=2)
    assert order == ["read", "wait", "write"]


def test_repeated_steps_after_a_crash_are_logged_once(tmp_path):
    """After a crash the log may be ahead of the checkpoint. Lines of steps that are repeated are replaced."""
    every = replace(RECIPE, save_every=4, report_every=1)
    whole = run(tmp_path / "whole", every)
    run(tmp_path / "cut", every, stop_after=4)
    with (tmp_path / "cut" / LOG).open("a") as log:
        log.write('{"step": 5, "loss": 7.0}\n')
    assert equal(run(tmp_path / "cut", every), whole)
    assert (tmp_path / "cut" / LOG).read_text() == (tmp_path / "whole" / LOG).read_text()


def test_a_finished_run_is_not_trained_again_and_leaves_no_partial_file(tmp_path):
    first = run(tmp_path / "run")
    assert sorted(path.name for path in (tmp_path / "run").iterdir()) == [CHECKPOINT, LOG]
    written = (tmp_path / "run" / CHECKPOINT).stat().st_mtime_ns
    assert equal(run(tmp_path / "run"), first)
    assert (tmp_path / "run" / CHECKPOINT).stat().st_mtime_ns == written


def test_a_checkpoint_of_another_run_is_refused(tmp_path):
    run(tmp_path / "run", facts={"text": "a"})
    with pytest.raises(ValueError, match=r"written by another run \(steps 6, now 5; text a, now b\); repeat its"):
        run(tmp_path / "run", replace(RECIPE, steps=5), facts={"text": "b"})


def test_a_run_may_grow(tmp_path, capsys):
    """A longer run goes on from the last step of the shorter one, at the learning rates of its own length."""
    run(tmp_path / "run")
    longer = replace(RECIPE, steps=9)
    run(tmp_path / "run", longer)
    assert "toy resumes from step 6 of 9" in capsys.readouterr().out
    assert torch.load(tmp_path / "run" / CHECKPOINT, weights_only=True)["step"] == 9
    assert [json.loads(line)["step"] for line in (tmp_path / "run" / LOG).read_text().splitlines()] == [3, 6, 9]
    run(tmp_path / "run", longer)
    assert "toy ended at step 9 of 9; a longer run continues it" in capsys.readouterr().out
    with pytest.raises(ValueError, match=r"another run \(steps 9, now 6\)"):
        run(tmp_path / "run")


def test_a_run_of_several_cycles_may_not_grow(tmp_path):
    """The steps of its first cycle decide where the others begin."""
    cycles = replace(RECIPE, more_cycles=((2, 0.1),))
    run(tmp_path / "run", cycles)
    with pytest.raises(ValueError, match=r"another run \(steps 6, now 7\)"):
        run(tmp_path / "run", replace(cycles, steps=7))


def test_a_new_run_says_nothing_of_resuming(tmp_path, capsys):
    run(tmp_path / "run")
    assert "resumes" not in capsys.readouterr().out


def test_save_and_report_intervals_may_change(tmp_path):
    run(tmp_path / "cut", stop_after=3)
    assert equal(run(tmp_path / "cut", replace(RECIPE, save_every=1, report_every=1)), run(tmp_path / "whole"))


def test_the_model_is_saved_before_each_checkpoint(tmp_path):
    found = []
    run(tmp_path, save=lambda: found.append((tmp_path / CHECKPOINT).exists()), stop_after=5)
    assert found == [False, True, True]


def test_reports_come_at_intervals_and_at_the_end(tmp_path, capsys):
    numbers = {"tokens_per_step": 2.5, "accepted_at_slot": [0.9, 0.6]}
    run(tmp_path, TrainRecipe(steps=5, learning_rate=0.1, report_every=2), report=lambda: numbers)
    lines = [json.loads(line) for line in (tmp_path / LOG).read_text().splitlines()]
    assert [line["step"] for line in lines] == [2, 4, 5]
    assert all(line.items() >= numbers.items() for line in lines)
    assert "tokens_per_step 2.5000 · accepted_at_slot .90 .60" in capsys.readouterr().out


def test_learning_rate_of_two_cycles():
    recipe = TrainRecipe(steps=10, learning_rate=1.0, more_cycles=((4, 0.5),), warmup_steps=2, final_rate=0.1)
    rates = [recipe.schedule.rate(step, 0.0) for step in range(14)]
    assert rates[0] == 0.5  # halfway through the warm-up
    assert rates[5] == pytest.approx(0.1 + 0.9 * 0.5)  # halfway through the decay
    assert rates[9] < 0.2
    assert rates[10] == 0.25
    assert recipe.schedule.total == 14
    with pytest.raises(ValueError, match=r"has 14 steps.* no step 14"):
        recipe.schedule.rate(14, 0.0)


def test_only_matrices_decay():
    module = make_module()
    decay = {id(p): g["weight_decay"] for g in adamw(module, RECIPE).param_groups for p in g["params"]}
    assert [decay[id(p)] for p in module.parameters()] == [0.1, 0, 0, 0.1, 0]


BY_TIME = replace(RECIPE, steps=1, minutes=1.0, warmup_steps=2, report_every=4, save_every=100)


class Ticks:
    """Clock that advances by 5 s per step, and by 7 s per report."""

    def __init__(self) -> None:
        self.now = 1000.0
        self.reports: list[float] = []

    def __call__(self) -> float:
        return self.now

    def loss_of(self, module):
        def loss_at(step: int) -> torch.Tensor:
            self.now += 5
            return loss_of(module)(step)

        return loss_at

    def report(self) -> dict[str, float]:
        self.reports.append(self.now - 1000)
        self.now += 7
        return {"lr": 1.0}


def run_by_time(folder, ticks: Ticks, recipe=BY_TIME, **options) -> dict:
    """Run by `ticks`, and return the checkpoint."""
    folder.mkdir(exist_ok=True)
    module = make_module()
    own = {"clock": ticks, "report": ticks.report}
    train(module, ticks.loss_of(module), recipe, folder=folder, name="toy", **own, **options)
    return torch.load(folder / CHECKPOINT, weights_only=True)


def test_a_time_limit_ends_a_run(tmp_path):
    """Reports count: 4 steps, a report (27 s), 4 steps, a report (54 s), 2 steps and the last report (71 s)."""
    ticks = Ticks()
    state = run_by_time(tmp_path, ticks)
    assert (state["step"], state["seconds"]) == (10, 71)
    assert ticks.reports == [20, 47, 64]
    assert [json.loads(line)["step"] for line in (tmp_path / LOG).read_text().splitlines()] == [4, 8, 10]
    run_by_time(tmp_path, ticks)
    assert ticks.now == 1071, "a finished run takes no step"


@pytest.mark.parametrize("stop_after", [1, 4, 6])
def test_a_resumed_run_has_used_its_time(tmp_path, stop_after):
    """The clock runs on between the two parts, and this time does not count."""
    whole = run_by_time(tmp_path / "whole", Ticks())
    ticks = Ticks()
    run_by_time(tmp_path / "cut", ticks, stop_after=stop_after)
    ticks.now += 500
    cut = run_by_time(tmp_path / "cut", ticks)
    assert (cut["step"], cut["seconds"]) == (whole["step"], whole["seconds"])
    torch.testing.assert_close(cut["module"], whole["module"], rtol=0, atol=0)


def test_a_time_limit_may_grow(tmp_path, capsys):
    ticks = Ticks()
    run_by_time(tmp_path, ticks)
    state = run_by_time(tmp_path, ticks, replace(BY_TIME, minutes=2.0))
    assert "toy resumes from step 10, after 71 of 120 s" in capsys.readouterr().out
    assert state["seconds"] >= 120


def test_the_rate_follows_the_time_and_the_warm_up_the_steps():
    schedule = replace(BY_TIME, learning_rate=1.0, final_rate=0.1).schedule
    assert schedule.rate(0, 0.0) == 0.5
    assert schedule.rate(0, 30.0) == pytest.approx(0.5 * (0.1 + 0.9 * 0.5))
    assert [schedule.rate(9, seconds) for seconds in (0.0, 30.0, 60.0, 90.0)] == pytest.approx([1, 0.55, 0.1, 0.1])
    assert [schedule.is_over(10**9, seconds) for seconds in (59.9, 60.0)] == [False, True]


def test_a_step_takes_the_rate_of_its_time(tmp_path, monkeypatch):
    rates = []
    step = torch.optim.AdamW.step
    monkeypatch.setattr(torch.optim.AdamW, "step", lambda self: rates.append(self.param_groups[0]["lr"]) or step(self))
    run_by_time(tmp_path, Ticks())
    starts = [0, 5, 10, 15, 27, 32, 37, 42, 54, 59]
    assert rates == [BY_TIME.schedule.rate(i, seconds) for i, seconds in enumerate(starts)]


def test_checkpoints_are_due_by_time_too(tmp_path):
    """Steps end at 5, 10, 15, 27 (with a report), 32, 37 s... With 12 s between saves, and a save every 3rd step."""
    saved, ticks = [], Ticks()
    recipe = replace(BY_TIME, save_seconds=12.0, save_every=3)
    run_by_time(tmp_path, ticks, recipe, save=lambda: saved.append(ticks.now - 1000), stop_after=8)
    assert saved == [15, 27, 37, 54]


def test_the_first_process_decides_the_end(monkeypatch):
    """Each process adds its value, and only the first one's is not zero."""
    values = {}
    monkeypatch.setattr(Ranks, "total", lambda self, value: values.update({self.rank: value.item()}) or value)
    for rank in range(2):
        Ranks(rank, 2).from_first(7.5 + rank, torch.device("cpu"))
    assert values == {0: 7.5, 1: 0.0}


def test_a_time_limit_is_part_of_a_run(tmp_path):
    run(tmp_path / "run")
    with pytest.raises(ValueError, match=r"another run \(minutes unset, now 1.0; steps 6, now unset\)"):
        run(tmp_path / "run", replace(RECIPE, minutes=1.0))
