"""`sglang-dflash bench` as a whole program, run on stand-in servers."""

import json
import re
import sys
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import httpx
import pytest
from rich.console import Console

from sglang_dflash.pairs.servers import arms
from sglang_dflash.pairs.servers.errors import ServerError
from sglang_dflash.pairs.servers.ports import free_port
from sglang_dflash.pairs.servers.server import Server
from sglang_dflash.tools.bench import report, served
from sglang_dflash.tools.bench.__main__ import every_repeat
from sglang_dflash.tools.bench.__main__ import run as main
from sglang_dflash.tools.bench.client import HttpEngine, ServerKind, streamed, unstreamed
from sglang_dflash.tools.bench.compare import GateError
from sglang_dflash.tools.bench.rows import Row
from sglang_dflash.tools.bench.schedule import Bench
from tests.fixtures.processes import running

ROOT = Path(__file__).parents[4]
FAKE = ROOT / "tests" / "fixtures" / "fake_server.py"
SMALL = ("--num-prompts", "5", "--repeats", "2", "--concurrency", "1,2")
FLAGS = ("--model-path", "{model}", "--device", "cpu", "--speculative-algorithm", "DFLASH")


@pytest.fixture
def fake(tmp_path: Path) -> Iterator[Callable[..., str]]:
    """Return `fake(*flags)`, which starts tests/fixtures/fake_server.py and returns its URL."""
    with ExitStack() as stack:

        def start(*flags: str) -> str:
            port = free_port(31950)
            while any(server.port == port for server in started):
                port = free_port(port + 1)
            command = [sys.executable, str(FAKE), *flags]
            server = Server(command, port=port, log=tmp_path / str(port), env={}, name="fake")
            started.append(server)
            return stack.enter_context(server).url

        started: list[Server] = []
        yield start


