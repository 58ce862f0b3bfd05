"""LoRA adapters of the target, and a draft without adapters: answers and steps equal those of the merged target."""

import base64
import json
import pickle
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from random import Random
from typing import Any, NamedTuple

import pytest
from safetensors.torch import load_file

from sglang_dflash.pairs.servers.server import Generation, Server
from sglang_dflash.pairs.tiny.pairs import Arm
from tests.server.conftest import PAIRS
from tests.server.lib import adapters
from tests.server.lib.adapters import Adapter
from tests.server.lib.oracle import Oracle, oracle
from tests.server.lib.rehearsals import FA3, GRAPHS, SM90
from tests.server.lib.talk import post, steps, tokens_of
from tests.server.lib.variants import RANDOM_WIDTHS, TRACK, TWO_NODES

pytestmark = pytest.mark.full

BASE = ""  # name of the base model, without an adapter
AT_START = ("calm", "wild")

Asked = list[tuple[str, list[int]]]  # an adapter's name, a prompt


class Kind(NamedTuple):
    target: str
    lora_backend: str = "torch_native"
    flags: tuple[str, ...] = ()
    env: tuple[tuple[str, str], ...] = ()
    n_prompts: int = 6
    max_new_tokens: int = 48

    @property
    def brief(self) -> bool:
        """True for kinds that skip tests which "dense" and "hybrid" cover."""
        return bool(self.env)


# Captured graphs read the adapter of each token row from static tensors, which differ between verify widths.
REHEARSED = {"flags": (*FA3, *GRAPHS), "env": SM90, "n_prompts": 1, "max_new_tokens": 16}
KINDS = {
    "dense": Kind("dense"),
    "dense-two-ranks": Kind("dense", flags=("--tp", "2"), env=TWO_NODES, n_prompts=3),
    "hybrid": Kind("hybrid", flags=TRACK),
    "dense-triton-graphs": Kind("dense", "triton", **REHEARSED),
    "hybrid-csgmv-graphs": Kind("hybrid", "csgmv", **REHEARSED),
}


class Serving(NamedTuple):
    kind: Kind
    known: dict[str, Adapter]
    prompts: list[list[int]]
    start: Callable[..., Server]  # starts another server of this kind
    server: Server

    def ask(self, server: Server, name: str, prompt: list[int]) -> Generation:
        return server.generate(prompt, fields={"lora_path": name or None}, max_new_tokens=self.kind.max_new_tokens)

    def ask_all(self, server: Server, asked: Asked, concurrency: int) -> list[Generation]:
        with ThreadPoolExecutor(concurrency) as clients:
            return list(clients.map(lambda pair: self.ask(server, *pair), asked))

    def shuffled(self, seed: int) -> Asked:
        """Return every prompt with every adapter and with the base model, in random order."""
        pairs = [(name, prompt) for name in (BASE, *AT_START) for prompt in self.prompts]
        return Random(seed).sample(pairs, len(pairs))

    def expert(self, name: str) -> Oracle:
        return oracle(self.known[name].merged if name else PAIRS[self.kind.target], None, None)

    def expected(self, name: str, prompt: list[int]) -> list[int]:
        return self.expert(name).continuation(prompt, self.kind.max_new_tokens)

    def expected_steps(self, name: str, prompt: list[int]) -> dict[int, int]:
        return self.expert(name).accepted_histogram(prompt, self.kind.max_new_tokens)


@pytest.fixture(scope="module", params=list(KINDS.values()), ids=list(KINDS))
def serving(
    request: pytest.FixtureRequest, pool: Any, questions: Callable, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Serving]:
    kind: Kind = request.param
    pair, modules = PAIRS[kind.target], adapters.MODULES[kind.target]
    folder = tmp_path_factory.mktemp("adapters")
    known = {name: adapters.write(name, pair, modules, folder) for name in adapters.RANKS}

    def start(arm: str = Arm.PLUGIN, env: dict[str, str] | None = None) -> Server:
        flags = adapters.flags({name: known[name] for name in AT_START}, kind.lora_backend)
        return pool.get(arm, target=kind.target, flags=(*flags, *kind.flags), env=dict(kind.env) | (env or {}))

    running = start()
    yield Serving(kind, known, questions(kind.n_prompts, kind.target, seed=50), start, running)
    pool.drop(running)


@pytest.fixture(autouse=True)
def empty_cache(serving: Serving) -> None:
    serving.server.flush_cache()


@pytest.mark.parametrize("concurrency", [1, 8])
def test_answers_and_steps_are_those_of_the_merged_target(serving: Serving, concurrency: int) -> None:
    """In a batch with several adapters, all slots of a request's block must use the request's adapter."""
    asked = serving.shuffled(seed=concurrency)
    answers = serving.ask_all(serving.server, asked, concurrency)
    assert tokens_of(answers) == [serving.expected(*pair) for pair in asked]
    assert list(map(steps, answers)) == [serving.expected_steps(*pair) for pair in asked]


