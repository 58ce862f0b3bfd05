"""Scripts of `env/gpu`: dry runs in the GPU emulation, and their parsers, clock and plan.

`test_gpu_training.py` tests `b.sh`.
"""

import importlib
import json
import os
import subprocess
import sys
import time
from itertools import groupby
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import sglang_dflash
from env.gpu import bench_ties, checks, kernel_times, models, plugin_folder, rests, shared_layers, speeds, steps
from env.gpu.clock import RESERVE_S, Clock, Document
from env.gpu.log_lines import about_memory, intervals
from env.gpu.servers27 import DRY, GPU, OFF, OURS, STOCK, WIDTH_1, command, environment
from sglang_dflash.pairs.tiny import pairs as tiny
from sglang_dflash.reference.torch import DraftModel
from sglang_dflash.tools.bench.compare import Difference, Unequal
from tests.fixtures.forking import RUN
from tests.fixtures.processes import is_alive

ROOT = Path(__file__).parents[2]
LIMIT_S = 600.0  # of a dry run; all scripts together take less on two idle cores
PROMPT = {"messages": [{"role": "user", "content": "Which of the two is larger?"}]}


def run(script: str, out: Path, limit_s: float = LIMIT_S, **env: str) -> tuple[str, dict[str, Any]]:
    """Run a script dry; return what it prints, and its document."""
    # The script's own servers are forked from a process of its own, not from the tests' processes.
    inherited = {name: value for name, value in os.environ.items() if name not in (RUN, "MINUTES", "GPU_BEGAN", "UP")}
    env = {"GPU_DRY": "1", "OUT": str(out), "WORK": str(out / "work"), "PYTHON": sys.executable, **env}
    ended = subprocess.run(
        ["bash", str(ROOT / "env" / "gpu" / script)],
        env=inherited | env, cwd=out, capture_output=True, text=True, timeout=limit_s, check=False,
    )  # fmt: skip
    assert ended.returncode == 0, ended.stdout + ended.stderr
    return ended.stdout, json.loads((out / script.replace(".sh", ".json")).read_text())


# -- dry runs ------------------------------------------------------------------------------------------------------


@pytest.mark.full
def test_a_measures_every_cell_in_turns(tmp_path: Path) -> None:
    _, found = run("a.sh", tmp_path, MINUTES="9")
    assert (found["done"], found["left_out"], found["failed"]) == (True, [], {})
    rows = found["rows"]
    cells = [(row["block"], row["round"], row["requests"], row["arm"]) for row in rows]
    wanted = {
        (block, n, requests, arm)
        for block, arms in {16: [OFF, STOCK, OURS], 8: [OFF, STOCK, OURS, WIDTH_1]}.items()
        for n in range(2)
        for requests in (1, 2)
        for arm in arms
    }
    assert len(cells) == len(wanted)
    assert set(cells) == wanted
    assert [row["began_s"] for row in rows] == sorted(row["began_s"] for row in rows)
    for (block, _, _), turns in groupby(cells, key=lambda cell: cell[:3]):  # all arms before the next cell
        assert len(list(turns)) == (3 if block == 16 else 4)
    for row in rows:
        simulated = found["settings"]["acceptance"][str(row["block"])] if row["arm"] in (STOCK, OURS) else 1
        assert row["ms"] > 0, row
        assert row["acceptance"] == pytest.approx(simulated, abs=0.35), row  # SGLang draws the rounding of each step
        assert row["tokens_per_s"] > 0
    starts = {(start["arm"], start["block"]): start for start in found["starts"]}
    assert set(starts) == {
        (OFF, None),
        *((arm, 16) for arm in (STOCK, OURS)),
        *((a, 8) for a in (STOCK, OURS, WIDTH_1)),
    }
    for start in starts.values():  # three layers of linear attention and one of full attention
        assert (start["shared_layers"], start["error"]) == (2, "")
        assert start["ready_s"] > 0
        assert any("graph begin" in line for line in start["memory"])
        assert start["internal_states"][0]["memory_usage"]["weight"] is not None
    kernels = {row["kernel"] for row in found["kernels"]["rows"]}
    assert kernels == {"gdn_verify", "causal_conv1d_update", "copy_draft"}
    assert {one["name"]: one["status"] for one in found["prove"]["results"]} == dict.fromkeys(
        ("draft graph", "one token"), "skipped"
    )
    assert {(line["block"], line["requests"], line["arm"]) for line in found["summary"]} == {
        (block, requests, arm) for block, _, requests, arm in wanted
    }


