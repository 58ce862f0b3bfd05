"""Digest of a draft's directory, and commit of a draft's repository."""

import shutil
from pathlib import Path

import pytest

from sglang_dflash.engine.draft import files

SIZE = 3 * files.N_SAMPLES * files.SAMPLE  # bytes; a third of the file is sampled


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """Return a folder with a config, a weight file that is sampled, and a small one that is read whole."""
    folder = tmp_path / "draft"
    folder.mkdir()
    (folder / "config.json").write_text("{}")
    (folder / "large.safetensors").write_bytes(bytes(SIZE))
    (folder / "small.safetensors").write_bytes(bytes(10 * files.SAMPLE))
    return folder


def test_copies_of_a_draft_are_equal(folder, tmp_path):
    copy = shutil.copytree(folder, tmp_path / "copy")
    name, digest = files.identity(str(folder), None)
    assert name == "the digest of the draft's files"
    assert files.identity(str(copy), None) == (name, digest)


@pytest.mark.parametrize(
    ("file", "at"),
    [("config.json", 0), ("large.safetensors", 0), ("small.safetensors", 10 * files.SAMPLE - 1)]
    + [("large.safetensors", i * (SIZE // files.N_SAMPLES) + files.SAMPLE - 1) for i in (1, 100, files.N_SAMPLES - 1)],
)
def test_another_byte_is_found(folder, file, at):
    before = files.identity(str(folder), None)
    content = bytearray((folder / file).read_bytes())
    content[at] ^= 1
    (folder / file).write_bytes(content)
    assert files.identity(str(folder), None) != before


def test_another_size_is_found(folder):
    """The longer file has as many samples, and all of them are zeros too."""
    before = files.identity(str(folder), None)
    with (folder / "large.safetensors").open("ab") as weights:
        weights.write(bytes(files.N_SAMPLES))
    assert files.identity(str(folder), None) != before


def test_a_repository_is_identified_by_its_commit(checkpoints, tmp_path, monkeypatch):
    snapshot = checkpoints.write_cached(tmp_path, "o/d")
    monkeypatch.setattr(files, "hf_hub_download", lambda *_, revision: str(snapshot / "config.json"))
    assert files.identity("o/d", None) == ("the draft's commit", "0" * 40)
