"""Scripts launch/serve_tiny*_cpu.sh start the same servers as the demo, the benchmark and the tests."""

import re
import shlex
import subprocess

import pytest

from sglang_dflash.pairs.tiny import pairs as tiny
from sglang_dflash.pairs.tiny.pairs import Arm
from tests.fixtures.guide import ROOT


@pytest.mark.parametrize(
    ("name", "pair", "flags"), [("tiny", tiny.HYBRID, tiny.HYBRID_FLAGS), ("tiny_dense", tiny.DENSE, ())]
)
def test_tiny_recipes_start_the_servers_of_the_programs(name: str, pair: tiny.Pair, flags: tuple[str, ...]) -> None:
    recipe = ROOT / "launch" / f"serve_{name}_cpu.sh"
    assert subprocess.run(["bash", "-n", recipe], check=False).returncode == 0
    script = recipe.read_text().replace("\\\n", " ")
    words = shlex.split(re.search(r"^exec .venv/bin/python (.*) --port 30000", script, re.MULTILINE)[1])
    command = [word.removeprefix(f"{ROOT}/") for word in tiny.command(Arm.PLUGIN, pair, *tiny.FLAGS, *flags)]
    assert words == command[1:]
    exported = shlex.split(re.search(r"^export (.*)$", script, re.MULTILINE)[1])
    assert dict(word.split("=", 1) for word in exported) == {
        k: v for k, v in tiny.ENV.items() if k != "PYTHONUNBUFFERED"
    }
