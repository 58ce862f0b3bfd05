"""Launches of several engines in one process: variables are read again, or the launch is refused."""

import sys
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
