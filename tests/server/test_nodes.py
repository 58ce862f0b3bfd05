"""One model over two nodes: equal nodes answer like Transformers, and nodes that differ end with one sentence."""

import re
import shutil
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from pathlib import Path

import pytest
from safetensors.torch import load_file, save_file

from sglang_dflash.engine.host.agreement import WAIT_S
from sglang_dflash.pairs.servers.arms import ANNOUNCEMENT
from sglang_dflash.pairs.servers.ports import HOST, free_port
from sglang_dflash.pairs.servers.server import Server
from sglang_dflash.pairs.tiny import pairs as tiny
from sglang_dflash.pairs.tiny.pairs import Arm, Pair
from tests.server.conftest import KIND_FLAGS, PAIRS, require_nothing_lost
from tests.server.lib.forked import make_server
from tests.server.lib.talk import tokens_of
from tests.server.lib.variants import TWO_NODES

pytestmark = pytest.mark.full
N_PROMPTS, MAX_NEW_TOKENS = 24, 48
PORTS = (31700, 31800, 31850)  # first ports to try for node 0, for node 1, and for their rendezvous
END_S = 300.0  # longest time until nodes have ended, without a wait for a missing rank


@contextmanager
def nodes(folder: Path, target: str, env_1: Mapping[str, str], pair_1: Pair | None = None) -> Iterator[list[Server]]:
    """Start two nodes, and do not wait until they are ready. `env_1` and `pair_1` apply to node 1 only."""
    address = f"{HOST}:{free_port(PORTS[2])}"
    across = ("--tp-size", "2", "--nnodes", "2", "--dist-init-addr", address, *KIND_FLAGS[target])
    with ExitStack() as stack:
        found = list[Server]()
        for rank, (pair, env) in enumerate([(PAIRS[target], {}), (pair_1 or PAIRS[target], env_1)]):
            node = make_server(
                tiny.command(Arm.PLUGIN, pair, *tiny.FLAGS, *across, "--node-rank", str(rank)),
                port=free_port(PORTS[rank]),
                log=folder / f"node-{rank}.log",
                env=tiny.ENV | dict(TWO_NODES) | {"SGLANG_DFLASH_WIDTHS": "auto"} | dict(env),
                name=f"node {rank}",
            )
            stack.callback(node.stop)
            node.start()
            found.append(node)
        yield found


@pytest.mark.parametrize("target", list(PAIRS))
def test_equal_nodes_answer_like_one(target: str, questions: Callable, reference: Callable, tmp_path: Path) -> None:
    prompts = questions(N_PROMPTS, target)
    expected = [reference(prompt, MAX_NEW_TOKENS, target) for prompt in prompts]
    with nodes(tmp_path, target, {}) as pair:
        for node in pair:
            node.wait_ready()
        for concurrency in (1, 8):
            pair[0].flush_cache()
            answers = pair[0].generate_many(prompts, concurrency=concurrency, max_new_tokens=MAX_NEW_TOKENS)
            assert tokens_of(answers) == expected
            n_steps = sum(answer.meta["spec_verify_ct"] for answer in answers)
            assert sum(map(len, expected)) / n_steps > 2
        require_nothing_lost(pair[0])


@pytest.fixture
def another_draft(tmp_path: Path) -> Pair:
    """Return the dense pair with a copy of the draft, in which one tensor of the last layer differs."""
    draft = Path(shutil.copytree(tiny.DENSE.draft, tmp_path / "draft"))
    tensors = load_file(draft / "model.safetensors")
    tensors["layers.1.mlp.down_proj.weight"] *= 2
    save_file(tensors, draft / "model.safetensors", metadata={"format": "pt"})
    return tiny.DENSE._replace(draft=draft)


VARIABLES = {
    "SGLANG_DFLASH_WIDTHS": ("auto", "1,8"),
    "SGLANG_DFLASH_COPY": ("auto", "off"),
    "SGLANG_DFLASH_WORKER": ("plugin", "stock"),
}


@pytest.mark.parametrize("name", VARIABLES)
def test_nodes_with_other_variables_end_with_one_sentence(name: str, tmp_path: Path) -> None:
    here, there = VARIABLES[name]
    with nodes(tmp_path, "dense", {name: there}) as pair:
        require_end(pair, f"{name} is {here} on rank 0 and {there} on rank 1; set it alike on all nodes")


def test_nodes_with_other_drafts_end_with_one_sentence(another_draft: Pair, tmp_path: Path) -> None:
    digests = r"the digest of the draft's files is \w{16} on rank 0 and \w{16} on rank 1; give all nodes the same draft"
    with nodes(tmp_path, "dense", {}, another_draft) as pair:
        require_end(pair, digests)


def test_a_node_without_the_plugin_ends_both(tmp_path: Path) -> None:
    """Node 1 has only the CPU platform, so its worker is SGLang's and compares nothing. Only node 0 can name this."""
    with nodes(tmp_path, "dense", {"SGLANG_PLUGINS": "sglang_dflash_cpu", "SGLANG_DFLASH_WORKER": "stock"}) as pair:
        missing = r"not all 2 ranks of the model compared their settings within \d+ s; install sglang-dflash \S+ on all"
        require_end(pair[:1], missing, WAIT_S)
        require_end(pair[1:], "there are other ranks that didn't finish loading")  # SGLang's message


def require_end(servers: list[Server], sentence: str, wait_s: float = 0.0) -> None:
    """Wait until all nodes have ended. Each log must have `sentence`, a regular expression, and no served draft."""
    deadline = time.monotonic() + END_S + wait_s
    while any(node.running for node in servers):
        assert time.monotonic() < deadline, [node.log_tail() for node in servers if node.running]
        time.sleep(0.5)
    for node in servers:
        assert re.search(sentence, node.log_text()), node.log_tail()
        assert ANNOUNCEMENT not in node.log_text()
