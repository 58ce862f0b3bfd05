"""The CPU platform must be active without an accelerator, and replace SGLang's kernels by stand-ins."""

import re
import subprocess
import sys
from types import ModuleType, SimpleNamespace

import pytest
import torch

from sglang_dflash.platforms import cpu
from sglang_dflash.platforms.cpu import install


@pytest.fixture
def no_accelerator(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.accelerator, "is_available", lambda: False)
    monkeypatch.delenv("SGLANG_USE_CPU_ENGINE", raising=False)


@pytest.mark.usefixtures("no_accelerator")
def test_active_on_a_machine_without_an_accelerator():
    from sglang.srt.platforms import _load_platform_class

    platform = _load_platform_class(cpu.activate())()
    assert platform.is_out_of_tree()
    assert platform.device_name == "cpu"
    assert platform.get_torch_profiler_activity_str() not in ("CPU", "GPU"), "SGLang would start two profilers"
    assert platform.get_torch_profiler_activity() is torch.profiler.ProfilerActivity.CPU


@pytest.mark.usefixtures("no_accelerator")
def test_inactive_with_another_engine(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("SGLANG_USE_CPU_ENGINE", "1")
    assert cpu.activate() is None
    monkeypatch.setenv("SGLANG_USE_CPU_ENGINE", "0")
    assert cpu.activate() is not None
    monkeypatch.setattr(torch.accelerator, "is_available", lambda: True)
    assert cpu.activate() is None


def test_importing_the_entry_point_imports_no_framework():
    found = "sorted(m for m in sys.modules if m.split('.')[0] in ('sglang', 'torch', 'triton', 'transformers'))"
    script = f"import sys, sglang_dflash.platforms.cpu; print({found})"
    assert subprocess.check_output([sys.executable, "-c", script], text=True).strip() == "[]"


def test_the_draft_backend_is_offered_only_on_the_active_platform(monkeypatch: pytest.MonkeyPatch):
    from sglang.srt import platforms
    from sglang.srt.arg_groups.choices import DRAFT_ATTENTION_BACKEND_CHOICES

    from sglang_dflash.platforms.cpu.platform import ATTENTION_BACKEND, CpuPlatform, register_choices

    before = [choice for choice in DRAFT_ATTENTION_BACKEND_CHOICES if choice != ATTENTION_BACKEND]
    DRAFT_ATTENTION_BACKEND_CHOICES[:] = before
    monkeypatch.setattr(platforms, "_current_platform", platforms.SRTPlatform())
    register_choices()
    assert before == DRAFT_ATTENTION_BACKEND_CHOICES
    monkeypatch.setattr(platforms, "_current_platform", CpuPlatform())
    register_choices()
    register_choices()
    assert [*before, ATTENTION_BACKEND] == DRAFT_ATTENTION_BACKEND_CHOICES


def test_a_launch_on_a_cpu_must_name_its_device(monkeypatch: pytest.MonkeyPatch):
    from sglang.srt import platforms

    from sglang_dflash.platforms.cpu.platform import CpuPlatform, require_device

    seen: list[str | None] = []
    for platform, device in ((platforms.SRTPlatform(), None), (CpuPlatform(), "cpu")):
        monkeypatch.setattr(platforms, "_current_platform", platform)
        require_device(SimpleNamespace(device=device), lambda server_args: seen.append(server_args.device))
    assert seen == [None, "cpu"]
    with pytest.raises(ValueError, match="torch finds no GPU; to serve on this CPU add --device cpu"):
        require_device(SimpleNamespace(device=None), seen.append)
    assert len(seen) == 2


def gpu_kernel() -> str:
    return "gpu"


def stand_in() -> str:
    return "cpu"


@pytest.fixture
def host(monkeypatch: pytest.MonkeyPatch) -> dict[str, ModuleType]:
    """Return three modules: SGLang's definition of a kernel, and its importers inside and outside SGLang."""
    modules = {name: ModuleType(name) for name in ("sglang.fake_home", "sglang.fake_user", "fake_outsider")}
    for name, module in modules.items():
        module.kernel = gpu_kernel
        monkeypatch.setitem(sys.modules, name, module)
    monkeypatch.setattr(sys.modules["sglang"], "fake_home", modules["sglang.fake_home"], raising=False)
    monkeypatch.setattr(install, "_stand_ins", {})
    monkeypatch.setattr(install, "_originals", {})
    return modules


def test_every_copy_inside_sglang_is_replaced_once(host):
    install.install({"sglang.fake_home.kernel": stand_in})
    install.verify()
    install.install({"sglang.fake_home.kernel": lambda: "another"})
    assert host["sglang.fake_home"].kernel is stand_in
    assert host["sglang.fake_user"].kernel is stand_in
    assert host["fake_outsider"].kernel is gpu_kernel


@pytest.mark.parametrize(
    ("place", "function"),
    [
        pytest.param("sglang.fake_user.late_copy", gpu_kernel, id="a kernel that was not replaced"),
        pytest.param("sglang.fake_home.kernel", lambda: "someone else's", id="a stand-in that was replaced"),
    ],
)
def test_unreplaced_kernels_stop_the_launch(host, place, function):
    install.install({"sglang.fake_home.kernel": stand_in})
    module, _, name = place.rpartition(".")
    setattr(host[module], name, function)
    with pytest.raises(RuntimeError, match=re.escape(place)):
        install.verify()


def test_an_absent_kernel_is_installed_at_its_home_only(host):
    host["sglang.fake_home"].kernel = host["sglang.fake_user"].kernel = None
    install.install({"sglang.fake_home.kernel": stand_in})
    install.verify()
    assert host["sglang.fake_home"].kernel is stand_in
    assert host["sglang.fake_user"].kernel is None


def test_a_renamed_kernel_stops_the_launch(host):
    del host["sglang.fake_home"].kernel
    with pytest.raises(AttributeError):
        install.install({"sglang.fake_home.kernel": stand_in})


REAL = """
import inspect, pkgutil
import torch
from sglang.srt.platforms import current_platform
import sglang.srt.model_executor.model_runner
import sglang.srt.models.qwen3_5, sglang.srt.models.dflash, sglang.srt.speculative.dflash_worker_v2
from sglang_dflash.platforms.cpu import install
current_platform.post_load_model(torch.nn.Module())
current_platform.post_load_model(torch.nn.Module())

from sglang.srt.layers.attention import attention_registry
assert attention_registry.ATTENTION_BACKENDS["torch_native"].__module__ == "sglang_dflash.platforms.cpu.attention"
assert {**install.at_import(), **install.after_load()}.keys() == install._stand_ins.keys()
for target, original in install._originals.items():
    if not inspect.isroutine(original) or target.startswith("torch."):
        continue
    theirs = list(inspect.signature(original).parameters)
    ours = inspect.signature(install._stand_ins[target]).parameters.values()
    positional = [p.name for p in ours if p.kind == p.POSITIONAL_OR_KEYWORD]
    assert positional == theirs[: len(positional)], (target, positional, theirs)
    named = {p.name for p in ours if p.kind != p.VAR_KEYWORD}
    assert named <= set(theirs), (target, named, theirs)
    assert named == set(theirs) or any(p.kind == p.VAR_KEYWORD for p in ours), (target, named, theirs)
print("checked", len(install._originals))
"""


@pytest.mark.ci
def test_stand_ins_fit_the_installed_sglang():
    """Import and patch SGLang in a separate process, and compare the stand-ins' signatures with the originals'."""
    out = subprocess.run([sys.executable, "-c", REAL], capture_output=True, text=True, check=False)
    assert out.returncode == 0, out.stderr[-2000:]
    assert out.stdout.split()[-2:] == ["checked", "42"]
