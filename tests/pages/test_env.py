"""Files of `env/`: a profile sets only variables that this plugin, SGLang or torch reads, and flags that SGLang parses.

Constraints are pins (`name==version`). The Dockerfile copies what it installs. Neither the constraints nor the
Dockerfile names a package index.
"""

import json
import re
import subprocess
from pathlib import Path
from typing import Any

import pytest

from sglang_dflash import flags
from tests.fixtures import guide

ENV = Path(__file__).parents[2] / "env"
PROFILES = sorted(ENV.glob("*.sh"))
OF_TORCH = {"CUDA_VISIBLE_DEVICES", "OMP_NUM_THREADS"}


def sourced(*profiles: Path, **before: str) -> dict[str, str]:
    """Return the variables after sourcing the profiles, without those that the shell sets itself."""
    script = "set -eu; " + "".join(f"source {profile}; " for profile in profiles) + "env -0"
    environ = {"PATH": "/usr/bin:/bin", "_": ""} | before
    out = subprocess.run(["bash", "-c", script], env=environ, capture_output=True, text=True, check=True).stdout
    after = dict(line.split("=", 1) for line in out.split("\0") if line)
    return {name: value for name, value in after.items() if name not in {"PATH", "_", "PWD", "SHLVL"}}


@pytest.mark.parametrize("profile", PROFILES, ids=lambda path: path.name)
def test_variables_of_a_profile_exist_and_have_valid_values(profile: Path) -> None:
    found = sourced(profile)
    known = {flag.name for flag in flags.FLAGS} | guide.variables_of_sglang() | OF_TORCH | {"DFLASH_FLAGS"}
    assert found
    assert not set(found) - known
    flags.read(found)


@pytest.mark.parametrize("profile", [path for path in PROFILES if path.name != "stock.sh"], ids=lambda path: path.name)
def test_the_flags_of_a_profile_parse(profile: Path, launch: Any, pair: dict[str, str]) -> None:
    words = sourced(profile)["DFLASH_FLAGS"].split()
    given = {
        name.removeprefix("--").replace("-", "_"): value for name, value in zip(words[::2], words[1::2], strict=True)
    }
    ended = launch("parse", "--model-path", pair["dense"], *words, env={"FIELDS": json.dumps(list(given))})
    assert ended.code == 0, ended.err
    assert json.loads(ended.out.splitlines()[-1])["fields"] == given


def test_worker_is_the_plugin_unless_chosen_before_or_after() -> None:
    hopper, stock = ENV / "hopper.sh", ENV / "stock.sh"
    assert sourced(hopper)["SGLANG_DFLASH_WORKER"] == "plugin"
    assert sourced(hopper, SGLANG_DFLASH_WORKER="stock")["SGLANG_DFLASH_WORKER"] == "stock"
    for order in ((hopper, stock), (stock, hopper)):
        assert sourced(*order)["SGLANG_DFLASH_WORKER"] == "stock"


def test_the_readme_names_every_file() -> None:
    readme = (ENV / "README.md").read_text()
    assert not [path.name for path in ENV.iterdir() if path.name != "README.md" and f"`{path.name}`" not in readme]


@pytest.mark.parametrize("name", ["Dockerfile", "constraints.txt"])
def test_no_package_index_is_named(name: str) -> None:
    assert not re.search(r"https?:|index-url|find-links|trusted-host", (ENV / name).read_text())


def test_constraints_are_pins_and_agree_with_the_package() -> None:
    lines = [line for line in (ENV / "constraints.txt").read_text().splitlines() if not line.startswith("#")]
    assert all(re.fullmatch(r"[a-z0-9-]+==[A-Za-z0-9.]+", line) for line in lines)
    pinned = dict(line.split("==") for line in lines)
    asked = re.search(r'"sglang==([0-9.]+);', (ENV.parent / "pyproject.toml").read_text())
    assert asked is not None
    assert pinned["sglang"] == asked[1]


def test_the_image_copies_what_it_installs() -> None:
    copied = re.findall(r"^COPY (.*) \S+$", (ENV / "Dockerfile").read_text(), re.MULTILINE)
    sources = {word for line in copied for word in line.split()}
    assert all((ENV.parent / source).exists() for source in sources)
    assert {"pyproject.toml", "README.md", "LICENSE", "sglang_dflash", "kernels"} == sources
