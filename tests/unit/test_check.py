"""The report before a launch: its lines, its exit status, and the profiles in env/."""

import json
import os
import shlex
import subprocess
from pathlib import Path
from typing import Any

import pytest

from sglang_dflash import flags
from sglang_dflash.flags import Worker
from sglang_dflash.host.backends import Needs, resolve

ENV = Path(__file__).parents[2] / "env"
CPU = (
    "--model-path {target} --device cpu --attention-backend torch_native --speculative-algorithm DFLASH "
    "--speculative-draft-model-path {draft} --max-total-tokens 1024"
)


def check(launch: Any, *argv: str, env: dict[str, str] | None = None) -> tuple[int, dict[str, Any]]:
    """Exit status, and name -> finding."""
    ended = launch("sglang_dflash.check", "--json", *argv, env=env, timeout_s=300)
    assert ended.out, ended.err
    document = json.loads(ended.out.splitlines()[-1])
    assert document["ok"] is (ended.code == 0)
    return ended.code, {finding["name"]: finding for finding in document["checks"]}


def test_a_good_installation_and_launch(launch: Any, pair: dict[str, str]) -> None:
    code, found = check(launch, *CPU.format(target=pair["hybrid"], draft=pair["draft"]).split())
    assert code == 0, found
    assert found["plugin"]["text"] == "our worker serves DFLASH"
    assert found["platform"]["text"] == "CpuPlatform, device cpu"
    assert "sglang 0.5.23" in found["versions"]["text"]
    assert "block_size=8" in found["launch"]["text"]
    assert "draft_attention_backend=torch_native" in found["launch"]["text"]


def test_a_bad_launch_is_the_one_line_that_fails(launch: Any, pair: dict[str, str]) -> None:
    line = CPU.format(target=pair["dense"], draft=pair["draft"]) + " --speculative-num-draft-tokens 16"
    code, found = check(launch, *line.split())
    assert code == 1
    assert [name for name, finding in found.items() if not finding["ok"]] == ["launch"]
    assert found["launch"]["text"].startswith("block size 16 is not within 2..8")


def test_an_excluded_plugin_is_noticed(launch: Any) -> None:
    code, found = check(launch, env={"SGLANG_PLUGINS": "another"})
    assert code == 1
    assert "SGLANG_PLUGINS or SGLANG_PLATFORM leaves it out" in found["plugin"]["text"]


def test_the_stock_worker_is_named(launch: Any) -> None:
    code, found = check(launch, env={"SGLANG_PLUGINS": "another", "SGLANG_DFLASH_WORKER": "stock"})
    assert code == 0
    assert found["plugin"]["text"] == "SGLANG_DFLASH_WORKER=stock: SGLang's built-in worker serves DFLASH"


def test_flags_that_do_not_ask_for_dflash(launch: Any, pair: dict[str, str]) -> None:
    line = f"--model-path {pair['dense']} --device cpu --attention-backend torch_native --max-total-tokens 1024"
    code, found = check(launch, *line.split())
    assert code == 1
    assert "add --speculative-algorithm DFLASH" in found["launch"]["text"]


def test_as_text(launch: Any) -> None:
    ended = launch("sglang_dflash.check", env={"SGLANG_DFLASH_WORKER": "ours"}, timeout_s=300)
    assert ended.code == 1
    lines = ended.out.splitlines()
    assert any(line.startswith("ok    entry points") for line in lines)
    assert any(line.startswith("FAIL  environment    SGLANG_DFLASH_WORKER='ours' is not one of") for line in lines)


def source(profile: Path) -> dict[str, str]:
    """The environment after sourcing a profile."""
    command = f"set -eu; source {shlex.quote(str(profile))}; env -0"
    out = subprocess.run(["bash", "-c", command], env={"PATH": os.environ["PATH"]}, capture_output=True, check=True)
    return dict(line.split("=", 1) for line in out.stdout.decode().split("\0") if line)


@pytest.mark.parametrize("profile", sorted(ENV.glob("*.sh")), ids=lambda path: path.stem)
def test_profiles_set_flags_that_exist(profile: Path) -> None:
    expected = Worker.STOCK if profile.stem == "stock" else Worker.PLUGIN
    assert flags.read(source(profile)).worker is expected
    assert f"| `{profile.name}` |" in (ENV / "README.md").read_text()


@pytest.mark.parametrize(
    ("profile", "device", "backend"),
    [("cpu", "cpu", "torch_native"), ("hopper", "sm90", "fa3"), ("blackwell", "sm100", "fa4")],
)
def test_a_profile_s_backends_run_the_draft(profile: str, device: str, backend: str) -> None:
    given = source(ENV / f"{profile}.sh")["DFLASH_FLAGS"].split()
    named = dict(zip(given[::2], given[1::2], strict=True))
    chosen = resolve(
        asked=named.get("--speculative-draft-attention-backend"),
        target=named["--attention-backend"],
        needs=Needs(whole_blocks=True, device=device, page_size=64),
    )
    assert chosen == backend
