"""Choice of the pair to serve, and its questions."""

import os
import socket
from io import StringIO
from pathlib import Path

import pytest
from rich.console import Console

from sglang_dflash.errors import NoModelError
from sglang_dflash.pairs.smollm2 import smollm2
from sglang_dflash.pairs.tiny import pairs as tiny
from sglang_dflash.pairs.tiny.corpus import is_held_out
from sglang_dflash.tools.demo.__main__ import main, parse
from sglang_dflash.tools.demo.pairs import QUESTIONS, chosen, tiny_questions


def test_the_tiny_questions_are_held_out() -> None:
    assert len(tiny_questions()) == 4
    assert all(is_held_out(question) for _, question in tiny_questions())


def test_smollm2_is_served_in_fp32(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(smollm2, "checkpoint", lambda: Path("there"))
    show = chosen(None, None, real=True, console=Console(file=StringIO()))
    assert (show.pair.target, show.questions, show.n_threads) == (Path("there"), QUESTIONS, os.cpu_count())
    assert show.flags[-2:] == ("--dtype", "float32")


def test_the_tiny_pair_takes_over_and_the_reason_is_printed(monkeypatch: pytest.MonkeyPatch) -> None:
    def missing() -> Path:
        raise NoModelError("pip cannot download it")

    monkeypatch.setattr(smollm2, "checkpoint", missing)
    out = StringIO()
    show = chosen(None, None, real=True, console=Console(file=out, width=200))
    assert show.pair == tiny.HYBRID
    assert "pip cannot download it. The tiny pair is served instead." in out.getvalue()


def test_the_page_and_the_server_need_two_ports(capsys: pytest.CaptureFixture) -> None:
    with pytest.raises(SystemExit):
        parse(["--web", "--web-port", "30000"])
    assert "--web-port and --port are both 30000; change one" in capsys.readouterr().err


def test_a_taken_port_of_the_page_is_found_before_a_server_starts(
    capsys: pytest.CaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("sglang_dflash.tools.demo.__main__.make_server", pytest.fail)
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        assert main(["--web", "--web-port", str(port)]) == 1
    assert f"demo: port {port} is taken or not permitted; choose another with --web-port" in capsys.readouterr().err


def test_smollm2_with_another_draft_is_refused(capsys: pytest.CaptureFixture) -> None:
    with pytest.raises(SystemExit):
        parse(["--smollm2", "--draft", "mine"])
    assert "--smollm2 serves its own target and draft" in capsys.readouterr().err


@pytest.mark.parametrize(("name", "file"), [("target", "tokenizer.json"), ("draft", "config.json")])
def test_a_folder_without_a_model_is_refused(
    tmp_path: Path, capsys: pytest.CaptureFixture, name: str, file: str
) -> None:
    with pytest.raises(SystemExit):
        parse([f"--{name}", str(tmp_path)])
    assert f"--{name} {tmp_path} has no {file}; give the folder of a {name}" in capsys.readouterr().err
    (tmp_path / file).touch()
    assert parse([f"--{name}", str(tmp_path)])


def test_a_folder_replaces_the_tiny_pairs() -> None:
    show = chosen(None, Path("mine"), real=False, console=Console(file=StringIO()))
    assert show.pair == tiny.Pair(tiny.HYBRID.target, Path("mine"))