@pytest.mark.full
def test_d_measures_rests_on_every_backend(tmp_path: Path) -> None:
    _, found = run("d.sh", tmp_path, MINUTES="9")
    assert (found["done"], found["left_out"], found["failed"]) == (True, [], {})
    cells = [(line["backend"], line["prompt"], line["requests"], line["arm"]) for line in found["summary"]]
    wanted = [(backend, *load, arm) for backend in rests.BACKENDS for load in rests.DRY_LOADS for arm in (OFF, WIDTH_1)]
    assert sorted(cells) == sorted(wanted)
    assert all(line["ms"] > 0 for line in found["summary"])
    assert [start["backend"] for start in found["starts"]] == [backend for backend in rests.BACKENDS for _ in range(2)]


@pytest.mark.full
def test_c_measures_every_set_and_compares_answers(tmp_path: Path) -> None:
    for name in speeds.DATA:
        (tmp_path / f"{name}.jsonl").write_text(json.dumps(PROMPT) + "\n" + json.dumps(PROMPT) + "\n")
    _, found = run("c.sh", tmp_path, PROMPTS=str(tmp_path), MINUTES="9")
    assert (found["done"], found["left_out"], found["failed"]) == (True, [], {})
    assert [call["data"] for call in found["calls"]] == list(speeds.DATA)
    for call in found["calls"]:
        assert (call["result"], call["beyond_ties"], call["near_ties"]) == ("status 0", [], 0)
        lines = {(line["concurrency"], line["arm"]): line for line in call["summary"]}
        assert set(lines) == {(n, arm) for n in (1, 2) for arm in ("off", "stock", "ours")}
        assert all(line["tokens_per_s"]["median"] > 0 for line in lines.values())
    assert [start["arm"] for start in found["starts"]] == ["off", "stock", "ours"]


@pytest.mark.full
@pytest.mark.parametrize("script", ["a.sh", "c.sh", "d.sh"])
def test_without_time_everything_is_left_out(script: str, tmp_path: Path) -> None:
    began = time.monotonic()
    printed, found = run(script, tmp_path, limit_s=60, MINUTES="0.2", PROMPTS=str(tmp_path))
    assert time.monotonic() - began < 45
    assert (found["done"], found["failed"]) == (True, {})
    if script == "a.sh":
        assert (found["rows"], found["starts"]) == ([], [])
        parts = ["blocks of 16", "blocks of 8", "kernels", "prove, draft graph", "prove, one token"]
        assert found["left_out"] == parts
    elif script == "d.sh":
        assert found["left_out"] == list(rests.BACKENDS)
    else:
        assert found["calls"] == []
        assert "start" in found["left_out"]
    assert [line for line in printed.splitlines() if line.startswith("left out: ")] != []
    assert all(f"left out: {name} (" in printed for name in found["left_out"])


def test_c_needs_a_target(tmp_path: Path) -> None:
    with pytest.raises(SystemExit, match="TARGET is not set"):
        speeds.pair_of({}, small=False)
    assert speeds.pair_of({}, small=True) == tiny.DENSE
    assert speeds.pair_of({"TARGET": str(tmp_path)}, small=False).draft.parts[-2:] == ("smollm2", "draft")


# -- the log -------------------------------------------------------------------------------------------------------


def line(requests: int, tokens: int, speed: float, *, length: str = "", waiting: int = 0) -> str:
    accepted = f"accept len: {length}, accept rate: 0.30, cap len: 16.00, " if length else ""
    return (
        f"[2026-11-28 12:06:34] Decode batch, #running-req: {requests}, #full token: {tokens}, full token usage: 0.01, "
        f"mamba num: 1, mamba usage: 0.50, {accepted}cuda graph: True, gen throughput (token/s): {speed:.2f}, "
        f"#queue-req: {waiting}"
    )


