"""Decisions of the plugin's hooks, with stand-ins for the parts of SGLang that call them.

`test_plugin_launch.py` runs SGLang's launch command.
"""

import os
import sys
from argparse import ArgumentParser
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest

from sglang_dflash import flags, plugin
from sglang_dflash.engine.host import agreement
from sglang_dflash.engine.host import contract as host
from sglang_dflash.engine.host.names import Name
from sglang_dflash.errors import HostMismatch, NotSupported


class Bag:
    def __init__(self) -> None:
        self.taken = 0

    def take(self, count: int) -> None:
        self.taken += count


@pytest.fixture
def sglang(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    """Return a stand-in package `sglang` of a version that the plugin refuses, with one module, `sglang.bag`."""
    package, module = ModuleType("sglang"), ModuleType("sglang.bag")
    package.__version__ = "0.5.24"
    module.Bag = Bag
    monkeypatch.setitem(sys.modules, "sglang", package)
    monkeypatch.setitem(sys.modules, "sglang.bag", module)
    monkeypatch.setitem(sys.modules, "sglang.version", package)
    return package


def algorithm(is_dflash: bool) -> Any:
    return SimpleNamespace(is_dflash=lambda: is_dflash)


def stock(algorithm: Any, server_args: Any) -> type:
    return int


def test_other_algorithms_get_sglangs_worker(monkeypatch):
    monkeypatch.setenv("SGLANG_DFLASH_WROKER", "stock")  # misspelt, but irrelevant to other algorithms
    assert plugin.create_worker(stock, algorithm(is_dflash=False), None) is int


def test_dflash_gets_sglangs_worker_if_the_environment_selects_it(monkeypatch):
    """The ranks are compared first, because another rank may have selected this plugin's worker."""
    compared = list[Any]()
    monkeypatch.setattr(agreement, "require_equal", lambda server_args, choices: compared.append(choices))
    monkeypatch.setenv("SGLANG_DFLASH_WORKER", "stock")
    assert plugin.create_worker(stock, algorithm(is_dflash=True), None) is int
    assert compared == [{}]


def test_ranks_are_compared_before_the_worker_is_built(monkeypatch):
    from sglang_dflash.engine.config import DFlashConfig

    def differ(server_args: Any, choices: Any) -> None:
        raise ValueError(f"{choices} is another")

    monkeypatch.delenv("SGLANG_DFLASH_WORKER", raising=False)
    config = SimpleNamespace(choices=lambda: "the block size")
    monkeypatch.setattr(DFlashConfig, "from_server_args", lambda server_args: config)
    monkeypatch.setattr(plugin.host, "require", lambda: None)
    monkeypatch.setattr(plugin, "require_declared", lambda server_args, config: None)
    monkeypatch.setattr(agreement, "require_equal", differ)
    with pytest.raises(ValueError, match=r"^the block size is another$"):
        plugin.create_worker(stock, algorithm(is_dflash=True), None)


def test_dflash_checks_the_host_first(monkeypatch, sglang):
    monkeypatch.delenv("SGLANG_DFLASH_WORKER", raising=False)
    with pytest.raises(HostMismatch, match=r"sglang 0\.5\.24 is installed; sglang-dflash .* needs sglang 0\.5\.23"):
        plugin.create_worker(stock, algorithm(is_dflash=True), None)


def test_another_sglang_gets_no_hooks(monkeypatch, sglang):
    asked = list[HostMismatch]()
    monkeypatch.setattr(plugin, "stand_aside", asked.append)
    plugin.register()
    (mismatch,) = asked
    assert str(mismatch).startswith("sglang 0.5.24 is installed; sglang-dflash ")


@pytest.mark.parametrize(
    ("name", "sentence"),
    [
        (Name("sglang.bag", "Bag", "taken take"), ""),
        (Name("sglang.bag", "Bag.take", "count"), ""),
        (Name("sglang.bag", "Bag.take", "count weight"), "parameter 'weight' of sglang.bag.Bag.take"),
        (Name("sglang.bag", "Bag", "given"), "member 'given' of sglang.bag.Bag"),
        (Name("sglang.bag", "Bag.give"), "sglang.bag.Bag.give"),
        (Name("sglang.sack", "Sack"), "module sglang.sack"),
    ],
)
def test_each_name_of_sglang_is_checked(name, sentence, sglang):
    if not sentence:
        host.check([name])
        return
    with pytest.raises(HostMismatch) as mismatch:
        host.check([name])
    assert str(mismatch.value).startswith(f"sglang 0.5.24 lacks {sentence}; sglang-dflash ")
    assert str(mismatch.value).endswith(" needs the unmodified release sglang 0.5.23")


def test_a_missing_name_of_flashinfer_is_not_blamed_on_sglang(sglang, monkeypatch):
    bag = ModuleType("flashinfer")
    bag.give = lambda: None
    monkeypatch.setitem(sys.modules, "flashinfer", bag)
    for name in (Name("flashinfer.sack", "Sack"), Name("flashinfer", "Bag"), Name("flashinfer", "give", "device")):
        with pytest.raises(HostMismatch, match=r"^FlashInfer lacks .*; install the version of flashinfer-python that"):
            host.check([name])


def test_a_missing_dependency_of_sglang_is_named(sglang, monkeypatch, tmp_path):
    (tmp_path / "sack.py").write_text("import a_module_that_is_missing")
    monkeypatch.setattr(sglang, "__path__", [str(tmp_path)], raising=False)
    with pytest.raises(HostMismatch, match=r"^sglang\.sack imports a_module_that_is_missing, which is not installed; "):
        host.check([Name("sglang.sack", "Sack")])


@pytest.mark.parametrize(
    ("layer_types", "stock"),
    [(["sliding_attention"] * 2, "trtllm_mha"), (["sliding_attention", "full_attention"], "fa4")],
)
def test_the_drafts_backend_is_kept_where_sglang_replaces_it(layer_types, stock, monkeypatch, checkpoints, tmp_path):
    """On a B200 SGLang replaces trtllm_mha unless all draft layers have a sliding window. The plugin restores it."""
    from sglang.srt.arg_groups import speculative_hook
    from sglang.srt.arg_groups.overrides import declare_resolution, resolving_view

    on_b200 = SimpleNamespace(is_sm100=True, is_xpu=False, is_hip=False)
    monkeypatch.setattr(speculative_hook, "get_platform", lambda: on_b200)
    monkeypatch.setattr(speculative_hook, "current_platform", SimpleNamespace(is_out_of_tree=lambda: False))
    draft = checkpoints.write_draft(tmp_path, layer_types=layer_types, sliding_window=32)
    server_args = SimpleNamespace(
        speculative_algorithm="DFLASH", speculative_draft_model_path=str(draft), json_model_override_args="{}",
        speculative_draft_model_revision=None, trust_remote_code=False,
    )  # fmt: skip
    declared = {"speculative_draft_attention_backend": "trtllm_mha"}
    declare_resolution(server_args, "before", **declared)
    speculative_hook._resolve_dflash_draft_attention_backend(server_args)
    assert resolving_view(server_args).speculative_draft_attention_backend == stock
    plugin.keep_backend(server_args, "trtllm_mha")
    assert resolving_view(server_args).speculative_draft_attention_backend == "trtllm_mha"


def test_the_backend_is_restored_after_sglangs_step(monkeypatch):
    from sglang.srt.arg_groups.overrides import declare_resolution, resolving_view

    from sglang_dflash.engine.config import DFlashConfig

    config = SimpleNamespace(
        block_size=8, widest=8, draft_attention_backend="trtllm_mha", draft_quantization=None,
        draft_load_format="auto", dtype="float16", ignored=(),
    )  # fmt: skip
    monkeypatch.setattr(DFlashConfig, "from_server_args", lambda server_args: config)
    monkeypatch.setattr(plugin.host, "require_live", lambda: None)
    monkeypatch.delenv("SGLANG_DFLASH_WORKER", raising=False)
    server_args = SimpleNamespace(speculative_algorithm="DFLASH", tokenizer_worker_num=1)

    def sglang_s(server_args: Any) -> None:
        seen = resolving_view(server_args)
        assert (seen.speculative_draft_attention_backend, seen.speculative_num_draft_tokens) == ("trtllm_mha", 8)
        assert (seen.speculative_draft_load_format, seen.dtype) == ("auto", "float16")
        declare_resolution(server_args, "SGLang", speculative_draft_attention_backend="fa4")

    plugin.check_arguments(server_args, sglang_s)
    assert resolving_view(server_args).speculative_draft_attention_backend == "trtllm_mha"


def test_several_tokenizer_processes_use_the_checking_app(monkeypatch):
    name = "SGLANG_HTTP_SERVER_APP_PATH"
    monkeypatch.delenv("SGLANG_DFLASH_WORKER", raising=False)
    ours = "sglang_dflash.engine.host.http_app:app"
    for n_processes, asked, served in ((1, "", ""), (2, "", ours), (2, "mine:app", "mine:app")):
        monkeypatch.setenv(name, asked)
        if not asked:
            monkeypatch.delenv(name)
        server_args = SimpleNamespace(speculative_algorithm=None, tokenizer_worker_num=n_processes)
        plugin.prepare_tokenizer(None, server_args)
        assert os.environ.get(name, "") == served


def test_plugins_are_loaded_before_the_first_step_of_resolution(monkeypatch):
    from sglang.srt import plugins
    from sglang.srt.arg_groups import resolution_hooks

    from sglang_dflash.engine.host import loading

    done = list[str]()
    monkeypatch.setattr(plugins, "load_plugins", lambda: done.append("plugins"))
    monkeypatch.setattr(resolution_hooks, "_HOOKS", {})
    loading.load_before_resolution()
    (hook,) = resolution_hooks._HOOKS[loading.FIRST]
    hook(None, lambda server_args: done.append("step"))
    assert done == ["plugins", "step"]


def test_arguments_that_were_resolved_without_the_plugin_are_refused():
    values = {"draft_quantization": None, "draft_load_format": "auto", "dtype": "float16"}
    config = SimpleNamespace(block_size=8, widest=12, draft_attention_backend="fa3", **values)
    resolved = {
        "speculative_num_draft_tokens": 12, "speculative_draft_attention_backend": "fa3",
        "speculative_draft_model_quantization": None, "speculative_draft_load_format": "auto", "dtype": "float16",
    }  # fmt: skip
    plugin.require_declared(SimpleNamespace(**resolved), config)
    for name in resolved:
        wrong = SimpleNamespace(**resolved | {name: "other"})
        with pytest.raises(NotSupported, match=f"^{name} was resolved to other without .*load_plugins.. before you"):
            plugin.require_declared(wrong, config)


def test_old_names_set_what_the_new_names_set():
    parser = ArgumentParser()
    parser.add_argument("--speculative-draft-window-size", type=int)
    parser.add_argument("--mamba-radix-cache-strategy", choices=["auto", "extra_buffer"], default="auto")
    flags.add_old_names(parser)
    assert vars(parser.parse_args([])) == {"speculative_draft_window_size": None, "mamba_radix_cache_strategy": "auto"}
    old = ["--speculative-dflash-draft-window-size", "64", "--mamba-scheduler-strategy", "extra_buffer"]
    new = {"speculative_draft_window_size": 64, "mamba_radix_cache_strategy": "extra_buffer"}
    assert vars(parser.parse_args(old)) == new
    assert parser.parse_args([*old, "--speculative-draft-window-size", "32"]).speculative_draft_window_size == 32
