"""The `sglang-dflash` command: all programs, their help, and errors for unknown names."""

import json
import os
import signal
import subprocess
import sys
from contextlib import suppress
from pkgutil import resolve_name

import pytest

from sglang_dflash.__main__ import PROGRAMS, main
from sglang_dflash.cli import Parser, nearest
from sglang_dflash.tools.pages import DOCS
from sglang_dflash.train.options import make_parser

TEXTS = "torch, transformers, rich, numpy"  # slow to import, and not needed to print help or pages


def test_every_program_is_named_in_the_help(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--help"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert [line.split()[1] for line in lines if line.startswith("    sglang-dflash ")] == list(PROGRAMS)


@pytest.mark.parametrize("name", PROGRAMS)
def test_every_program_is_there(name: str) -> None:
    assert callable(resolve_name(PROGRAMS[name]))


@pytest.mark.parametrize("name", PROGRAMS)
def test_every_program_has_help_and_version(name: str, capsys: pytest.CaptureFixture[str]) -> None:
    with suppress(SystemExit):
        main([name, "--help"])
    assert capsys.readouterr().out.startswith(f"usage: sglang-dflash {name}")
    assert main([name, "--version"]) == 0
    assert capsys.readouterr().out.count(".") == 2


@pytest.mark.parametrize("words", [["--help"], ["recipe"], ["docs"], ["dashboard"], ["train", "--help"]], ids=" ".join)
def test_texts_are_printed_without_heavy_imports(words: list[str]) -> None:
    program = f"import sys; from sglang_dflash.__main__ import main; main({words})"
    watch = f"import atexit, sys; atexit.register(lambda: print({{*'{TEXTS}'.split(', ')}} & {{*sys.modules}}))"
    ended = subprocess.run([sys.executable, "-c", f"{watch}; {program}"], capture_output=True, text=True, check=True)
    assert ended.stdout.splitlines()[-1] == "set()"


@pytest.mark.parametrize(
    ("name", "cure"), [("benhc", "did you mean bench?"), ("zzz", "use one of demo, recipe, check")]
)
def test_an_unknown_program_is_refused(name: str, cure: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main([name]) == 2
    assert f"there is no command '{name}'; {cure}" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("words", "cure"),
    [
        (["bench", "--concurency", "1"], "; did you mean --concurrency?"),
        (
            ["train", "draft", "--target", "t", "--data", "d", "--out", "o", "--lern-rate=1"],
            "did you mean --learning-rate?",
        ),
        (["train", "darft"], "; did you mean draft?"),
        (
            ["train", "tiny", "--steps", "9"],
            "; --steps is an option of another command, or stands before its command; see --help",
        ),
        (["models", "smol"], "; did you mean smollm2?"),
        (["dashboard", "--zzz"], "unrecognized arguments: --zzz"),
    ],
)
def test_a_misspelt_word_gets_the_nearest_one(words: list[str], cure: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit, match="2"):
        main(words)
    assert capsys.readouterr().err.endswith(f"{cure}\n")


def test_an_interrupted_command_ends_without_a_traceback(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def interrupted(arguments: list[str]) -> int:
        raise KeyboardInterrupt

    monkeypatch.setattr("sglang_dflash.__main__.resolve_name", lambda name: interrupted)
    assert main(["train"]) == 130
    assert capsys.readouterr().err == "train: stopped; repeat the command to resume\n"


def test_dashes_do_not_make_flags_similar() -> None:
    assert nearest("--dtype", ["--tp", "--json"]) == ""
    assert nearest("--Dtpye", ["--dtype", "--json"]) == "; did you mean --dtype?"


@pytest.mark.parametrize("unbuffered", ["", "1"])
@pytest.mark.parametrize("words", ["docs tuning", "recipe", "recipe --help"])
def test_a_closed_pipe_ends_without_a_traceback(words: str, unbuffered: str) -> None:
    reader, writer = os.pipe()
    os.close(reader)
    command = [sys.executable, "-m", "sglang_dflash", *words.split()]
    env = os.environ | {"PYTHONUNBUFFERED": unbuffered}
    ended = subprocess.run(command, stdout=writer, stderr=subprocess.PIPE, text=True, env=env, check=False)
    os.close(writer)
    assert ended.stderr == ""
    assert ended.returncode == -signal.SIGPIPE


def test_every_option_of_the_trainer_has_a_text_and_at_most_one_default() -> None:
    (commands,) = (action for action in make_parser()._actions if action.dest == "command")
    for parser in commands.choices.values():
        assert not [action.option_strings for action in parser._actions if not action.help]
        assert "(default: None)" not in parser.format_help()


def test_switches_show_no_default(capsys: pytest.CaptureFixture[str]) -> None:
    parser = Parser(prog="x")
    parser.add_argument("--switch", action="store_true", help="a switch")
    parser.add_argument("--number", type=int, default=0, help="a number")
    parser.add_argument("--named", default="y", help="a text (default: why)")
    text = parser.format_help()
    assert "a switch\n" in text
    assert "a number (default: 0)\n" in text
    assert "a text (default: why)\n" in text


@pytest.mark.skipif("mlx" in sys.modules, reason="MLX is here")
def test_without_mlx_a_line_names_the_package(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["mlx", "--model", "a", "--draft", "b", "--prompt", "c"]) == 1
    (line,) = capsys.readouterr().err.splitlines()
    package = "mlx" if sys.platform == "darwin" else '"mlx[cpu]"'
    assert line.endswith(f"found no module named mlx; pip install {package} mlx-lm")


def test_the_words_after_the_name_are_the_program_s(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["recipe", "qwen3-8b", "--gpu", "h200"]) == 0
    assert "--model-path Qwen/Qwen3-8B" in capsys.readouterr().out


def test_the_dashboard_is_a_document(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["dashboard"]) == 0
    assert json.loads(capsys.readouterr().out)["panels"]
    with pytest.raises(SystemExit, match="2"):
        main(["dashboard", "dflash.json"])


def test_the_documentation_is_listed_and_read(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["docs"]) == 0
    pages = dict(line.split(maxsplit=1) for line in capsys.readouterr().out.splitlines())
    assert {"tuning", "troubleshooting", "recipes"} <= set(pages)
    assert main(["docs", "tuning"]) == 0
    assert capsys.readouterr().out.startswith("# Tuning")
    assert main(["docs", "Tuning.md"]) == 0
    assert capsys.readouterr().out == DOCS["tuning"].read_text()
    assert main(["docs", "tuning", "tunnig", "zzz"]) == 2
    first, second = capsys.readouterr().err.splitlines()
    assert first == "docs: there is no page tunnig; did you mean tuning?"
    assert second.startswith("docs: there is no page zzz; use one of README, ")
