"""Training on two processes must equal training on one process with the whole batch."""

import json
import os
import subprocess
import sys
from contextlib import nullcontext
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from sglang_dflash.reference.torch import DraftModel
from sglang_dflash.train.__main__ import main
from sglang_dflash.train.draft import DraftRun
from sglang_dflash.train.loop import LOG
from sglang_dflash.train.ranks import ALONE, Ranks, joined
from sglang_dflash.train.tiny_pair import make_target, make_tokenizer
from tests.fixtures import two_ranks

SCRIPT = Path(two_ranks.__file__)


def torchrun(*arguments: str | Path) -> None:
    """Run a program in two processes over gloo with one thread each, for at most 300 s."""
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
    environment = os.environ | {"OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": "", "PYTHONWARNINGS": "ignore"}
    with subprocess.Popen(
        [*command, *map(str, arguments)], env=environment, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
    ) as run:
        try:
            output, _ = run.communicate(timeout=300)
        except subprocess.TimeoutExpired:
            run.terminate()  # torchrun ends its processes, each in its own session, and then itself
            raise
    assert run.returncode == 0, output


@pytest.fixture(scope="module")
def inputs(tmp_path_factory) -> Path:
    """Return a folder with a target of random weights, and training data."""
    folder = tmp_path_factory.mktemp("ranks")
    torch.manual_seed(0)
    make_target("dense").save_pretrained(folder / "target")
    make_tokenizer().save_pretrained(folder / "target")
    words = ["Count.", "Spell the words anchor and basket.", "What is 12 + 30?", "Add 1 and 2.", "Sort these."]
    rows = [{"prompt": word, "response": " ".join(words)} for word in words * 3]
    (folder / "data.jsonl").write_text("\n".join(json.dumps(row) for row in rows))
    return folder


@pytest.fixture(scope="module")
def folder(inputs) -> Path:
    """Run `two_ranks.py` in two processes. Return the folder of gradients-0.pt, gradients-1.pt and the draft two/."""
    torchrun(SCRIPT, inputs, *trainer(inputs, "two"), "--cache", inputs / "cache")
    return inputs


def trainer(folder: Path, out: str, *more: str) -> list[str]:
    sizes = "--layers 1 --block-size 4 --rows 4 --anchors 8 --steps 4 --warmup-steps 1 --report-every 2 --eval-tokens 6"
    where = ["--target", folder / "target", "--data", folder / "data.jsonl", "--out", folder / out]
    return ["draft", *map(str, where), *sizes.split(), "--dtype", "fp32", "--device", "cpu", *more]


def test_gradients_of_shares_add_up_to_the_batch(monkeypatch):
    """This process computes the gradients of both ranks' shares. Their mean is the gradient of the whole batch."""
    weights = []
    monkeypatch.setattr("sglang_dflash.train.draft.DistributedDataParallel", lambda module: module)
    monkeypatch.setattr(Ranks, "total", lambda self, weight: weights.append(weight) or weight)
    want = two_ranks.gradients(ALONE)
    for rank in range(2):
        two_ranks.gradients(Ranks(rank, 2))
    whole, *shares = weights
    assert shares[0] != shares[1]
    torch.testing.assert_close(shares[0] + shares[1], whole)
    monkeypatch.setattr(Ranks, "total", lambda self, weight: whole)
    parts = [two_ranks.gradients(Ranks(rank, 2)) for rank in range(2)]
    for name, gradient in want.items():
        torch.testing.assert_close((parts[0][name] + parts[1][name]) / 2, gradient, atol=1e-12, rtol=1e-9)


@pytest.mark.full
def test_gradients_equal_those_of_one_process(folder):
    want = two_ranks.gradients(ALONE)
    for rank in range(2):
        found = torch.load(folder / f"gradients-{rank}.pt", weights_only=True)
        assert found.keys() == want.keys()
        for name, gradient in want.items():
            assert gradient.abs().max() > 1e-6
            torch.testing.assert_close(found[name], gradient, atol=1e-12, rtol=1e-9)


@pytest.mark.full
def test_the_run_equals_that_of_one_process(folder):
    """Two processes sum in another order, which changes the last bits of fp32 weights, but no acceptance count."""
    assert main(trainer(folder, "one")) == 0
    one, two = (DraftModel.from_pretrained(folder / name).state_dict() for name in ("one", "two"))
    for name in one:
        torch.testing.assert_close(two[name], one[name], atol=1e-4, rtol=0)
    logs = [[json.loads(line) for line in (folder / name / LOG).read_text().splitlines()] for name in ("one", "two")]
    assert [line["step"] for line in logs[1]] == [2, 4]
    for a, b in zip(*logs, strict=True):
        assert b.pop("accepted_at_slot") == a.pop("accepted_at_slot")
        assert b == pytest.approx(a, rel=1e-4)


def test_a_report_includes_the_shares_of_other_processes(monkeypatch):
    """This process has no held-out rows, and two steps without an accepted draft. The other one has the rest."""
    monkeypatch.setattr(Ranks, "total", lambda self, own: own + torch.tensor([6, 3]).to(own))
    run = DraftRun.__new__(DraftRun)
    run.ranks, run.draft = Ranks(0, 2), SimpleNamespace(eval=lambda: None)
    run.target = SimpleNamespace(device=torch.device("cpu"))
    answers = SimpleNamespace(n_surviving=lambda draft: torch.tensor([2, 0]))
    assert run.report(SimpleNamespace(held_out=[]), answers) == {
        "held_out_loss": 6 / 3, "target_agrees": 6 / 3, "tokens_per_step": 1 + 3 / 8, "accepted_at_slot": [3 / 8],
    }  # fmt: skip


def test_rows_must_be_shared_evenly(inputs, monkeypatch, capsys):
    three = Ranks(0, 3), torch.device("cpu")
    monkeypatch.setattr("sglang_dflash.train.runs.joined", lambda device: nullcontext(three))
    assert main(trainer(inputs, "three")) == 2
    assert "--rows 4 cannot be shared evenly by 3 processes; give a multiple of 3" in capsys.readouterr().err


def test_more_processes_than_gpus_are_refused(monkeypatch):
    for name, value in {"RANK": "0", "LOCAL_RANK": "0", "LOCAL_WORLD_SIZE": "4"}.items():
        monkeypatch.setenv(name, value)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    cure = "4 processes share 2 GPUs; start one per GPU: torchrun --nproc-per-node 2"
    with pytest.raises(ValueError, match=cure), joined("cuda"):
        pass
    with pytest.raises(ValueError, match="--device cuda:1 is one GPU for 4 processes"), joined("cuda:1"):
        pass
