"""The `sglang-dflash` command: all programs, their help, and errors for unknown names."""

import json
from pkgutil import resolve_name

import pytest

from sglang_dflash.__main__ import PROGRAMS, main

NEEDS_MLX = "mlx"


def test_every_program_is_named_in_the_help(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--help"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert [line.split()[1] for line in lines if line.startswith("    sglang-dflash ")] == list(PROGRAMS)


@pytest.mark.parametrize("name", [name for name in PROGRAMS if name != NEEDS_MLX])
def test_every_program_can_be_imported(name: str) -> None:
    assert callable(resolve_name(PROGRAMS[name]))


def test_an_unknown_program_is_refused(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["benhc"]) == 2
    assert "no program 'benhc'; there are demo, recipe, check" in capsys.readouterr().err


def test_arguments_after_the_name_go_to_the_program(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["recipe", "qwen3-8b", "--gpu", "h200"]) == 0
    assert "--model-path Qwen/Qwen3-8B" in capsys.readouterr().out


def test_the_dashboard_is_a_document(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["dashboard"]) == 0
    assert json.loads(capsys.readouterr().out)["panels"]
    assert main(["dashboard", "dflash.json"]) == 2


def test_the_documentation_is_listed_and_read(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["docs"]) == 0
    pages = dict(line.split(maxsplit=1) for line in capsys.readouterr().out.splitlines())
    assert {"tuning", "troubleshooting", "recipes"} <= set(pages)
    assert main(["docs", "tuning"]) == 0
    assert capsys.readouterr().out.startswith("# Tuning")
    assert main(["docs", "tunnig"]) == 2
    assert "there is no page tunnig" in capsys.readouterr().err
