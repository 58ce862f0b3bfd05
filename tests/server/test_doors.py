"""Every way to start a server gives what `python -m sglang.launch_server` gives, or a refusal.

Programs that build `ServerArgs` themselves do not load plugins, and SGLang resolves such arguments before it loads
them. Widths above the block show whether the plugin's values were declared: without them SGLang reserves too few KV
slots, and answers are wrong. `test_engine.py` has the ways without an HTTP server.
"""

import json
import os
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from itertools import count
from pathlib import Path
from typing import Any

import psutil
import pytest
import yaml

from sglang_dflash.pairs.servers.errors import ServerError
from sglang_dflash.pairs.servers.ports import free_port
from sglang_dflash.pairs.servers.server import Server
from sglang_dflash.pairs.tiny import pairs as tiny
from sglang_dflash.pairs.tiny.pairs import Arm
from tests.server.lib.router import serves
from tests.server.lib.talk import tokens_of
from tests.server.lib.variants import TWO_NODES
from tests.server.test_disaggregation import PATIENCE, Two
from tests.server.test_parsers import CALLS, asked, streamed

pytestmark = pytest.mark.full
ROOT = Path(__file__).parents[2]
N_PROMPTS, N_NEW = 24, 48
FIELDS = {
    "model_path": str(tiny.DENSE.target), "speculative_algorithm": "DFLASH",
    "speculative_draft_model_path": str(tiny.DENSE.draft), "device": "cpu", "dtype": "float32",
    "attention_backend": "torch_native", "max_running_requests": 8, "max_total_tokens": 8192, "sleep_on_idle": True,
    "tool_call_parser": "qwen25", "reasoning_parser": "qwen3", "stream_interval": 40,
}  # fmt: skip
WIDE = {"SGLANG_DFLASH_WIDTHS": "1,32", "SGLANG_DFLASH_COPY": "on"}
PYTHON = sys.executable
REGISTERED_S = 600.0  # longest wait for both servers of a router


def flags(fields: dict[str, Any]) -> list[str]:
    """Return the command-line flags of `ServerArgs` fields."""
    named = {"--" + name.replace("_", "-"): value for name, value in fields.items()}
    return [word for name, value in named.items() for word in ([name] if value is True else [name, str(value)])]


def program(door: str, **fields: Any) -> Callable[[Path], list[str]]:
    """Return the command of a door of `lib/door.py`, given a folder."""
    return lambda folder: [PYTHON, "-m", "tests.server.lib.door", door, json.dumps(FIELDS | fields)]


def from_file(folder: Path) -> list[str]:
    """Return the launch command whose flags are in a YAML file. One has its older name."""
    fields = {name.replace("_", "-"): value for name, value in FIELDS.items()}
    file = folder / "flags.yaml"
    file.write_text(yaml.safe_dump(fields | {"mamba-scheduler-strategy": "auto"}))
    return [PYTHON, "-m", "sglang.launch_server", "--config", str(file)]


def with_router(folder: Path) -> list[str]:
    ports = ["--router-dp-worker-base-port", str(free_port(32300)), "--router-prometheus-port", str(free_port(29850))]
    return [PYTHON, "-m", "sglang_router.launch_server", *flags(FIELDS), "--dp-size", "2", *ports]


DOORS: dict[str, Callable[[Path], list[str]]] = {
    "launch": program("launch"),
    "child": program("child"),
    "process": program("process"),
    "runtime": program("runtime"),
    "workers": program("launch", tokenizer_worker_num=2),
    "dp": program("launch", dp_size=2),
    "config": from_file,
    "serve": lambda folder: [str(Path(PYTHON).with_name("sglang")), "serve", FIELDS["model_path"], *flags(FIELDS)[2:]],
    "router": with_router,
}
ENV = {
    "workers": {"SGLANG_UVICORN_WORKER_HEALTHCHECK_TIMEOUT": "300"},  # on few cores SGLang takes long to import
    "dp": dict(TWO_NODES),
    "router": dict(TWO_NODES),
}


def through(command: list[str], log: Path, **env: str) -> Server:
    """Return a server that `command` launches, not started."""
    path = os.pathsep.join(filter(None, [str(ROOT), os.environ.get("PYTHONPATH")]))
    return Server(command, port=free_port(31900), log=log, env=tiny.ENV | {"PYTHONPATH": path} | env, name=command[2])


