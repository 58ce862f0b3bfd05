"""Checkpoints written on the fly, and a process that launches commands without importing SGLang each time."""

import importlib.util
import json
import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from types import ModuleType
from typing import Any, NamedTuple

import pytest

FIXTURES = Path(__file__).parent.parent / "fixtures"


def _load(name: str) -> ModuleType:
    spec = importlib.util.spec_from_file_location(name, FIXTURES / f"{name}.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.fixture(scope="session")
def checkpoints() -> ModuleType:
    return _load("checkpoints")


class Ended(NamedTuple):
    """How a launched command ended; `code` is None if it had to be stopped."""

    code: int | None
    out: str
    err: str

    @property
    def last_line(self) -> str:
        return self.err.strip().splitlines()[-1]


Launch = Callable[..., Ended]


@pytest.fixture(scope="session")
def hub(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The only cache of Hugging Face repositories a launched command has; it has no network either."""
    return tmp_path_factory.mktemp("hub")


@pytest.fixture(scope="session")
def launch(hub: Path) -> Iterator[Launch]:
    """`launch(module, *argv, env={...})`: run `python -m module argv` on a machine without a GPU."""
    environment = {k: v for k, v in os.environ.items() if not k.startswith("SGLANG_")}
    environment |= {
        "CUDA_VISIBLE_DEVICES": "",
        "OMP_NUM_THREADS": "1",
        "HF_HUB_CACHE": str(hub),
        "HF_HUB_OFFLINE": "1",
        "PYTHONPATH": str(FIXTURES),
        "PYTHONWARNINGS": "ignore",
    }
    with subprocess.Popen(
        [sys.executable, FIXTURES / "zygote.py"],
        env=environment,
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        text=True,
    ) as process:
        assert process.stdin is not None
        assert process.stdout is not None
        stdin, stdout = process.stdin, process.stdout
        assert json.loads(stdout.readline()) == {"ready": True}

        def run(module: str, *argv: str, env: dict[str, str] | None = None, timeout_s: float = 120) -> Ended:
            command: dict[str, Any] = {"module": module, "argv": argv, "env": env or {}, "timeout_s": timeout_s}
            stdin.write(json.dumps(command) + "\n")
            stdin.flush()
            return Ended(**json.loads(stdout.readline()))

        yield run
        stdin.close()


@pytest.fixture(scope="session")
def pair(checkpoints: ModuleType, tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    """Directories of a hybrid target, a dense one, one in fp16, and a draft that fits the first two."""
    root = tmp_path_factory.mktemp("pair")
    return {
        "hybrid": str(checkpoints.write_config(root / "hybrid", checkpoints.HYBRID)),
        "dense": str(checkpoints.write_config(root / "dense", checkpoints.DENSE)),
        "fp16": str(checkpoints.write_config(root / "fp16", checkpoints.DENSE | {"dtype": "float16"})),
        "draft": str(checkpoints.write_draft(root / "draft")),
    }
