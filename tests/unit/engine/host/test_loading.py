"""Launches of several engines in one process: variables are read again, or the launch is refused."""

import socket
import sys
from collections.abc import Iterator
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest

from sglang_dflash import flags, plugin
from sglang_dflash.engine.host import admission, loading
from sglang_dflash.errors import NotSupported

DFLASH = SimpleNamespace(speculative_algorithm="DFLASH", tokenizer_worker_num=1)


@pytest.fixture(autouse=True)
def plain(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in (flag.name for flag in flags.FLAGS):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setattr(admission, "hook_tokenizer", lambda: None)


def resolve_and_launch() -> None:
    plugin.apply_flags(DFLASH, lambda server_args: None)
    plugin.prepare_tokenizer(None, DFLASH)


def test_each_resolution_reads_the_variables(monkeypatch: pytest.MonkeyPatch) -> None:
    for value, widths in (("1,32", (1, 32)), ("4", (4,))):
        monkeypatch.setenv("SGLANG_DFLASH_WIDTHS", value)
        resolve_and_launch()
        assert flags.current().widths == widths


@pytest.mark.parametrize(
    ("name", "value"), [("SGLANG_DFLASH_COPY", "on"), ("SGLANG_DFLASH_WORKER", "stock"), ("SGLANG_DFLASH_WIDTHS", "4")]
)
def test_variables_that_change_after_the_resolution_are_refused(
    name: str, value: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    plugin.apply_flags(DFLASH, lambda server_args: None)
    monkeypatch.setenv(name, value)
    with pytest.raises(NotSupported, match="have changed since the arguments were resolved; set them before you build"):
        plugin.prepare_tokenizer(None, DFLASH)
    plugin.prepare_tokenizer(None, SimpleNamespace(speculative_algorithm=None, tokenizer_worker_num=1))


@pytest.fixture
def taken() -> Iterator[int]:
    """Return a port on which a socket listens."""
    with socket.create_server(("127.0.0.1", 0)) as server:
        yield server.getsockname()[1]


def on(port: int, host: str = "127.0.0.1", **fields: Any) -> SimpleNamespace:
    asked = {"node_rank": 0, "enable_http_worker_reuseport": False} | fields
    return SimpleNamespace(host=host, port=port, **vars(DFLASH), **asked)


@pytest.mark.parametrize("host", ["127.0.0.1", "0.0.0.0", "localhost"])
def test_a_taken_port_is_refused(host: str, taken: int) -> None:
    with pytest.raises(NotSupported, match=f"^--port {taken} of {host} is in use by another process; stop it, or give"):
        loading.require_free_port(on(taken, host))


def test_other_ports_are_left_to_sglang(taken: int) -> None:
    loading.require_free_port(on(taken, node_rank=1))
    loading.require_free_port(on(taken, enable_http_worker_reuseport=True))
    loading.require_free_port(on(taken, "no such host"))
    loading.require_free_port(on(0))


def test_only_the_http_server_needs_its_port(taken: int) -> None:
    """`sglang.Engine` has a port among its arguments too, and does not listen on it."""
    plugin.apply_flags(DFLASH, lambda server_args: None)
    plugin.prepare_tokenizer(None, on(taken))
    namespace: dict[str, Any] = {"__name__": "sglang.srt.entrypoints.http_server", "check": plugin.prepare_tokenizer}
    exec("def launch_server(server_args): (lambda: check(None, server_args))()", namespace)
    with pytest.raises(NotSupported, match="is in use by another process"):
        namespace["launch_server"](on(taken))


def test_another_platform_needs_another_process(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(loading, "AT_IMPORT", "off")
    monkeypatch.setenv("SGLANG_DFLASH_REHEARSE", "sm90")
    with pytest.raises(NotSupported, match="_REHEARSE was off when SGLang was imported, and is sm90 now; set it in a "):
        resolve_and_launch()


def test_rays_schedulers_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "sglang.srt.ray.engine", ModuleType("engine"))
    with pytest.raises(NotSupported, match=r"^SGLang's Ray engine is not supported .*; launch without Ray, or set SGL"):
        resolve_and_launch()
    monkeypatch.setenv("SGLANG_DFLASH_WORKER", "stock")
    resolve_and_launch()


def test_only_simulated_answers_are_marked(monkeypatch: pytest.MonkeyPatch) -> None:
    """The hook stays in place when a later engine of the process does not simulate."""
    for length, marks in (("5.5", ["spec_simulated"]), ("-1", [])):
        monkeypatch.setenv("SGLANG_SIMULATE_ACC_LEN", length)
        resolve_and_launch()
        meta_info = dict[str, Any]()
        admission.mark_simulated(None, None, meta_info)
        assert list(meta_info) == marks
