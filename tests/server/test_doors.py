"""Programs that build `ServerArgs` themselves get what `python -m sglang.launch_server` gives, or a refusal.

SGLang resolves such arguments before it loads plugins. Widths above the block show whether the plugin's values were
declared: without them SGLang reserves too few KV slots, and answers are wrong.
"""

import json
import os
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from sglang_dflash.servers.errors import ServerError
from sglang_dflash.servers.ports import free_port
from sglang_dflash.servers.server import Server
from sglang_dflash.tiny import pairs as tiny
from sglang_dflash.tiny.pairs import Arm
from tests.server.lib.talk import tokens_of
from tests.server.test_parsers import CALLS, asked, streamed

ROOT = Path(__file__).parents[2]
N_PROMPTS, N_NEW = 24, 48
FIELDS = {
    "model_path": str(tiny.DENSE.target), "speculative_algorithm": "DFLASH",
    "speculative_draft_model_path": str(tiny.DENSE.draft), "device": "cpu", "dtype": "float32",
    "attention_backend": "torch_native", "max_running_requests": 8, "max_total_tokens": 8192, "sleep_on_idle": True,
    "tool_call_parser": "qwen25", "reasoning_parser": "qwen3", "stream_interval": 40,
}  # fmt: skip
WIDE = {"SGLANG_DFLASH_WIDTHS": "1,32", "SGLANG_DFLASH_COPY": "on"}


def through(door: str, log: Path, **fields: object) -> Server:
    """Return a server that a program launches through `door`, not started."""
    command = [sys.executable, "-m", "tests.server.lib.door", door, json.dumps(FIELDS | fields)]
    path = os.pathsep.join(filter(None, [str(ROOT), os.environ.get("PYTHONPATH")]))
    return Server(command, port=free_port(31900), log=log, env=tiny.ENV | WIDE | {"PYTHONPATH": path}, name=door)


@pytest.fixture(scope="module", params=["launch", "child", "process"])
def served(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    with through(request.param, tmp_path_factory.mktemp("door") / "log") as server:
        tiny.require_worker(Arm.PLUGIN, server)
        yield server


@pytest.mark.full
@pytest.mark.parametrize("concurrency", [1, 8])
def test_answers_are_right(served: Server, questions: Callable, reference: Callable, concurrency: int) -> None:
    prompts = questions(N_PROMPTS, "dense")
    served.flush_cache()
    answers = served.generate_many(prompts, concurrency=concurrency, max_new_tokens=N_NEW)
    assert tokens_of(answers) == [reference(prompt, N_NEW, "dense") for prompt in prompts]


@pytest.mark.full
def test_requests_are_checked(served: Server) -> None:
    for fields, sampling in (({"input_ids": [5, 1024]}, {}), ({}, {"top_k": 2**31, "temperature": 1.0})):
        with pytest.raises(ServerError, match=r"answered 400: .*(1024|top_k)"):
            served.generate([5, 6], fields=fields, max_new_tokens=4, **sampling)
    assert served.generate([5, 6], max_new_tokens=4).meta["completion_tokens"] == 4


@pytest.mark.full
def test_streamed_calls_are_whole(served: Server) -> None:
    assert streamed(served, asked(CALLS[-1])) == CALLS[-1]


@pytest.mark.full
def test_arguments_resolved_without_the_plugin_are_refused(tmp_path: Path) -> None:
    with (
        pytest.raises(
            ServerError, match=r"speculative_num_draft_tokens was resolved to 16 .* which needs 32: .*load_pl"
        ),
        through("resolved", tmp_path / "log"),
    ):
        pass
