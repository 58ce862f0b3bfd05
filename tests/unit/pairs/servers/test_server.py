"""Server processes, with a stand-in: starting, dying, pausing and stopping."""

import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from io import BytesIO, StringIO
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import psutil
import pytest
from rich.console import Console

from sglang_dflash.pairs.servers import progress
from sglang_dflash.pairs.servers import server as server_module
from sglang_dflash.pairs.servers.document import require_folder
from sglang_dflash.pairs.servers.errors import ServerError
from sglang_dflash.pairs.servers.ports import HOST, free_port, port_is_free
from sglang_dflash.pairs.servers.progress import wait_ready
from sglang_dflash.pairs.servers.server import Server, stage_of

ROOT = Path(__file__).parents[4]
FAKE = ROOT / "tests" / "fixtures" / "fake_server.py"

MakeServer = Callable[..., Server]


@pytest.fixture
def fake(tmp_path: Path) -> Iterator[MakeServer]:
    made: list[Server] = []

    def make(*flags: str) -> Server:
        command = [sys.executable, str(FAKE), *flags]
        port = free_port(31900)
        made.append(Server(command, port=port, log=tmp_path / f"{port}.log", env={}, name="fake"))
        return made[-1]

    yield make
    for server in made:
        server.stop()


def test_a_server_that_dies_is_reported_with_the_end_of_its_log(fake):
    with (
        pytest.raises(ServerError, match=r"status 1 before it was ready(.|\n)*the checkpoint is not there"),
        fake("--die"),
    ):
        pytest.fail("it cannot be ready")


def test_waiting_for_a_mute_server_times_out(tmp_path):
    command = [sys.executable, "-c", "import time; time.sleep(600)"]
    server = Server(command, port=free_port(31900), log=tmp_path / "log", env={}, name="mute")
    server.start()
    try:
        with pytest.raises(ServerError, match="mute: not ready after 1 s"):
            server.wait_ready(timeout_s=1)
        with pytest.raises(ServerError, match="mute: not ready after 1 s"):
            wait_ready([server], Console(file=StringIO()), timeout_s=1)
    finally:
        server.stop()
    assert not server.running


def test_a_taken_port_is_refused_by_its_number(fake):
    server = fake()
    server.stop()  # does nothing before a start
    with socket.socket() as other:
        # An earlier server's connections may still be in TIME_WAIT on this port.
        other.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        other.bind((HOST, server.port))
        other.listen()
        with pytest.raises(ServerError, match=f"port {server.port} is taken.*, or choose another with --port"):
            server.start()
        assert free_port(server.port) > server.port
    assert not server.log.exists()


@pytest.mark.parametrize(("start", "last"), [(31900, 31999), (65530, 65535)])
def test_no_free_port_is_reported(monkeypatch, start, last):
    monkeypatch.setattr("sglang_dflash.pairs.servers.ports.claim", lambda port: False)
    message = rf"found no free port in {start}\.\.{last}; choose another start with --port"
    with pytest.raises(ServerError, match=message):
        free_port(start)


def test_a_folder_that_cannot_be_written_is_refused(tmp_path):
    require_folder(tmp_path / "new" / "folder", "--logs")
    (tmp_path / "file").touch()
    with pytest.raises(ServerError, match=r"file/logs cannot be written; give --logs a path in a folder that can"):
        require_folder(tmp_path / "file" / "logs", "--logs")


def test_there_is_no_port_above_the_last():
    with pytest.raises(ServerError, match="the ports up to 65535 are used up; start lower with --port"):
        free_port(65536)


def test_two_processes_never_choose_the_same_port():
    """`free_port` reserves a port for its process, even before a server starts there, until the process ends."""
    choose = "from sglang_dflash.pairs.servers.ports import free_port; print(free_port(32400), flush=True); input()"
    with subprocess.Popen(
        [sys.executable, "-c", choose], cwd=ROOT, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    ) as other:
        theirs = int(other.stdout.readline())
        assert theirs >= 32400
        ours = free_port(theirs)
        assert ours > theirs
        assert free_port(theirs) == ours, "a process may choose its own again"
        other.kill()
    assert free_port(theirs) == theirs


