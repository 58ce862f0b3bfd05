"""Script `env/gpu/b.sh`: a dry run from a packed folder, killed twice and resumed, and its parts."""

import io
import json
import os
import signal
import subprocess
import sys
import tarfile
import time
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from env.gpu import pack, pair
from sglang_dflash.pairs.smollm2.smollm2 import NAME
from sglang_dflash.reference.torch import DraftModel
from sglang_dflash.train.writer import Continuation

ROOT = Path(__file__).parents[2]
LIMIT_S = 300.0


def begin(carried: Path, out: Path) -> subprocess.Popen:
    """Start the script dry, in a process group of its own."""
    folders = " ".join(map(str, sorted(carried.iterdir())))
    env = {"GPU_DRY": "1", "CARRIED": folders, "OUT": str(out), "WORK": str(out / "work"), "PYTHON": sys.executable}
    inherited = {name: value for name, value in os.environ.items() if name not in ("MINUTES", "GPU_BEGAN", "UP")}
    return subprocess.Popen(["bash", str(ROOT / "env" / "gpu" / "b.sh")], env=inherited | env, start_new_session=True)


def kill_when(is_time: Callable[[], bool], carried: Path, out: Path) -> None:
    """Start the script, and kill it with its children when `is_time` returns True."""
    running, deadline = begin(carried, out), time.monotonic() + LIMIT_S
    while not is_time():
        assert running.poll() is None, "the script ended before it was killed"
        assert time.monotonic() < deadline
        time.sleep(0.02)
    os.killpg(running.pid, signal.SIGKILL)
    running.wait()


@pytest.fixture(scope="module")
def carried(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("packed") / "carried"
    pack.main([str(folder), "--few"])
    return folder


@pytest.mark.full
def test_b_resumes_after_it_was_killed(carried: Path, tmp_path: Path) -> None:
    work = tmp_path / "work"
    answers, training, draft = work / "answers.jsonl", work / "training8" / "checkpoint.pt", work / "draft8"
    kill_when(lambda: answers.exists() and answers.stat().st_size > 0, carried, tmp_path)
    with answers.open("a") as file:
        file.write('{"prompt": 3, "id')  # a line that the kill has cut
    before = [line for line in answers.read_text().splitlines() if line.endswith("}")]
    kill_when(training.exists, carried, tmp_path)
    n_steps = torch.load(training)["step"]
    kill_when(draft.exists, carried, tmp_path)
    trained_ns = training.stat().st_mtime_ns
    assert torch.load(training)["step"] > n_steps, "a training that was killed goes on"
    assert begin(carried, tmp_path).wait(LIMIT_S) == 0

    found = json.loads((tmp_path / "b.json").read_text())
    assert (found["done"], found["left_out"], found["failed"]) == (True, [], {})
    after = answers.read_text().splitlines()
    assert after[: len(before)] == before
    prompts = [json.loads(line)["prompt"] for line in after]
    assert sorted(prompts) == list(range(found["documents"]["prompts"])), "each prompt has one answer"
    assert training.stat().st_mtime_ns == trained_ns, "a finished draft is not trained again"
    for block_size in (8, 16):
        name = f"draft{block_size}"
        assert set(found["acceptance"][name]) == set(pack.SETS)
        assert read(tmp_path, name) == read(work / name)
        config = DraftModel.from_pretrained(work / name).config
        assert (config.block_size, config.num_hidden_layers) == (block_size, pair.DRY.layers)
    assert found["draft16"]["log"][-1]["step"] > 0
    assert set(found["acceptance"]["shipped"]) == set(pack.SETS)


def read(folder: Path, name: str = "") -> dict[str, bytes]:
    """Return the files of a draft's folder, or with a name those of its archive in pieces."""
    if not name:
        return {path.name: path.read_bytes() for path in folder.iterdir()}
    pieces = sorted(folder.glob(f"{name}.tar.*"), key=lambda path: int(path.suffix[1:]))
    assert len(pieces) > 1
    assert all(path.stat().st_size <= pair.PIECE for path in pieces)
    with tarfile.open(fileobj=io.BytesIO(b"".join(path.read_bytes() for path in pieces))) as tar:
        return {Path(one.name).name: tar.extractfile(one).read() for one in tar.getmembers() if one.isfile()}


@pytest.mark.full
def test_the_target_is_that_of_the_package(carried: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CARRIED", " ".join(map(str, sorted(carried.iterdir(), reverse=True))))
    monkeypatch.setattr(pair.smollm2, "checkpoint", lambda folder: pytest.fail("the pieces were not found"))
    assert pair.write_target(tmp_path) == tmp_path / NAME
    assert sorted(path.name for path in tmp_path.iterdir()) == [NAME]


def test_carried_folders_without_weights_are_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CARRIED", str(tmp_path))
    with pytest.raises(ValueError, match=r"has no gguf\.xz\.\*; give folders that pack\.py wrote"):
        pair.write_target(tmp_path / "work")


def test_the_script_needs_no_server_packages() -> None:
    """A machine may have torch and Transformers, but neither SGLang nor what it requires."""
    code = "import sys; sys.modules.update(dict.fromkeys(('openai', 'pydantic', 'sglang'))); import env.gpu.pair"
    subprocess.run([sys.executable, "-c", code], cwd=ROOT, check=True)


def test_chunks_of_prompts_are_answered_one_after_another(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pair, "CHUNK", 4)
    asked = list[list[list[int]]]()

    class Source:
        stop_ids = frozenset({9})

        def generate(self, prompts: list[list[int]], heats: list[float], *_: Any, seed: int) -> Any:
            asked.append(prompts)
            assert heats == [0.7 * (len(ids) % 2) for ids in prompts]
            return [Continuation(i, ids[:1], stopped=i == 0) for i, ids in enumerate(prompts)]

    work: Any = pair.Pair.__new__(pair.Pair)
    work.sizes, work.source, work.tokenizer = pair.DRY, Source(), SimpleNamespace(eos_token_id=9)
    ids = [[5] * n for n in range(10)]
    found = dict(work.answered(ids, [7, 2, 8, 1, 6, 3], seed=0))
    assert [len(chunk) for chunk in asked] == [4, 2]
    assert list(found) == [7, 2, 8, 1, 6, 3]
    assert found[7] == [5, 9], "an answer that stopped ends with its stop token"
    assert found[2] == [5]


def test_prompts_of_the_evaluated_chats_are_left_out(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CARRIED", "")
    held_out = json.loads(pair.CHATS_FILE.read_text().splitlines()[0])["prompt"]
    turns = [held_out, "Why is the sky blue?"]
    lines = [json.dumps({"messages": [{"role": "user", "content": turn}]}) for turn in turns]
    (tmp_path / "turns.jsonl").write_text("".join(f"{line}\n" for line in lines))
    work: Any = pair.Pair.__new__(pair.Pair)
    work.sizes, work.work = pair.DRY, tmp_path
    assert [line["messages"][0]["content"] for line in work.prompts()] == turns[1:]
