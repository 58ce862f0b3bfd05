"""Names of SGLang (host/sglang-VERSION.txt): every import of SGLang is listed, and SGLang has every listed name."""

import ast
from collections.abc import Iterator
from pathlib import Path

import pytest

from sglang_dflash.engine.host import contract
from sglang_dflash.engine.host.names import SECTIONS, SGLANG, Name
from sglang_dflash.engine.host.source import problem
from sglang_dflash.tools.bench.client import HTTP_NAMES

PACKAGE, SPEC = Path(contract.__file__).parents[2], "sglang.srt.speculative"
# `rehearsal/flashinfer_seams.py` checks FlashInfer's names when an emulation starts.
TABLES = [name for section, names in SECTIONS.items() if section != "flashinfer" for name in names]


@pytest.mark.parametrize("name", [*TABLES, *HTTP_NAMES], ids=lambda name: name.qualname)
def test_installed_sglang_has_the_name(name: Name) -> None:
    assert problem(name) == ""


@pytest.mark.parametrize(
    ("name", "sentence"),
    [
        (
            Name(f"{SPEC}.base_spec_worker", "BaseSpecWorker.alloc_memory_pool", "req_to_token_pool pages"),
            "BaseSpecWorker.alloc_memory_pool has no pages",
        ),
        (
            Name(f"{SPEC}.spec_info", "SpeculativeAlgorithm.make_worker", "server_args"),
            f"{SPEC}.spec_info has no SpeculativeAlgorithm.make_worker",
        ),
        (Name("sglang.srt.configs.model_config", "ModelConfig", "hf_configs"), "ModelConfig has no hf_configs"),
        (Name("sglang.srt.utils", "async_h2h"), "sglang.srt.utils has no async_h2h"),
        (Name("sglang.srt.utils", "H2H.copy"), "sglang.srt.utils has no H2H.copy"),
        (Name("sglang.srt.util", "async_h2d"), "there is no module sglang.srt.util"),
    ],
    ids=["parameter", "method", "attribute", "function", "class", "module"],
)
def test_missing_name_is_reported(name: Name, sentence: str) -> None:
    assert problem(name) == sentence


def imports() -> Iterator[tuple[str, str, str]]:
    """Yield (file, module, name) of every import of SGLang in the package; `import module` has the name ""."""
    for file in sorted(PACKAGE.rglob("*.py")):
        for node in ast.walk(ast.parse(file.read_text())):
            match node:
                case ast.ImportFrom(module=str(module)) if module.split(".")[0] == "sglang":
                    yield from ((str(file.relative_to(PACKAGE)), module, alias.name) for alias in node.names)
                case ast.Import():
                    for alias in node.names:
                        if alias.name.split(".")[0] == "sglang":
                            yield str(file.relative_to(PACKAGE)), alias.name, ""


def test_every_import_is_listed() -> None:
    listed = {(name.module, name.qualname.split(".")[0]) for name in TABLES}
    unlisted = [line for line in imports() if line[1:] not in listed]
    assert not unlisted, f"add a line for each to host/sglang-{SGLANG}.txt"


def test_nothing_is_listed_twice() -> None:
    lines = [(name.module, name.qualname) for name in TABLES]
    assert sorted(set(lines)) == sorted(lines)


def test_pyproject_pins_the_version_of_the_contract() -> None:
    pyproject = (PACKAGE.parent / "pyproject.toml").read_text()
    assert f'"sglang=={SGLANG};' in pyproject
