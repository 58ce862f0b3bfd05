"""Guards beside another SGLang, with stand-ins for its modules."""

import logging
import sys
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest

from sglang_dflash.engine.host import other_sglang
from sglang_dflash.errors import HostMismatch

MISMATCH = HostMismatch("sglang 0.5.24 is installed; sglang-dflash needs another")
CURE = "; install that release, or set SGLANG_DFLASH_WORKER=stock"


class Registry:
    """SGLang's registry of hooks."""

    def __init__(self) -> None:
        self.hooks: dict[str, Any] = {}

    def register(self, name: str, hook: Any, kind: Any) -> None:
        self.hooks[name] = hook


@pytest.fixture
def registry(monkeypatch: pytest.MonkeyPatch) -> Registry:
    monkeypatch.delenv("SGLANG_DFLASH_WORKER", raising=False)
    registry, module = Registry(), ModuleType("hook_registry")
    vars(module).update(HookRegistry=registry, HookType=SimpleNamespace(AROUND="around"))
    monkeypatch.setitem(sys.modules, "sglang.srt.plugins.hook_registry", module)
    return registry


def launched(algorithm: str | None) -> Any:
    return SimpleNamespace(speculative_algorithm=algorithm)


def test_launches_with_dflash_are_refused_where_sglang_has_a_name(registry, monkeypatch, caplog):
    monkeypatch.setattr(other_sglang, "has", lambda module, name: "check" in name)
    with caplog.at_level(logging.WARNING):
        other_sglang.stand_aside(MISMATCH)
    assert caplog.messages == [f"{MISMATCH}; only launches with DFLASH are refused"]
    (hook,) = registry.hooks.values()
    assert hook(lambda server_args: "checked", launched(None)) == "checked"
    assert hook(lambda server_args: "checked", launched("EAGLE")) == "checked"
    for given in ("DFLASH", "dflash"):
        with pytest.raises(HostMismatch) as refusal:
            hook(lambda server_args: "checked", launched(given))
        assert str(refusal.value) == f"{MISMATCH}{CURE}"


def test_a_schedulers_arguments_may_have_any_place(registry):
    other_sglang.stand_aside(MISMATCH)
    assert len(registry.hooks) == len(other_sglang.GUARDED)
    hook = registry.hooks["sglang.srt.speculative.spec_info.SpeculativeAlgorithm.create_worker"]
    with pytest.raises(HostMismatch):
        hook(lambda algorithm, server_args: int, object(), server_args=launched("DFLASH"))
    assert hook(lambda algorithm, server_args: int, object(), launched(None)) is int


@pytest.mark.parametrize("word", ["DFLASH", "--speculative-algorithm=dflash"])
def test_without_a_guard_the_command_line_decides(word, registry, monkeypatch):
    monkeypatch.setattr(other_sglang, "has", lambda module, name: False)
    monkeypatch.setattr(sys, "argv", ["launch_server", "--model-path", "a"])
    other_sglang.stand_aside(MISMATCH)
    sys.argv.append(word)
    with pytest.raises(SystemExit, match="set SGLANG_DFLASH_WORKER=stock"):  # SGLang ignores an Exception of a plugin
        other_sglang.stand_aside(MISMATCH)


@pytest.mark.parametrize("value", ["stock", "Stock"])  # as in `flags`, in any case
def test_the_stock_worker_is_left_alone(value, registry, monkeypatch, caplog):
    monkeypatch.setenv("SGLANG_DFLASH_WORKER", value)
    other_sglang.stand_aside(MISMATCH)
    assert registry.hooks == {}
    assert "sglang-dflash is inactive (SGLANG_DFLASH_WORKER=stock)" in caplog.text


def test_an_sglang_without_hooks_is_no_error(monkeypatch):
    for name in ("sglang.srt.plugins.hook_registry", "sglang.srt.arg_groups.resolution_hooks"):
        monkeypatch.setitem(sys.modules, name, None)
    assert other_sglang.guard_methods(MISMATCH) == 0
    other_sglang.guard_resolution(MISMATCH)


def test_names_are_looked_for():
    assert all(other_sglang.has(*name) for name in other_sglang.GUARDED)
    assert not other_sglang.has("sglang.srt.server_args", "ServerArgs.check_it")
    assert not other_sglang.has("sglang.srt.no_such_module", "ServerArgs")