def test_intervals_leave_out_the_prefill_other_loads_and_the_end() -> None:
    log = "\n".join(
        [
            line(4, 900, 10.0, length="5.00"),  # some requests still wait for their prefill
            line(8, 2000, 20.0, length="5.00"),  # the interval with the prefill
            line(8, 2400, 2000.0, length="5.00"),
            "[2026-11-28 12:06:34] Prefill batch, #new-seq: 1",
            line(8, 2800, 1000.0, length="5.50"),
            line(8, 2900, 1000.0, length="5.50", waiting=1),
            line(8, 0, 700.0, length="5.50"),  # after the end
        ]
    )
    found = intervals(log, 8)
    assert [one.step_ms for one in found] == [pytest.approx(20.0), pytest.approx(44.0)]
    assert [one.acceptance for one in found] == [5.0, 5.5]
    assert intervals(log, 4) == []


def test_without_speculation_a_step_is_a_token() -> None:
    dense = "[x] Decode batch, #running-req: 2, #token: 40, token usage: 0.01, cuda graph: True, "
    dense += "gen throughput (token/s): 100.00, #queue-req: 0"
    assert [one.step_ms for one in intervals("\n".join([dense] * 2), 2)] == [pytest.approx(20.0)]


def test_lines_about_memory_are_kept_without_their_time() -> None:
    log = (
        "[2026-11-28 12:06:34] Load weight end. elapsed=0.4 s, mem usage=6.2 GB.\n"
        "[2026-11-28 12:06:35] Capture target verify CUDA graph begin. backend=full\n"
        "[2026-11-28 12:06:36] Decode batch, #running-req: 2\n"
        "avail mem\n"
    )
    assert about_memory(log) == [
        "Load weight end. elapsed=0.4 s, mem usage=6.2 GB.",
        "Capture target verify CUDA graph begin. backend=full",
    ]


# -- the clock -----------------------------------------------------------------------------------------------------


def test_clock_keeps_a_reserve() -> None:
    now = [100.0]
    clock = Clock(100.0, 60.0, now=lambda: now[0])
    assert clock.left_s() == 60 - RESERVE_S
    assert clock.fits(60 - RESERVE_S)
    assert not clock.fits(60 - RESERVE_S + 1)
    now[0] = 140.0
    assert clock.within(100) == 20 - RESERVE_S
    assert clock.within(5) == 5
    now[0] = 200.0
    assert (clock.within(5), clock.fits(0.0)) == (0, False)


def test_document_runs_what_fits_and_records_the_rest(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    now = [0.0]
    out = Document(tmp_path / "folder" / "out.json", Clock(0.0, 100.0, now=lambda: now[0]), level="C", rows=[])

    def work() -> None:
        now[0] += 50

    def fault() -> None:
        raise ValueError("no such thing")

    assert out.part("first", 60, work)
    assert out.part("broken", 10, fault)
    assert not out.part("second", 60, work)
    found = json.loads(out.path.read_text())
    assert (found["left_out"], found["failed"]) == (["second"], {"broken": "ValueError: no such thing"})
    assert (found["parts_s"], found["passed_s"], found["level"]) == ({"first": 50.0, "broken": 0.0}, 50.0, "C")
    assert "left out: second (40 s left)" in capsys.readouterr().out
    assert [path.name for path in out.path.parent.iterdir()] == ["out.json"]


def test_checks_are_chosen_by_the_time_left() -> None:
    estimates_s = {"a": 20.0, "b": 100.0, "c": 30.0}
    assert checks.chosen(estimates_s, checks.PROVE_START_S + 150) == ["a", "b", "c"]
    assert checks.chosen(estimates_s, checks.PROVE_START_S + 60) == ["a", "c"]
    assert checks.chosen(estimates_s, 10) == []


def test_a_command_that_hangs_is_ended_with_its_children(tmp_path: Path) -> None:
    begun, marker = tmp_path / "begun", tmp_path / "alive"
    child = (
        f"import os, time\nopen({str(begun)!r}, 'w').write(str(os.getpid()))\n"
        f"os.rename({str(begun)!r}, {str(marker)!r})\ntime.sleep(600)"
    )
    parent = f"import subprocess, sys\nsubprocess.run([sys.executable, '-c', {child!r}])"
    for limit_s in (2, 20, 100):  # a busy machine may not start the child in two seconds
        assert checks.run([sys.executable, "-c", parent], limit_s, tmp_path / "log") == "timed out"
        if marker.exists():
            break
    ends = time.monotonic() + 60
    while is_alive(int(marker.read_text())):
        assert time.monotonic() < ends
        time.sleep(0.05)
    assert checks.run([sys.executable, "-c", "print(7); raise SystemExit(3)"], 20, tmp_path / "log") == "status 3"
    assert checks.tail(tmp_path / "log") == "7"


def test_a_second_sigterm_does_not_interrupt_the_end() -> None:
    code = (
        "import os, signal\nfrom env.gpu.servers27 import end_on_first_sigterm\nend_on_first_sigterm()\n"
        "try:\n    os.kill(os.getpid(), signal.SIGTERM)\n"
        "finally:\n    os.kill(os.getpid(), signal.SIGTERM)\n    print('stopped')"
    )
    ended = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=False)
    assert (ended.returncode, ended.stdout) == (143, "stopped\n")


