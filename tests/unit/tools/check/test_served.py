"""`check --server`: the report on a running server, and errors without one."""

import json
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, HTTPServer
from socketserver import StreamRequestHandler, TCPServer
from threading import Thread
from typing import Any

import pytest

from sglang_dflash.pairs.servers.ports import free_port
from sglang_dflash.tools.check import served
from sglang_dflash.tools.check.__main__ import main

DFLASH = {
    "version": "0.1.0",
    "block_size": 8,
    "copies": [],
    "simulated": None,
    "width": {
        "policy": "auto",
        "seconds": {"1": {"1": 0.001, "8": 0.0025}, "16": {"1": 0.002, "8": 0.01}},
        "n_steps": {"1": 3, "8": 1},
        "account": "widths of 4 steps: ...",
    },
}


@pytest.fixture
def url() -> Iterator[tuple[str, dict[str, Any]]]:
    """Return the address of a stand-in server, and its answer to /server_info, which a test may change."""
    answer: dict[str, Any] = {"internal_states": [{"dflash": DFLASH}]}

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            asked = self.requestline.split()[1]  # `self.path` would merge a double slash
            self.send_response(200 if asked == "/server_info" else 404)
            self.end_headers()
            self.wfile.write(json.dumps(answer).encode())

        def log_message(self, *_: object) -> None:
            return

    with HTTPServer(("127.0.0.1", 0), Handler) as server:
        Thread(target=server.serve_forever, daemon=True).start()
        yield f"http://127.0.0.1:{server.server_port}", answer
        server.shutdown()


@pytest.mark.parametrize("end", ["", "/"])
def test_costs_and_choices_are_shown(url, end, capsys):
    assert main(["--server", url[0] + end]) == 0
    assert capsys.readouterr().out.splitlines() == [
        "sglang-dflash 0.1.0, blocks of 8, width auto",
        "seconds per step, requests x width:",
        "                   1         8",
        "         1   1.00 ms   2.50 ms",
        "        16   2.00 ms  10.00 ms",
        "widths of 4 steps: ...",
    ]


def test_as_json(url, capsys):
    assert main(["--server", url[0], "--json"]) == 0
    assert json.loads(capsys.readouterr().out) == DFLASH


def test_a_fixed_width_has_no_costs():
    width = {"policy": "always 8", "seconds": {}, "n_steps": {}, "account": ""}
    assert served.render(DFLASH | {"width": width}) == "sglang-dflash 0.1.0, blocks of 8, width always 8"


@pytest.mark.parametrize(
    ("states", "sentence"),
    [
        ([{}], "does not serve DFLASH with this plugin; start it with"),
        ([], "does not serve DFLASH with this plugin; start it with"),
        (None, "is no SGLang server"),
    ],
)
def test_another_server_is_reported(url, states, sentence, monkeypatch, capsys):
    url[1].clear()
    if states is not None:
        url[1]["internal_states"] = states
    assert main(["--server", url[0]]) == 1
    (line,) = capsys.readouterr().err.splitlines()
    assert sentence in line
    assert url[0] in line


def test_the_rust_server_reports_no_internals(url, capsys):
    url[1].clear()
    url[1].update(frontend="rust", speculative_algorithm="DFLASH", internal_states=[{}])
    assert main(["--server", url[0]]) == 1
    (line,) = capsys.readouterr().err.splitlines()
    assert line == (
        f"check: SGLang's Rust server (SGLANG_RUST_SERVER=1) at {url[0]} serves DFLASH, but reports no step times or "
        "widths; its log names the worker, and with --enable-metrics its /metrics has the dflash metrics"
    )


def test_the_rust_server_without_speculation_is_reported(url, capsys):
    url[1].update(frontend="rust", speculative_algorithm=None, internal_states=[{}])
    assert main(["--server", url[0]]) == 1
    assert "does not serve DFLASH with this plugin; start it with" in capsys.readouterr().err


@pytest.fixture
def grpc_url() -> Iterator[str]:
    """Return the address of a port that answers with an HTTP/2 frame, as gRPC servers do."""

    class Handler(StreamRequestHandler):
        def handle(self) -> None:
            self.wfile.write(bytes.fromhex("000018040000000000000400400000000500400000000600002000fe0300000001"))
            self.rfile.readline()

    with TCPServer(("127.0.0.1", 0), Handler) as server:
        Thread(target=server.serve_forever, daemon=True).start()
        yield f"http://127.0.0.1:{server.server_address[1]}"
        server.shutdown()


def test_a_grpc_port_is_named(grpc_url, capsys):
    assert main(["--server", grpc_url]) == 1
    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith(f"check: {grpc_url} does not speak HTTP/1.1 (BadStatusLine); if it is a gRPC port (--smg-")


def test_a_missing_server_is_a_one_line_error(capsys):
    assert main(["--server", f"http://127.0.0.1:{free_port(31990)}"]) == 1
    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith("check: no SGLang server answers at http://127.0.0.1:")


@pytest.mark.parametrize(("urls", "found"), [((), "nothing"), (("a", "b"), "a b")])
def test_exactly_one_url_is_required(urls, found, capsys):
    assert main(["--server", *urls]) == 1
    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith(f"check: found {found} with --server; give one URL, such as http://127.0.0.1:30000")


@pytest.mark.parametrize("argv", [["--json", "--server", "127.0.0.1:1"], ["--server=127.0.0.1:1"]], ids=str)
def test_the_option_may_stand_anywhere(argv, capsys):
    assert main(argv) == 1
    (line,) = capsys.readouterr().err.splitlines()
    assert line == "check: --server 127.0.0.1:1 has no http://; did you mean http://127.0.0.1:1?"


@pytest.mark.parametrize(
    ("path", "sentence"),
    [
        ("/v1", "/v1/server_info answers 404 Not Found; give the URL of an SGLang server, without a path"),
        ("x", "port:"),
    ],
)
def test_a_wrong_url_gets_its_cure(path, sentence, url, capsys):
    assert main(["--server", url[0] + path]) == 1
    (line,) = capsys.readouterr().err.splitlines()
    assert sentence in line


def test_a_url_without_its_scheme_is_completed(capsys):
    assert main(["--server", "127.0.0.1:30000"]) == 1
    (line,) = capsys.readouterr().err.splitlines()
    assert line == "check: --server 127.0.0.1:30000 has no http://; did you mean http://127.0.0.1:30000?"


def test_copies_are_reported():
    width = DFLASH["width"] | {"policy": "always 8", "seconds": {}, "n_steps": {}}
    dflash = DFLASH | {"width": width, "copies": [[0, 0], [2, 3], [0, 0], [4, 20], [5, 60]]}
    assert served.render(dflash).splitlines()[1:] == [
        "n-gram copies: 11 blocks had a copy, and 83 copied drafts were accepted"
    ]