@pytest.mark.parametrize("flags", [(), ("--deaf",)], ids=["obeys SIGTERM", "ignores SIGTERM"])
def test_stop_ends_the_whole_group_and_frees_the_port(fake, monkeypatch, flags):
    monkeypatch.setattr(server_module, "GRACE_S", 1.0)
    with fake(*flags) as server:
        group = server.processes()
        assert len(group) == 2  # the server and its child
        assert not port_is_free(server.port)
    assert not any(process.is_running() and process.status() != psutil.STATUS_ZOMBIE for process in group)
    assert port_is_free(server.port)


def test_a_paused_server_uses_no_cpu_and_can_be_stopped(fake):
    with fake() as server:
        server.pause()
        deadline = time.monotonic() + 60
        while any(process.status() != psutil.STATUS_STOPPED for process in server.processes()):
            assert time.monotonic() < deadline
        server.resume()
        assert server.generate([5]).token_ids == [5, 6, 7]
        server.pause()
    assert not server.running


def test_a_refused_request_quotes_the_server(fake):
    with fake() as server, pytest.raises(ServerError, match=r"/generate answered 400: .*empty prompt"):
        server.generate([])


def test_a_server_that_has_ended_is_reported(fake):
    server = fake()
    with server:
        pass
    with pytest.raises(ServerError, match="/server_info failed"):
        server.server_info()


def test_answers_come_in_the_order_of_the_prompts(fake):
    with fake() as server:
        answers = server.generate_many([[i] for i in range(20)], concurrency=8)
    assert [answer.token_ids[0] for answer in answers] == list(range(20))


def test_fields_and_sampling_parameters_of_every_request_are_sent(tmp_path, monkeypatch):
    server, sent = Server(["serve"], port=31900, log=tmp_path / "log", env={}, name="recorded"), list[Any]()
    empty = SimpleNamespace(json=lambda: {"output_ids": [], "text": "", "meta_info": {}})
    monkeypatch.setattr(server, "_answer", lambda method, path, body: sent.append(body) or empty)
    server.generate_many([[1], "two"], concurrency=1, fields={"return_logprob": True}, max_new_tokens=3)
    same = {"sampling_params": {"temperature": 0.0, "max_new_tokens": 3}, "return_logprob": True}
    assert sent == [{"input_ids": [1]} | same, {"text": "two"} | same]


def test_a_servers_variables_precede_those_of_this_process(tmp_path, monkeypatch):
    for name in ("OWN", "INHERITED"):
        monkeypatch.setenv(name, "parent")
    monkeypatch.setattr(server_module.subprocess, "Popen", lambda command, *, env, **_: env)
    server = Server(["serve"], port=31900, log=tmp_path / "log", env={"OWN": "arm"}, name="recorded")
    env = server._spawn(BytesIO())
    assert (env["OWN"], env["INHERITED"]) == ("arm", "parent")


def test_progress_is_plain_lines_without_a_terminal(fake):
    out = StringIO()
    servers = [fake()]
    servers[0].start()
    wait_ready(servers, Console(file=out))
    assert f"fake: ready on port {servers[0].port}" in out.getvalue()
    assert "\x1b" not in out.getvalue()


class Starting:
    """Stand-in for a starting server, which is in the next of `stages` at each look, and then ready."""

    port = 1

    def __init__(self, name: str, *stages: str) -> None:
        self.name, self.stages = name, list(stages)

    def is_ready(self) -> bool:
        return not self.stages

    def stage(self) -> str:
        return self.stages.pop(0)


def test_each_stage_of_each_server_is_printed_once(monkeypatch):
    monkeypatch.setattr(progress.time, "sleep", lambda seconds: None)
    out = StringIO()
    servers: Any = Starting("one", "", "loading", "loading", "capturing"), Starting("two", *["loading"] * 3)
    wait_ready(servers, Console(file=out))
    shown = [line.split("s  ")[1] for line in out.getvalue().splitlines() if "ready" not in line]
    assert shown == ["two: loading", "one: loading", "one: capturing"]


def test_stages_follow_the_log():
    log = ""
    for line, stage in (
        ("warnings.warn(", "importing SGLang"),
        ("server_args={...}", "starting scheduler and detokenizer"),
        ("Init parallel begin.", "setting up the device"),
        ("Load weight begin.", "loading the target"),
        ("Load weight begin.", "loading the draft"),
        ("KV Cache is allocated.", "allocating KV and recurrent state"),
        ("Application startup complete.", "warming up"),
        ("The server is fired up and ready to roll!", "ready"),
    ):
        log += line + "\n"
        assert stage_of(log) == stage