# -- the plan ------------------------------------------------------------------------------------------------------


def test_arms_take_turns_in_a_rotating_order() -> None:
    planned = steps.turns([OFF, STOCK, OURS], ((256, 1), (256, 8)), 2)
    assert [turn.arm for turn in planned] == [
        *(OFF, STOCK, OURS), *(STOCK, OURS, OFF), *(STOCK, OURS, OFF), *(OURS, OFF, STOCK)
    ]  # fmt: skip
    assert [(turn.round, turn.requests) for turn in planned[::3]] == [(0, 1), (0, 8), (1, 1), (1, 8)]


def test_only_dflash_with_whole_blocks_simulates_acceptance() -> None:
    assert not [name for name in environment(OFF, 16, GPU) if name.startswith(("SGLANG_SIMULATE", "SGLANG_DFLASH"))]
    assert environment(STOCK, 16, GPU)["SGLANG_SIMULATE_ACC_LEN"] == "5.47"
    assert environment(OURS, 8, GPU)["SGLANG_SIMULATE_ACC_LEN"] == "4.54"
    assert (environment(STOCK, 8, GPU)["SGLANG_DFLASH_WORKER"], environment(OURS, 8, GPU)["SGLANG_DFLASH_COPY"]) == (
        *("stock", "off"),
    )
    assert environment(WIDTH_1, 8, GPU)["SGLANG_DFLASH_WIDTHS"] == "1"
    assert "SGLANG_SIMULATE_ACC_LEN" not in environment(WIDTH_1, 8, GPU)
    assert environment(OURS, 8, DRY)["SGLANG_DFLASH_REHEARSE"] == "sm90"
    pair = tiny.HYBRID
    assert not [word for word in command(OFF, 16, pair, GPU) if "speculative" in word]
    words = command(OURS, 8, pair, GPU)
    assert words[words.index("--speculative-num-draft-tokens") + 1] == "8"


def test_calls_measure_every_load_and_set_before_they_repeat() -> None:
    planned = speeds.calls(speeds.GPU, {"humaneval": [], "chats": []})
    assert [(call.repeat, call.load.name, call.data) for call in planned[:5]] == [
        (0, "few", "humaneval"), (0, "few", "chats"), (0, "many", "humaneval"), (0, "many", "chats"),
        (1, "few", "humaneval"),
    ]  # fmt: skip


def test_sets_of_a_folder_are_those_with_a_file(tmp_path: Path) -> None:
    (tmp_path / "edits.jsonl").write_text("{}")
    assert speeds.sets(str(tmp_path)) == {"edits": ["--data", str(tmp_path / "edits.jsonl")]}
    assert speeds.sets(None)["chats"] == ["--dataset", "chats"]


