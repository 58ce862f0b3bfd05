"""The loop: a run that was interrupted ends with the weights of one that was not."""

import pytest
import torch
from torch import nn

from sglang_dflash.train.loop import Recipe, adamw, learning_rate, train

RECIPE = Recipe(steps=6, learning_rate=0.1, warmup_steps=2, save_every=2, report_every=3)


def make_module() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(4, 8), nn.RMSNorm(8), nn.Linear(8, 1))


def loss_of(module):
    def loss_at(step: int) -> torch.Tensor:
        x = torch.randn(5, 4, generator=torch.Generator().manual_seed(step))
        return (module(x) - x.sum(1, keepdim=True)).square().mean()

    return loss_at


def run(path, recipe=RECIPE, **options) -> nn.Module:
    module = make_module()
    train(module, loss_of(module), recipe, checkpoint=path, name="toy", **options)
    return module


def equal(a: nn.Module, b: nn.Module) -> bool:
    return all(torch.equal(p, q) for p, q in zip(a.parameters(), b.parameters(), strict=True))


@pytest.mark.parametrize("stop_after", [1, 2, 3, 5])
def test_an_interrupted_run_ends_where_an_uninterrupted_one_does(tmp_path, stop_after):
    run(tmp_path / "cut.pt", stop_after=stop_after)
    assert equal(run(tmp_path / "cut.pt"), run(tmp_path / "whole.pt"))


def test_the_optimizer_s_moments_are_resumed_too(tmp_path):
    """Weights alone are not enough: without the moments the run ends elsewhere."""
    run(tmp_path / "cut.pt", stop_after=3)
    state = torch.load(tmp_path / "cut.pt", weights_only=True)
    state["optimizer"]["state"] = {}
    torch.save(state, tmp_path / "cut.pt")
    assert not equal(run(tmp_path / "cut.pt"), run(tmp_path / "whole.pt"))


def test_a_finished_run_is_not_trained_again(tmp_path):
    first = run(tmp_path / "run.pt")
    written = (tmp_path / "run.pt").stat().st_mtime_ns
    assert equal(run(tmp_path / "run.pt"), first)
    assert (tmp_path / "run.pt").stat().st_mtime_ns == written


def test_a_checkpoint_of_another_recipe_is_refused(tmp_path):
    run(tmp_path / "run.pt")
    with pytest.raises(ValueError, match="written under another recipe"):
        run(tmp_path / "run.pt", Recipe(steps=7, learning_rate=0.1))


def test_no_partial_file_is_left(tmp_path):
    run(tmp_path / "run.pt")
    assert [path.name for path in tmp_path.iterdir()] == ["run.pt"]


def test_reports_come_every_so_often_and_at_the_end(tmp_path):
    reports = []
    run(tmp_path / "run.pt", Recipe(steps=5, learning_rate=0.1, report_every=2), report=lambda: reports.append(1) or "")
    assert len(reports) == 3


def test_learning_rate_of_two_cycles():
    recipe = Recipe(steps=10, learning_rate=1.0, more_cycles=((4, 0.5),), warmup_steps=2, final_rate=0.1)
    rates = [learning_rate(recipe, step) for step in range(14)]
    assert rates[0] == 0.5  # half warm
    assert rates[5] == pytest.approx(0.1 + 0.9 * 0.5)  # half way down
    assert rates[9] < 0.2
    assert rates[10] == 0.25
    assert recipe.total_steps == 14
    with pytest.raises(ValueError, match="ends"):
        learning_rate(recipe, 14)


def test_only_matrices_decay():
    module = make_module()
    decay = {id(p): g["weight_decay"] for g in adamw(module, RECIPE).param_groups for p in g["params"]}
    assert [decay[id(p)] for p in module.parameters()] == [0.1, 0, 0, 0.1, 0]