def test_a_prefix_is_found_under_its_own_adapter_only(serving: Serving) -> None:
    """The draft's context K/V, cached with the target's, depend on the adapter too."""
    prompt = [token for prompt in serving.prompts * 6 for token in prompt][:120]
    found = []
    for name in (BASE, *AT_START) * 2:
        answer = serving.ask(serving.server, name, prompt)
        found.append(answer.meta["cached_tokens"] > 0)
        assert answer.token_ids == serving.expected(name, prompt)
        assert steps(answer) == serving.expected_steps(name, prompt), name or "base"
    assert found == [False] * 3 + [True] * 3


def test_adapters_change_answers_and_drafts_are_still_accepted(serving: Serving) -> None:
    """Adapters must change answers, or the tests above cannot fail.

    The draft was trained for the base model, so fewer drafts are accepted with an adapter.
    """
    if serving.kind.brief:
        pytest.skip("too few answers")
    answered = {
        name: [serving.ask(serving.server, name, prompt) for prompt in serving.prompts] for name in (BASE, *AT_START)
    }
    assert len({tuple(tuple(answer.token_ids) for answer in answers) for answers in answered.values()}) == len(answered)
    per_step = {
        name: sum(len(a.token_ids) for a in answers) / sum(a.meta["spec_verify_ct"] for a in answers)
        for name, answers in answered.items()
    }
    assert per_step[BASE] > per_step["wild"] > 1.2, per_step


def test_adapters_come_and_go_while_others_are_served(serving: Serving) -> None:
    if serving.kind.brief:
        pytest.skip("shown by another kind")
    server, prompt, asked = serving.server, serving.prompts[2], serving.shuffled(seed=3)
    load = {"lora_name": "late", "lora_path": str(serving.known["late"].path)}
    with ThreadPoolExecutor(1) as clients:
        meanwhile = clients.submit(serving.ask_all, server, asked, 4)
        for _ in range(2):
            assert post(server, "/load_lora_adapter", load).status_code == 200
            assert serving.ask(server, "late", prompt).token_ids == serving.expected("late", prompt)
            assert post(server, "/unload_lora_adapter", {"lora_name": "late"}).status_code == 200
    assert tokens_of(meanwhile.result()) == [serving.expected(*pair) for pair in asked]


def test_an_adapter_may_be_pushed_as_tensors(serving: Serving) -> None:
    if serving.kind.brief:
        pytest.skip("shown by another kind")
    folder, server = serving.known["late"].path, serving.server
    tensors = load_file(folder / "adapter_model.safetensors")
    adapter = {
        "config_dict": json.loads((folder / "adapter_config.json").read_text()),
        "serialized_named_tensors": [base64.b64encode(pickle.dumps(tensors)).decode()],
    }
    assert post(server, "/load_lora_adapter_from_tensors", {"lora_name": "pushed"} | adapter).status_code == 200
    for prompt in serving.prompts[:3]:
        answer = serving.ask(server, "pushed", prompt)
        assert answer.token_ids == serving.expected("late", prompt)
        assert steps(answer) == serving.expected_steps("late", prompt)
    assert post(server, "/unload_lora_adapter", {"lora_name": "pushed"}).status_code == 200


def test_widths_may_change_at_random(serving: Serving, pool: Any) -> None:
    server, asked = serving.start(env=dict(RANDOM_WIDTHS)), serving.shuffled(seed=4)
    answers = serving.ask_all(server, asked, 8)
    pool.drop(server)
    assert tokens_of(answers) == [serving.expected(*pair) for pair in asked]


@pytest.mark.parametrize("arm", [Arm.OFF, Arm.STOCK])
def test_other_workers_give_the_same_answers(serving: Serving, pool: Any, arm: Arm) -> None:
    """Compare with no speculation and with SGLang's own worker, whose steps must be equal too."""
    if serving.kind.brief:
        pytest.skip("shown by another kind")
    server, asked = serving.start(arm), serving.shuffled(seed=5)
    theirs = serving.ask_all(server, asked, 8)
    pool.drop(server)
    ours = serving.ask_all(serving.server, asked, 8)
    assert tokens_of(theirs) == tokens_of(ours)
    if arm is Arm.STOCK:
        assert list(map(steps, theirs)) == list(map(steps, ours))


@pytest.mark.parametrize("end", ["embed_tokens", "lm_head"])
def test_adapter_of_a_borrowed_layer_leaves_the_draft_unchanged(
    serving: Serving, pool: Any, tmp_path: Path, end: str
) -> None:
    """An adapter of the embedding or head applies to the target alone; the draft uses the base model's layers.

    In a prefill batch, SGLang applies the head adapter of another request to some prompts, also without speculation.
    So prompts are sent one by one if the adapter changes the head.
    """
    if serving.kind is not KINDS["dense"]:
        pytest.skip("one server shows it")
    modules = (end, *adapters.MODULES["dense"])
    known = {"wild": adapters.write("wild", PAIRS["dense"], modules, tmp_path)}
    server = pool.get(target="dense", flags=adapters.flags(known))
    asked = [(name, prompt) for name in (BASE, "wild") for prompt in serving.prompts]
    answers = serving.ask_all(server, asked, 1 if end == "lm_head" else 8)
    pool.drop(server)
    experts = {BASE: serving.expert(BASE), "wild": Oracle(known["wild"].merged, None, None)}
    expected = [experts[name].continuation(prompt, serving.kind.max_new_tokens) for name, prompt in asked]
    assert tokens_of(answers) == expected