@contextmanager
def ending_all(server: Server) -> Iterator[None]:
    """Kill the processes that a started server leaves. A router's servers are no members of its process group."""
    with server:
        others = psutil.Process(server.pid).children(recursive=True)
        try:
            yield
        finally:
            others += psutil.Process(server.pid).children(recursive=True)
            for process in filter(psutil.Process.is_running, others):
                process.kill()


@pytest.fixture(scope="module", params=DOORS)
def served(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    door = request.param
    folder = tmp_path_factory.mktemp("door")
    server = through(DOORS[door](folder), folder / "log", **WIDE, **ENV.get(door, {}))
    with ending_all(server):
        if door == "router":
            deadline = time.monotonic() + REGISTERED_S
            while server.log_text().count("fired up") < 2 or not serves(server):
                assert time.monotonic() < deadline, server.log_tail()
                time.sleep(0.5)
        tiny.require_worker(Arm.PLUGIN, server)
        yield server


@pytest.mark.parametrize("concurrency", [1, 8])
def test_answers_are_right(served: Server, questions: Callable, reference: Callable, concurrency: int) -> None:
    prompts = questions(N_PROMPTS, "dense")
    served.flush_cache()
    answers = served.generate_many(prompts, concurrency=concurrency, max_new_tokens=N_NEW)
    assert tokens_of(answers) == [reference(prompt, N_NEW, "dense") for prompt in prompts]


def test_requests_are_checked(served: Server) -> None:
    """SGLang's router itself refuses the second request, with status 422."""
    for fields, sampling in (({"input_ids": [5, 1024]}, {}), ({}, {"top_k": 2**31, "temperature": 1.0})):
        with pytest.raises(ServerError, match=r"answered (400: .*(1024|top_k)|422: .*top_k)"):
            served.generate([5, 6], fields=fields, max_new_tokens=4, **sampling)
    assert served.generate([5, 6], max_new_tokens=4).meta["completion_tokens"] == 4


def test_streamed_calls_are_whole(served: Server) -> None:
    assert streamed(served, asked(CALLS[-1])) == CALLS[-1]


def test_default_widths_are_right(tmp_path: Path, questions: Callable, reference: Callable) -> None:
    prompts = questions(N_PROMPTS, "dense")
    with through(program("launch")(tmp_path), tmp_path / "log") as server:
        tiny.require_worker(Arm.PLUGIN, server)
        for concurrency in (1, 8):
            answers = server.generate_many(prompts, concurrency=concurrency, max_new_tokens=N_NEW)
            assert tokens_of(answers) == [reference(prompt, N_NEW, "dense") for prompt in prompts]


def test_arguments_resolved_without_the_plugin_are_refused(tmp_path: Path) -> None:
    with (
        pytest.raises(
            ServerError, match=r"speculative_num_draft_tokens was resolved to 16 .* which needs 32: .*load_pl"
        ),
        through(program("resolved")(tmp_path), tmp_path / "log", **WIDE),
    ):
        pass


def test_prefill_and_decode_servers_are_right(tmp_path: Path, questions: Callable, reference: Callable) -> None:
    """Neither server copies n-grams, so no width exceeds the block. With `SGLANG_DFLASH_COPY=on` both are refused."""
    prompts, port = questions(N_PROMPTS, "dense"), free_port(32200)

    def started(mode: str) -> Server:
        command = program("launch", disaggregation_mode=mode, disaggregation_bootstrap_port=port)(tmp_path)
        return stack.enter_context(through(command, tmp_path / f"{mode}.log", **PATIENCE))

    with ExitStack() as stack:
        prefill, decode = started("prefill"), started("decode")
        two = Two(prefill, decode, port, count(1))
        for concurrency in (1, 8):
            answers = two.generate_many(prompts, concurrency=concurrency, max_new_tokens=N_NEW)
            assert tokens_of(answers) == [reference(prompt, N_NEW, "dense") for prompt in prompts]
        for server in (prefill, decode):
            with pytest.raises(ServerError, match=r"answered 400: .*1024"):
                server.generate([5, 1024], fields=two.meeting(10**6), max_new_tokens=4)
        assert two.generate(prompts[0], max_new_tokens=4).token_ids == reference(prompts[0], 4, "dense")
