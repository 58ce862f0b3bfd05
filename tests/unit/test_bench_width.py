"""The width benchmark: its arithmetic by hand, and the whole program against stand-in servers."""

import json
import sys
from pathlib import Path

import pytest

from launch import bench_width, tiny, width_report, width_workloads
from launch.bench_serve import GateError
from launch.bench_width import ARMS
from launch.tiny import Arm
from launch.width_report import Step, claims, followed_after, means, phases, row, summarise, usual_widths
from sglang_dflash.bench import arms
from sglang_dflash.bench.errors import ServerError
from sglang_dflash.bench.measure import Answer, Run, Steps
from sglang_dflash.bench.ports import free_port
from tests.fixtures.processes import running

FAKE = Path(__file__).parent / "launch_fake_server.py"


# ------------------------------------------------------------------------------------------------------ arithmetic


def measured(arm: str, workload: str, concurrency: int, repeat: int, speed: int) -> dict:
    run = Run([Answer(speed, steps=Steps(4, 8))], wall_s=1.0, other_cores=0.1)
    steps = [Step(0.0, 4, {"a": 1}), Step(0.0, 16, {"a": 9}), Step(0.0, 4, {"a": 0})]
    if arm != "auto":
        steps = [] if arm == "off" else [Step(0.0, int(arm), {"a": 0})]
    return row(arm, workload, concurrency, repeat, run, steps)


# Tokens per second in two repeats: 4 has the highest median, though 8 once was the fastest.
SPEEDS = {"off": (100, 50), "1": (90, 60), "4": (200, 100), "8": (210, 80), "16": (120, 70), "auto": (198, 101)}


def rows_of(workload: str, concurrency: int, factor: int = 1) -> list[dict]:
    return [
        measured(arm, workload, concurrency, repeat, speed * factor)
        for repeat in (0, 1)
        for arm, speeds in SPEEDS.items()
        for speed in (speeds[repeat],)
    ]


def test_the_summary_compares_with_the_best_static_width_and_with_off() -> None:
    (line,) = summarise(rows_of("easy", 1))
    assert (line["best_static"], line["tokens_per_s"]["4"]) == ("4", {"median": 150, "low": 100, "high": 200})
    assert line["auto_over_best"] == {"median": 1.0, "low": 0.99, "high": 1.01}
    assert line["auto_over_off"] == {"median": 2.0, "low": 1.98, "high": 2.02}
    assert line["widths"] == {4: 0.667, 16: 0.333}
    assert line["committed_per_step"]["16"] == 3


def test_means_weigh_every_concurrency_of_easy_texts_alike() -> None:
    summary = summarise(rows_of("easy", 1) + rows_of("easy", 8, factor=3) + rows_of("hard", 1, factor=100))
    assert means(summary) == {"off": 150, "1": 150, "4": 300, "8": 290, "16": 190, "auto": 299}


def test_every_claim_is_checked() -> None:
    found = claims(summarise(rows_of("easy", 1) + rows_of("hard", 8) + rows_of("hopeless", 1)))
    assert [(claim["claim"], claim["value"], claim["holds"]) for claim in found] == [
        ("easy at 1: chosen over the best static width", 1.0, True),
        ("hard at 8: chosen over off", 2.0, True),
        ("hopeless at 1: chosen over off", 2.0, True),
        ("easy, mean over concurrencies: chosen over always 1", 1.9933, True),
        ("easy, mean over concurrencies: chosen over always 4", 0.9967, False),
        ("easy, mean over concurrencies: chosen over always 8", 1.031, True),
        ("easy, mean over concurrencies: chosen over always 16", 1.5737, True),
    ]


def test_usual_widths_are_those_of_the_second_half() -> None:
    assert usual_widths([16] * 20 + [1] * 15 + [2] * 4 + [16]) == [1, 2]
    assert usual_widths([]) == []


@pytest.mark.parametrize(
    ("widths", "after"),
    [
        ([1] * 10, 0),
        ([16] * 7 + [1] * 10, 7),
        ([16, 1, 16, 1, 16] + [1] * 8, 3),  # one of ten may be wrong, but not the first
        ([1] * 9, None),
        ([16, 1] * 10, None),
    ],
)
def test_having_followed_is_nine_of_ten_steps(widths: list[int], after: int | None) -> None:
    assert followed_after(widths, [1]) == after


def test_phases_are_told_apart_by_the_requests_names() -> None:
    def steps(n: int, width: int, *rids: str) -> list[Step]:
        return [Step(0.0, width, dict.fromkeys(rids, 0))] * n

    trace = [
        *steps(20, 16, "0-1", "0-2"),
        *steps(3, 16, "0-2", "1-0"),
        *(*steps(5, 16, "1-0", "1-1"), *steps(30, 1, "1-1")),
        *steps(12, 16, "2-0"),
    ]
    assert phases(trace) == [
        {"phase": "easy", "first_step": 0, "n_steps": 20, "usual_widths": [16], "followed_after": 0},
        {"phase": "hopeless", "first_step": 23, "n_steps": 35, "usual_widths": [1], "followed_after": 5},
        {"phase": "easy again", "first_step": 58, "n_steps": 12, "usual_widths": [16], "followed_after": 0},
    ]


