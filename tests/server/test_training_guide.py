"""Commands of docs/training.md, run as written on the CPU: train a draft, serve it, and send a request."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from sglang_dflash.pairs.servers.ports import free_port
from sglang_dflash.pairs.servers.server import Server
from sglang_dflash.pairs.tiny import pairs as tiny
from sglang_dflash.train.loop import LOG, shown
from tests.fixtures import guide

pytestmark = [pytest.mark.full, pytest.mark.timeout(1800)]


@pytest.fixture(scope="module")
def trained(tmp_path_factory) -> tuple[Path, list[list[str]]]:
    """Run the guide's first two commands in a new folder; return the folder and the guide's further commands."""
    folder = tmp_path_factory.mktemp("guide")
    (folder / "sglang_dflash").symlink_to(guide.ROOT / "sglang_dflash")  # the guide's paths are relative
    chats, draft, *rest = guide.commands(guide.DOCS / "training.md")
    for command in (chats, draft):
        assert command[:2] == ["sglang-dflash", "train"]
        run = subprocess.run(guide.in_this_environment(command), cwd=folder, env=os.environ | tiny.ENV, check=False)
        assert run.returncode == 0
    return folder, rest


def test_the_page_has_the_numbers_of_its_command(trained):
    """Another kind of CPU rounds differently, so the numbers may differ a little."""
    folder, _ = trained
    found = guide.report_of(f"draft {shown(json.loads((folder / 'my-draft' / LOG).read_text().splitlines()[-1]))}")
    page = guide.report_of((guide.DOCS / "training.md").read_text())
    assert page.keys() == found.keys()
    for name, numbers in page.items():
        assert numbers == pytest.approx(found[name], rel=0.1, abs=0.05), name


@pytest.mark.parametrize("arm", [tiny.Arm.PLUGIN, tiny.Arm.STOCK])
def test_both_workers_serve_it(trained, arm):
    folder, (export, serve, curl, *_) = trained
    port = serve.index("--port")
    assert (export[0], serve[:3]) == ("export", ["python", "-m", "sglang.launch_server"])
    command = [sys.executable, *serve[1:port]]
    command[command.index("--model-path") + 1] = str(tiny.DENSE.target)
    command[command.index("--speculative-draft-model-path") + 1] = str(folder / "my-draft")
    env, log = tiny.ENV | tiny.environment(arm) | dict([export[1].split("=")]), folder / f"{arm}.log"
    with Server(command, port=free_port(31900), log=log, env=env, name=str(arm)) as server:
        tiny.require_worker(arm, server)
        ask = [word.replace("http://127.0.0.1:30000", server.url) for word in curl]
        answer = json.loads(subprocess.run(ask, capture_output=True, text=True, check=True).stdout)
    assert answer["meta_info"]["spec_accept_length"] > 2
