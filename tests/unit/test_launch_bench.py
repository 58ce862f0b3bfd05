"""The serving benchmark: its summary by hand, and the whole program against stand-in servers."""

import json
import sys
from functools import partial
from pathlib import Path
from types import SimpleNamespace

import pytest
from rich.console import Console

from launch import bench_serve, tiny
from launch.bench_serve import GateError
from launch.report import row, summarise
from launch.tiny import ARMS, Arm
from sglang_dflash.bench import arms, served
from sglang_dflash.bench.errors import ServerError
from sglang_dflash.bench.measure import Answer, Run, Steps
from sglang_dflash.bench.ports import free_port
from sglang_dflash.bench.rows import noise, portable
from tests.fixtures.processes import running

FAKE = Path(__file__).parent / "launch_fake_server.py"


def test_the_summary_compares_with_off_and_stock_per_concurrency() -> None:
    def run(arm: Arm, concurrency: int, repeat: int, speed: int) -> dict:
        one = Run([Answer(speed, steps=Steps(4, 8), ttft_s=0.01, tpot_s=0.002)], wall_s=1.0, other_cores=0.1)
        return row(arm, concurrency, repeat, one, one)

    speeds = {Arm.PLUGIN: (300, 360), Arm.OFF: (100, 90), Arm.STOCK: (150, 120), Arm.SNAPSHOT: (250, 240)}
    rows = [run(arm, c, repeat, speeds[arm][repeat] * c) for c in (8, 1) for repeat in (0, 1) for arm in speeds]
    lines = summarise(rows)
    assert [(line["concurrency"], line["arm"]) for line in lines] == [(c, arm) for c in (1, 8) for arm in Arm]
    ours = lines[2]
    assert ours["tokens_per_s"] == {"median": 330, "low": 300, "high": 360}
    assert ours["over_off"] == {"median": 3.5, "low": 3, "high": 4}
    assert ours["over_stock"] == {"median": 2.5, "low": 2, "high": 3}
    assert ours["over_snapshot"] == {"median": 1.35, "low": 1.2, "high": 1.5}
    assert ours["committed_per_step"] == 3
    assert "over_off" not in lines[0]
    assert lines[0]["ttft_ms"]["p50"] == 10


# ----------------------------------------------------------------------------------------------- the whole program


@pytest.fixture
def checkpoint(tmp_path: Path) -> Path:
    (tmp_path / "config.json").write_text("{}")
    return tmp_path


@pytest.fixture
def main(monkeypatch: pytest.MonkeyPatch, checkpoint: Path) -> object:
    """`main(*flags, offset=...)`: the program on stand-in servers, of which `stock` answers `offset` higher."""
    offsets = dict.fromkeys(Arm, 0)

    def command(arm: Arm, *_: object) -> list[str]:
        announce = ["--announce"] if arm is Arm.PLUGIN else []
        return [sys.executable, str(FAKE), "--offset", str(offsets[arm]), *announce]

    def run(*flags: str, offset: int = 0) -> None:
        offsets[Arm.STOCK] = offset
        paths = ["--target", str(checkpoint), "--draft", str(checkpoint), "--output", str(checkpoint / "out.json")]
        bench_serve.main(["--num-prompts", "3", "--repeats", "2", "--port", str(free_port(31950)), *paths, *flags])

    monkeypatch.setattr(tiny, "command", command)
    monkeypatch.setattr(tiny, "RUN_DIR", checkpoint / "logs")
    monkeypatch.setattr(served, "GIB_PER_SERVER", 0)  # stand-ins are small, and real servers may run beside them
    monkeypatch.setattr(bench_serve, "tokenize", lambda questions, *_, **__: [[i + 10] for i in range(len(questions))])
    return run