# ----------------------------------------------------------------------------------------------- the whole program


@pytest.fixture
def main(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> object:
    """`main(*flags, offset=...)`: the program on stand-in servers, of which those of ours answer `offset` higher."""
    offsets = dict.fromkeys(Arm, 0)

    def command(arm: Arm, *_: object) -> list[str]:
        announce = ["--announce"] if arm is Arm.PLUGIN else []
        return [sys.executable, str(FAKE), "--offset", str(offsets[arm]), *announce]

    def run(*flags: str, offset: int = 0) -> None:
        offsets[Arm.PLUGIN] = offset
        port, output = str(free_port(31950)), str(tmp_path / "out.json")
        bench_width.main(["--num-prompts", "3", "--repeats", "2", "--port", port, "--output", output, *flags])

    monkeypatch.setattr(tiny, "command", command)
    monkeypatch.setattr(tiny, "RUN_DIR", tmp_path / "logs")
    monkeypatch.setattr(bench_width, "GIB_PER_SERVER", 0)  # stand-ins are small, and real servers may run beside them
    monkeypatch.setattr(width_workloads, "tokenize", lambda texts, *_, **__: [[i + 10] for i in range(len(texts))])
    return run


def test_equal_answers_are_measured_written_and_plotted(
    main, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    main("--concurrency", "1", "2")
    out = capsys.readouterr().out
    assert out.splitlines()[-1] == str(tmp_path / "out.json")
    assert "| easy | 2 | " in out
    assert (tmp_path / "out.png").read_bytes().startswith(b"\x89PNG")
    document = json.loads((tmp_path / "out.json").read_text())
    assert len(document["rows"]) == 2 * (2 + 2 + 2) * len(ARMS)  # repeats, concurrencies of each workload, arms
    order = [r["arm"] for r in document["rows"] if (r["workload"], r["concurrency"]) == ("easy", 1)]
    assert order == ["off", "1", "4", "8", "16", "auto", "4", "8", "16", "auto", "off", "1"]
    # Two steps for each of three prompts, those of the unmeasured run before left out, and nobody else's.
    assert {json.dumps(r["widths"]) for r in document["rows"] if r["arm"] != "off"} == {'{"4": 6}'}
    assert {json.dumps(r["widths"]) for r in document["rows"] if r["arm"] == "off"} == {"{}"}
    assert document["changing"]["widths"] == [4] * 3 * 3 * 2  # phases, prompts, steps
    assert sum(document["changing"]["hopeless_requests"]) == 3 * 2
    assert {server["env"].get("SGLANG_DFLASH_WIDTHS") for server in document["servers"].values()} == {
        *(None, "1", "4", "8", "16", "auto")
    }
    assert str(tmp_path) not in json.dumps(document)
    assert str(tiny.ROOT) not in json.dumps(document["servers"])


def test_no_speed_is_shown_when_an_answer_differs(main, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(GateError, match="1, easy at 1: 3 of 3 answers are not those without speculation"):
        main("--concurrency", "1", offset=1)
    assert "chosen / off" not in capsys.readouterr().out
    assert not (tmp_path / "out.json").exists()


def test_servers_are_gone_afterwards(main) -> None:
    with pytest.raises(GateError):
        main("--quick", offset=1)
    assert running(FAKE) == []


def test_an_arm_that_is_not_what_it_says_is_refused(main, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(arms, "ANNOUNCEMENT", "never logged")
    with pytest.raises(ServerError, match="width auto: our worker does not serve here"):
        main()


def test_too_little_memory_is_told_before_anything_starts(main, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(bench_width, "GIB_PER_SERVER", 1e6)
    with pytest.raises(ServerError, match=r"6 servers need about 6000000 GiB of host memory and .* are free; end what"):
        main()


def test_quick_means_less_of_everything_not_given() -> None:
    quick = bench_width.parse(["--quick", "--repeats", "2"])
    assert (quick.concurrency, quick.repeats, quick.num_prompts) == ([1, 8], 2, 16)
    assert bench_width.parse([]).concurrency == [1, 2, 4, 8, 16]


def test_more_at_once_than_servers_run_is_one_line(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit, match="2"):
        bench_width.parse(["--concurrency", "32"])
    assert "the servers run 16 requests at once" in capsys.readouterr().err.splitlines()[-1]


def test_a_table_names_what_was_not_reached() -> None:
    lines = list(width_report._claims({"claims": [{"claim": "x", "value": 0.9, "bound": 0.97, "holds": False}]}))
    assert lines[-1] == "| x | 0.900 | 0.97 | **no** |"