def test_differences_beyond_a_tie_are_written_and_do_not_end_bench(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("BEYOND_TIES", str(tmp_path / "beyond"))
    found = [Unequal("ours, edits at 8", Difference(0, 3, expected, 7), [5, 6]) for expected in (8, 9)]
    likeliest = {7: -0.5, 8: -0.6, 9: -3.0}
    assert bench_ties.count_ties(found, "off", lambda context: likeliest, 0.3) == 1
    written = [json.loads(line) for line in (tmp_path / "beyond").read_text().splitlines()]
    assert written == [["ours, edits at 8", "prompt 1, token 4: expected 9, found 7"]]


# -- models, shared layers, the plugin's folder --------------------------------------------------------------------


def test_shapes_are_those_of_the_published_models(tmp_path: Path) -> None:
    target, draft = models.target_config(small=False), models.draft_config(small=False)
    kinds = target["layer_types"]
    assert (len(kinds), kinds.count("full_attention"), kinds[3]) == (64, 16, "full_attention")
    assert (target["hidden_size"], target["vocab_size"], target["model_type"]) == (5120, 248320, "qwen3_5_text")
    n_bytes = sum(2 * torch.Size(shape).numel() for _, shape in models.draft_shapes(draft))
    assert n_bytes == pytest.approx(3.46e9, rel=1e-3)  # the published file's size
    small = models.draft_config(small=True)
    folder = models.write(tmp_path, small=True).draft
    wanted = {name: weight.shape for name, weight in DraftModel.from_pretrained(str(folder)).state_dict().items()}
    assert {name: torch.Size(shape) for name, shape in models.draft_shapes(small)} == wanted


class Layer(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.inner, self.norm = nn.Linear(width, 2 * width), nn.LayerNorm(width)


def test_layers_share_matrices_but_not_vectors(capsys: pytest.CaptureFixture[str]) -> None:
    shared_layers.share(Layer)
    layers = [Layer(8) for _ in range(3)]
    assert len({layer.inner.weight.data_ptr() for layer in layers}) == 1
    assert len({layer.inner.bias.data_ptr() for layer in layers}) == 3
    assert len({layer.norm.weight.data_ptr() for layer in layers}) == 3
    assert capsys.readouterr().out.count(shared_layers.MARK) == 2
    assert sum(1 for _ in nn.ModuleList(layers).parameters()) == 1 + 3 * 3


def test_layers_share_once_their_module_is_loaded(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    source = "from torch import nn\nclass First(nn.Linear):\n    pass\nclass Second(nn.Linear):\n    pass\n"
    (tmp_path / "model_of_this_test.py").write_text(source)
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setattr(shared_layers, "MODULE", "model_of_this_test")
    monkeypatch.setattr(shared_layers, "CLASSES", ("First", "Second"))
    finders = list(sys.meta_path)
    shared_layers.register()
    module = importlib.import_module("model_of_this_test")
    assert sys.meta_path == finders
    for layer_class in (module.First, module.Second):
        one, other = layer_class(4, 4), layer_class(4, 4)
        assert one.weight is other.weight
    assert module.First(4, 4).weight is not module.Second(4, 4).weight


def test_the_plugin_can_be_imported_from_its_folder(tmp_path: Path) -> None:
    plugin_folder.make(tmp_path)
    plugin_folder.make(tmp_path)  # a second run replaces the links
    code = (
        "import importlib.metadata as m, sglang_dflash;"
        "p = m.entry_points(group='sglang.srt.plugins')['sglang_dflash'];"
        "print(m.version('sglang-dflash'), p.value, sglang_dflash.__file__)"
    )
    # -S: without site-packages, in which the plugin is installed
    ended = subprocess.run(
        [sys.executable, "-S", "-c", code],
        env={"PYTHONPATH": str(tmp_path)}, cwd=tmp_path, capture_output=True, text=True, check=True,
    )  # fmt: skip
    version, entry, file = ended.stdout.split()
    assert (version, entry) == (sglang_dflash.__version__, "sglang_dflash.plugin:register")
    assert file.startswith(str(tmp_path))
    assert (tmp_path / "sglang_dflash_kernels" / "accept.py").exists()


@pytest.mark.parametrize("layout", kernel_times.LAYOUTS)
def test_windows_of_every_layout_hold_the_same(layout: str) -> None:
    like = torch.zeros(1)
    view = kernel_times.windows(layout, 2, 4, 3, like)
    inputs = torch.arange(2 * 6 * 3.0).view(2, 6, 3)  # rows, tokens, channels; the first two tokens are older
    for token in range(4):
        view[:, token] = inputs[:, token : token + 3].transpose(1, 2)
    assert all(torch.equal(view[:, t], inputs[:, t : t + 3].transpose(1, 2)) for t in range(4))


@pytest.mark.parametrize("script", ["common.sh", "a.sh", "b.sh", "c.sh", "d.sh"])
def test_scripts_parse(script: str) -> None:
    subprocess.run(["bash", "-n", str(ROOT / "env" / "gpu" / script)], check=True)