@pytest.mark.parametrize(
    "flags",
    [
        pytest.param((), id="together"),
        pytest.param(("--one-at-a-time",), id="one at a time", marks=pytest.mark.full),
        pytest.param(("--no-latency",), id="no latency", marks=pytest.mark.full),
    ],
)
def test_equal_answers_are_measured_and_written(
    main, checkpoint: Path, capsys: pytest.CaptureFixture[str], flags: tuple[str, ...]
) -> None:
    main("--concurrency", "1", "2", *flags)
    out = capsys.readouterr().out
    assert out.splitlines()[-1] == str(checkpoint / "out.json")
    document = json.loads((checkpoint / "out.json").read_text())
    assert len(document["rows"]) == 2 * 2 * len(ARMS)  # repeats, concurrencies, arms
    assert {line["committed_per_step"] for line in document["summary"]} == {1.5}
    n_streamed = 0 if "--no-latency" in flags else 3
    assert all(r["n_tokens"] == 9 and len(r["ttft_ms"]) == len(r["tpot_ms"]) == n_streamed for r in document["rows"])
    order = [r["arm"] for r in document["rows"] if r["concurrency"] == 1]
    assert order == ["off", "stock", "plugin", "stock", "plugin", "off"]
    assert str(tiny.ROOT) not in json.dumps(document["servers"])


def test_no_speed_is_shown_when_an_answer_differs(main, checkpoint: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(GateError, match="stock at concurrency 1 answers 3 of 3 prompts differently from off at 1"):
        main(offset=1)
    assert "tok/s" not in capsys.readouterr().out
    assert not (checkpoint / "out.json").exists()


def test_servers_are_gone_afterwards(main) -> None:
    with pytest.raises(GateError):
        main(offset=1)
    assert running(FAKE) == []


def test_an_arm_that_is_not_what_it_says_is_refused(main, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(arms, "ANNOUNCEMENT", "never logged")
    with pytest.raises(ServerError, match="plugin: our worker does not serve here"):
        main()


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (["--target", "/nowhere"], "/nowhere holds no config.json"),
        (["--arms", "stock", "plugin"], "--arms needs `off`"),
        (["--arms", "theirs"], "invalid Arm value: 'theirs'"),
    ],
)
def test_bad_options_are_one_line(
    flags: list[str], message: str, checkpoint: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit, match="2"):
        bench_serve.parse(["--target", str(checkpoint), "--draft", str(checkpoint), *flags])
    assert message in capsys.readouterr().err.splitlines()[-1]


def test_a_bad_file_of_questions_is_one_line(
    tmp_path: Path, checkpoint: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    data = tmp_path / "q.jsonl"
    parse = partial(bench_serve.parse, ["--target", str(checkpoint), "--draft", str(checkpoint), "--data", str(data)])
    data.write_text('{"prompt": "one"}\n{"question": "two"}\n')
    with pytest.raises(SystemExit, match="2"):
        parse()
    assert "q.jsonl:2: no object with a" in capsys.readouterr().err.splitlines()[-1]
    data.write_text('{"prompt": "one"}\n' * 2)
    with pytest.raises(SystemExit, match="2"):
        parse()
    assert "2 prompts, but --num-prompts is 32; lower it" in capsys.readouterr().err.splitlines()[-1]


def test_a_busy_machine_is_told_apart_from_a_quiet_one() -> None:
    document = {"machine": {"cores": 2}, "rows": [{"other_cores": 0.02}, {"other_cores": 0.09}]}
    assert noise(document) == ""
    document["rows"].append({"other_cores": 0.5})
    assert "up to 0.5 of 2 cores busy" in noise(document)


def test_documents_do_not_name_this_machine() -> None:
    command = f"{sys.executable} -m x --target {tiny.HYBRID.target} --draft=/models/mine/draft-1 --port 3"
    assert portable(command) == "python -m x --target sglang_dflash/assets/tiny/target --draft=draft-1 --port 3"


def test_an_interrupted_run_keeps_its_whole_repeats(monkeypatch: pytest.MonkeyPatch) -> None:
    def repeat(bench: object, number: int) -> list[dict[str, int]]:
        if number == whole:
            raise KeyboardInterrupt
        return [{"repeat": number}]

    monkeypatch.setattr(bench_serve, "measure_repeat", repeat)
    bench = SimpleNamespace(options=SimpleNamespace(repeats=5))
    whole = 2
    assert bench_serve.measure_all(bench, Console()) == [{"repeat": 0}, {"repeat": 1}]
    whole = 0
    with pytest.raises(KeyboardInterrupt):
        bench_serve.measure_all(bench, Console())