@pytest.fixture
def bench(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> Callable[..., SimpleNamespace]:
    """Return `bench(*arguments)`, which runs the benchmark and returns its output and JSON document."""

    def run(*arguments: str) -> SimpleNamespace:
        own, separator, server_flags = list(arguments), [], []
        if "--" in own:
            at = own.index("--")
            own, separator, server_flags = own[:at], ["--"], own[at + 1 :]
        main([*own, "--output", str(tmp_path / "out.json"), *separator, *server_flags])
        out = capsys.readouterr().out
        assert out.splitlines()[-1] == str(tmp_path / "out.json")
        document = json.loads((tmp_path / "out.json").read_text())
        return SimpleNamespace(out=out, document=document)

    return run


@pytest.fixture
def serve(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> list[str]:
    """Return `--serve` arguments that start fake_server.py for every arm of a model without MTP layers."""
    (tmp_path / "config.json").write_text("{}")
    monkeypatch.setattr(arms, "SERVE", (sys.executable, str(FAKE)))
    monkeypatch.setattr(served, "GIB_PER_SERVER", 0)  # no check of free memory: stand-ins are small
    return ["--serve", "--port", "31980", "--", *(flag.format(model=tmp_path) for flag in FLAGS)]


def lines_of(document: dict[str, Any], **wanted: object) -> list[dict[str, Any]]:
    return [line for line in document["summary"] if wanted.items() <= line.items()]


def test_the_published_guides_command_line_works(fake, bench, monkeypatch):
    asked = []

    def load_dataset(path: str, config: str | None, *, split: str) -> list[dict[str, str]]:
        asked.append((path, config, split))
        return [{"question": f"{i} + {i}?"} for i in range(1000)]

    monkeypatch.setitem(sys.modules, "datasets", SimpleNamespace(load_dataset=load_dataset))
    arguments = f"--backend sglang --base-url {fake()} --model fake-model --dataset gsm8k --num-prompts 128"
    ran = bench(*arguments.split(), "--concurrency", "1", "--enable-thinking")
    assert asked == [("openai/gsm8k", "main", "test")]
    document = ran.document
    assert [(row["task"], row["concurrency"], row["n_answers"]) for row in document["rows"]] == [("GSM8K", 1, 128)] * 3
    assert document["thinking"] is True
    assert document["tasks"][0]["first"][0]["content"].endswith("put your final answer within \\boxed{}.")
    assert document["arms"]["server"]["prefix_cache"] == "emptied before every turn"
    assert lines_of(document)[0]["committed_per_step"] == 1.0  # the stand-in sends no counters: one token per step
    assert "| GSM8K | 1 |" in ran.out


def test_servers_are_compared_with_the_first(fake, bench, tmp_path):
    same, other = fake("--announce"), fake("--offset", "1")
    picture = tmp_path / "bench.svg"
    urls = (f"off={fake()}", f"same={same}/v1", f"other={other}")
    ran = bench("--base-url", *urls, *SMALL, "--plot", str(picture))
    assert picture.read_text().count(">same</text>") == 2, "one curve of speed, one of acceptance"
    document = ran.document
    assert list(document["arms"]) == ["off", "same", "other"]
    for concurrency in (1, 2):
        off, same_line, other_line = lines_of(document, concurrency=concurrency)
        assert "over_off" not in off
        assert same_line["over_off"]["median"] > 0
        assert [line["n_equal"] for line in (off, same_line, other_line)] == [5, 5, 0]
        assert (same_line["committed_per_step"], same_line["acceptance_by_position"]) == (1.5, [0.5])
        assert other_line["first_differences"][0].startswith("prompt 1, token 1: expected ")
        assert off["ttft_ms"]["p50"] > 0
    streamed = [row for row in document["rows"] if row["ttft_ms"]]
    assert {row["repeat"] for row in streamed} == {0}
    assert all(len(row["ttft_ms"]) == len(row["tpot_ms"]) == 5 for row in streamed)
    differ = "other: these answers differ from those of off"
    assert f"{differ}: 5 of 5 (synthetic, 1 in flight); 5 of 5 (synthetic, 2 in flight)" in re.sub(r"\s+", " ", ran.out)
    assert "same: some turns had fewer than 100 steps" in ran.out
    # Only a server with this plugin (`--announce`) reports steps by width. Each answer takes two steps.
    turns = [turn for turn in document["widths"] if turn["concurrency"] == 1]
    assert {turn["arm"] for turn in turns} == {"same"}
    assert sum(turn["n_steps"]["4"] for turn in turns) == 2 * 5 * 3  # 2 steps, 5 prompts, 2 repeats and a streamed run


@pytest.mark.parametrize(
    ("status", "body", "message"),
    [
        (401, {}, r"/v1/models answered 401; give the server's API key with --api-key"),
        (503, {}, r"/v1/models answered 503 without a model; wait until the server is ready, or give the URL of an"),
        (200, {"data": []}, r"/v1/models answered 200 without a model"),
        (200, {"data": ["m"]}, r"/v1/models answered 200 without a model"),
    ],
)
def test_a_server_without_models_is_reported(status, body, message):
    engine = HttpEngine("mine", "http://server")

    def reply(request: httpx.Request) -> httpx.Response:
        # Gateways refuse paths that they do not know with 403, whatever the key.
        return httpx.Response(status, json=body) if request.url.path == "/v1/models" else httpx.Response(403)

    engine.http = httpx.Client(base_url="http://server", transport=httpx.MockTransport(reply))
    with pytest.raises(ServerError, match=message):
        engine.meet()


@pytest.mark.parametrize(
    ("kind", "method"),
    [(ServerKind.SGLANG, name) for name in ("flush", "likeliest", "widths", "describe")]
    + [(ServerKind.VLLM, name) for name in ("counted", "describe")],
)
def test_a_server_that_dies_between_requests_is_named(kind, method):
    engine = HttpEngine("mine", f"http://127.0.0.1:{free_port(31960)}")
    engine.kind = kind
    with pytest.raises(ServerError, match=r"mine: http://\S+ stopped answering \(ConnectError\); look at its log"):
        getattr(engine, method)(*([[1]] if method == "likeliest" else []))


@pytest.mark.parametrize("n", [1, 3])
def test_the_requested_concurrency_is_kept(fake, bench, n):
    """The stand-in refuses requests unless exactly `n` are in flight, also if their prompts are not measured."""
    few = ("--num-prompts", "6", "--repeats", "1", "--no-latency", "--concurrency", str(n))
    ran = bench("--base-url", fake("--together", str(n)), *few)
    assert [row["n_answers"] for row in ran.document["rows"]] == [6]


def test_steps_of_vllm_come_from_its_metrics(fake, bench):
    ran = bench("--backend", "vllm", "--base-url", fake("--kind", "vllm"), *SMALL)
    about = {"url": "", "kind": "vllm", "model": "", "version": "1.0", "prefix_cache": report.KEPT}
    assert ran.document["arms"]["server"] | {"url": "", "model": ""} == about
    assert all(row["committed_per_step"] == 1.5 for row in ran.document["rows"])
    assert all(row["acceptance_by_position"] == [0.5] for row in ran.document["rows"])
    assert "not emptied" in ran.out


def test_unknown_numbers_of_other_servers_are_marked(fake, bench):
    ran = bench("--base-url", fake("--kind", "openai"), "--temperature", "0.7", *SMALL)
    row = ran.document["rows"][0]
    assert (row["committed_per_step"], row["n_equal"], row["other_cores"]) == (None, None, None)
    assert "not known here" in ran.document["level"]
    assert set(ran.document["client"]) == {"machine", "versions"}
    assert "machine" not in ran.document
    assert "(machine not known)" in ran.out


@pytest.mark.parametrize(
    ("flags", "arguments", "message"),
    [
        (["--kind", "openai"], ["--backend", "sglang"], r"answers as openai .*, not as sglang; drop --back"),
        ([], ["--model", "theirs"], "serves fake-model, not theirs; change or drop --model"),
        (
            ["--kind", "openai"],
            ["--dataset", "synthetic", "hopeless"],
            "token ids are sent only to SGLang servers; drop --da",
        ),
        (["--stingy"], [], r"http://.* streams no `usage`.*add --no-latency"),
    ],
)
def test_an_unsuitable_server_is_named(fake, bench, flags, arguments, message):
    with pytest.raises(ServerError, match=message):
        bench("--base-url", fake(*flags), *SMALL, *arguments)


def test_an_error_in_a_stream_is_reported():
    with pytest.raises(ServerError, match=r"mine sent an error in a stream \(.*out of memory.*; see the server's log"):
        streamed("mine", 0.0, [(0.0, 'data: {"error": {"message": "out of memory"}}')])


@pytest.mark.parametrize(
    "reply", [{}, {"choices": [], "usage": {}}, {"choices": [{}], "usage": {}}, {"choices": [{}], "usage": None}]
)
def test_an_answer_without_numbers_is_reported(reply):
    with pytest.raises(ServerError, match="mine sent an answer without choices or usage; measure another server"):
        unstreamed("mine", reply)


def test_a_refused_prompt_ends_the_program(fake, bench, tmp_path):
    data = tmp_path / "mine.jsonl"
    data.write_text('{"prompt": "please refuse"}\n')
    with pytest.raises(ServerError, match=r"/v1/chat/completions answered 400: .*too long"):
        bench("--base-url", fake(), "--data", str(data))


def test_a_missing_server_is_reported_before_a_download(monkeypatch):
    def load_dataset(*_: object, **__: object) -> None:
        pytest.fail("a data set was downloaded")

    monkeypatch.setitem(sys.modules, "datasets", SimpleNamespace(load_dataset=load_dataset))
    with pytest.raises(
        ServerError, match=r"no answer from http://127\.0\.0\.1:9 .*; start the server, or correct the URL$"
    ):
        main(["--base-url", "http://127.0.0.1:9", "--dataset", "gsm8k"])


def test_a_key_is_not_published(fake, bench):
    ran = bench("--base-url", fake(), "--api-key", "secret-1", *SMALL, "--no-latency")
    again = bench("--base-url", fake(), "--api-key=secret-2", *SMALL, "--no-latency")
    assert "secret" not in ran.out + again.out + json.dumps([ran.document, again.document])
    assert ran.document["summary"][0]["ttft_ms"] == {"p50": None, "p99": None}


@pytest.mark.parametrize("together", [True, pytest.param(False, marks=pytest.mark.full)])
def test_arms_are_started_measured_and_stopped(bench, serve, together, tmp_path):
    ran = bench(*SMALL, "--require-equal", *([] if together else ["--one-at-a-time"]), *serve)
    document = ran.document
    assert document["gate"] == {"equal": True, "tie_gap": 0.0, "n_near_ties": 0}
    assert list(document["arms"]) == ["off", "stock", "ours"]
    assert "--speculative" not in document["arms"]["off"]["command"]
    assert document["arms"]["ours"]["env"] == {"SGLANG_DFLASH_WORKER": "plugin"}
    assert all(line["n_equal"] == 5 for line in document["summary"])
    assert set(lines_of(document, arm="ours")[0]) >= {"over_off", "over_stock"}
    order = [row["arm"] for row in document["rows"] if row["concurrency"] == 1]
    assert order == ["off", "stock", "ours", "stock", "ours", "off"]
    assert str(tmp_path) not in json.dumps(document)
    assert running(FAKE) == []
    assert (tmp_path / "out-ours.log").exists()


def test_the_plugins_arm_starts_alone(bench, serve):
    """This plugin measures step costs while its server starts, so no other server may start at that time."""
    out = bench(*SMALL, "--no-latency", *serve).out
    assert out.index("ours: ready") < out.index("off: importing")


def test_an_arm_may_have_an_environment(bench, serve, tmp_path):
    ran = bench(*SMALL, "--no-latency", "--arms", "off", "ours", "ours:FAKE_OFFSET=1,B=2,3", *serve)
    assert list(ran.document["arms"]) == ["off", "ours", "ours:FAKE_OFFSET=1,B=2,3"]
    plugin = {"SGLANG_DFLASH_WORKER": "plugin"}
    environments = [about["env"] for about in ran.document["arms"].values()]
    assert environments == [{}, plugin, {**plugin, "FAKE_OFFSET": "1", "B": "2,3"}]
    assert [line["n_equal"] for line in ran.document["summary"]] == [5, 5, 0] * 2
    assert set(lines_of(ran.document, arm="ours:FAKE_OFFSET=1,B=2,3")[0]) >= {"over_off", "over_ours"}
    assert (tmp_path / "out-ours-FAKE_OFFSET-1-B-2-3.log").exists()


def test_too_little_memory_is_reported_before_anything_starts(bench, serve, monkeypatch, tmp_path):
    monkeypatch.setattr(served, "GIB_PER_SERVER", 1e6)
    message = r"3 servers need about 3000000 GiB of host memory and .* are free; use --one-at-a-time"
    with pytest.raises(ServerError, match=message):
        bench(*SMALL, *serve)
    assert not list(tmp_path.glob("*.log"))


def test_the_preset_of_widths(bench, serve, tmp_path):
    few = ("--num-prompts", "3", "--repeats", "2", "--concurrency", "1,2")
    ran = bench("--preset", "widths", "--port", "31980", *few)
    document = ran.document
    fixed = [f"ours:SGLANG_DFLASH_WIDTHS={width}" for width in (1, 4, 8, 16)]
    assert list(document["arms"]) == ["off", "ours", *fixed]
    widths = [about["env"].get("SGLANG_DFLASH_WIDTHS") for about in document["arms"].values()]
    assert widths == [None, None, "1", "4", "8", "16"]
    assert document["gate"] == {"equal": True, "tie_gap": 0.0, "n_near_ties": 0}
    assert len(document["rows"]) == 2 * 3 * 2 * 6  # repeats, sets, concurrencies, arms
    order = [row["arm"] for row in document["rows"] if (row["task"], row["concurrency"]) == ("hard", 1)]
    assert order == ["off", "ours", *fixed, "ours", *fixed, "off"]
    assert {row["n_prompt_tokens"] for row in document["rows"] if row["task"] == "hopeless"} == {3 * 32}
    # In each turn, an arm with the plugin takes two steps for each of three prompts. Unmeasured steps do not count.
    assert {turn["arm"] for turn in document["widths"]} == {"ours", *fixed}
    assert all(turn["n_steps"] == {"4": 6} for turn in document["widths"])
    assert all(line["steps_by_width"] == ({} if line["arm"] == "off" else {"4": 1.0}) for line in document["summary"])
    assert re.search(r"hard +mean +ours:SGLANG_DFLASH_WIDTHS=16 .* 1.50 ", ran.out)
    assert "answers equal in all arms" in ran.out
    assert "| Task | Concurrency | off | ours | " + " | ".join(fixed) + " |\n" in ran.out
    assert str(tmp_path) not in json.dumps(document)
    assert str(ROOT) not in json.dumps(document)
    assert running(FAKE) == []


@pytest.mark.parametrize("flags", [(), pytest.param(("--one-at-a-time",), marks=pytest.mark.full)])
def test_no_speed_is_shown_when_an_answer_differs(flags, serve, tmp_path, capsys):
    arms_and_gate = ("--arms", "off", "ours", "stock:FAKE_OFFSET=1", "--require-equal", *flags)
    with pytest.raises(GateError) as raised:
        main([*SMALL, "--output", str(tmp_path / "out"), *arms_and_gate, *serve])
    assert re.match(
        r"20 answers differ from those of off, so no speed is shown; stock:FAKE_OFFSET=1, synthetic at 1, prompt 1, "
        r"token 1: exp",
        str(raised.value),
    )
    out = capsys.readouterr().out
    assert "tok/s" not in out
    assert "Tokens/sec" not in out
    assert not (tmp_path / "out.json").exists()
    assert running(FAKE) == []


def test_streamed_answers_must_be_equal_too(serve, tmp_path):
    arms_and_gate = ("--arms", "off", "ours:FAKE_STREAM=other", "--require-equal")
    with pytest.raises(
        GateError, match=r"10 answers differ from those of off.*ours:FAKE_STREAM=other, synthetic at 1, prompt 1"
    ):
        main([*SMALL, "--output", str(tmp_path / "out"), *arms_and_gate, *serve])


def test_near_ties_are_forgiven_on_request(bench, serve):
    """The first arm reports two likely tokens, half a nat apart: its own, and that of the arm with FAKE_OFFSET=1."""
    asked = (*SMALL, "--no-latency", "--arms", "off", "ours:FAKE_OFFSET=1", "--require-equal", "--tie-gap")
    ran = bench(*asked, "0.5", *serve)
    assert ran.document["gate"] == {"equal": True, "tie_gap": 0.5, "n_near_ties": 2 * 2 * 5}
    with pytest.raises(
        GateError, match=r"10 answers differ from those of off.*; raise --tie-gap 0\.4, or give --no-req"
    ):
        bench(*asked, "0.4", *serve)
    with pytest.raises(GateError, match="10 answers differ from those of off"):  # the token is neither of the two
        bench(*[word.replace("OFFSET=1", "OFFSET=2") for word in asked], "9", *serve)


def test_an_arm_without_the_plugin_is_refused(bench, serve, monkeypatch):
    monkeypatch.setattr(arms, "ANNOUNCEMENT", "never logged")
    with pytest.raises(ServerError, match="ours: the worker of sglang-dflash does not serve this arm, or its log"):
        bench(*SMALL, *serve)


def test_an_arm_that_runs_the_plugin_against_its_name_is_refused(bench, serve):
    with pytest.raises(ServerError, match="the worker of sglang-dflash serves this arm; drop SGLANG_DFLASH_WORKER"):
        bench(*SMALL, "--arms", "stock:SGLANG_DFLASH_WORKER=plugin", *serve)


@pytest.mark.parametrize("error", [KeyboardInterrupt(), ServerError("ours: stopped answering")])
def test_an_interrupted_run_keeps_its_whole_repeats(error):
    def repeat(number: int) -> list[dict[str, int]]:
        bench.widths.append({"repeat": number})
        if number == whole:
            raise error
        return [{"repeat": number}]

    bench = cast(Bench, SimpleNamespace(schedule=SimpleNamespace(repeats=5), repeat=repeat, widths=[]))
    whole = 2
    assert every_repeat(bench, Console()) == bench.widths == [{"repeat": 0}, {"repeat": 1}]
    assert bench.failure is (error if isinstance(error, ServerError) else None)
    whole = 0
    with pytest.raises(type(error)):
        every_repeat(bench, Console())


def test_a_server_that_fails_in_a_later_repeat_leaves_results(fake, monkeypatch, capsys, tmp_path):
    measured = Bench.repeat

    def failing(self: Bench, number: int) -> list[Row]:
        if number == 1:
            raise ServerError("server: stopped answering; look at its log")
        return measured(self, number)

    monkeypatch.setattr(Bench, "repeat", failing)
    assert main(["--base-url", fake(), *SMALL, "--no-latency", "--output", str(tmp_path / "out")]) == 1
    assert json.loads((tmp_path / "out.json").read_text())["repeats"] == 1
    error = capsys.readouterr().err
    assert error == "bench: server: stopped answering; look at its log; repeats completed before: 1\n"
