"""`--enable-memory-saver`: the GPU's memory is released and resumed between rollouts, as RL frameworks do.

The emulated memory saver overwrites released memory. It raises an error if large tensors of this package would stay.
"""

import re
import time
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
from safetensors.torch import load_file

from sglang_dflash.pairs.servers.server import Server
from sglang_dflash.pairs.tiny.pairs import DENSE
from tests.fixtures.kinds import write_kind
from tests.server.conftest import PAIRS
from tests.server.lib.oracle import Oracle, oracle
from tests.server.lib.rehearsals import FA3, GRAPHS, RANDOM_WIDTHS, SM90, STREAMS, TWO_RANKS
from tests.server.lib.talk import post, push, steps, stream, tokens_of
from tests.server.lib.variants import TRACK, VARIANTS, window

N_PROMPTS, MAX_NEW_TOKENS, N_ROUNDS = 4, 48, 5
GROWTH = 2**26  # bytes that the scheduler's process may gain after its second round
TAGS = ("kv_cache", "weights", "cuda_graph")
KEPT = ("--enable-memory-saver", "--enable-weights-cpu-backup")
DRAFT_KEPT = ("--enable-memory-saver", "--enable-draft-weights-cpu-backup")
GRAPH_MEMORY = (("SGLANG_MEMORY_SAVER_CUDA_GRAPH", "1"),)  # without it SGLang's tag `cuda_graph` releases nothing

OPTIONS: tuple[dict[str, Any], ...] = ({"temperature": 1.0, "min_p": 0.1}, {"frequency_penalty": 1.0})


class Row(NamedTuple):
    flags: tuple[str, ...]
    env: tuple[tuple[str, str], ...] = SM90 + GRAPH_MEMORY
    target: str = "hybrid"
    draft_window: int | None = None
    knows_steps: bool = True  # steps are compared with the PyTorch reference
    varies: bool = False  # verify widths are random


ROWS = {
    "hybrid": Row((*FA3, *GRAPHS, *TRACK)),
    "dense": Row((*FA3, *GRAPHS), target="dense"),
    "window": Row((*FA3, *GRAPHS, *TRACK, *window(64)), draft_window=64),
    "two ranks": Row((*FA3, *GRAPHS, *TRACK, "--tp-size", "2"), TWO_RANKS + GRAPH_MEMORY),
    "streams": Row((*FA3, *GRAPHS, *TRACK), STREAMS + GRAPH_MEMORY),
    "graphs kept": Row((*FA3, *GRAPHS), env=SM90),
    "fp8 head": Row((*FA3, *GRAPHS), SM90 + GRAPH_MEMORY + (("SGLANG_DFLASH_DRAFT_HEAD", "fp8"),), knows_steps=False),
    "widths and copies": Row(
        (*FA3, *GRAPHS, *TRACK), SM90 + GRAPH_MEMORY + RANDOM_WIDTHS + (("SGLANG_DFLASH_COPY", "on"),),
        knows_steps=False, varies=True,
    ),
}  # fmt: skip


def release(server: Server, *tags: str) -> None:
    assert post(server, "/release_memory_occupation", {"tags": list(tags)}).status_code == 200


def resume(server: Server, *tags: str) -> None:
    assert post(server, "/resume_memory_occupation", {"tags": list(tags)}).status_code == 200


def released(server: Server) -> list[tuple[str, ...]]:
    """Return what each release gave back: bytes, tag, and bytes with a copy on the host."""
    found = re.findall(r"memory saver: released (\d+) bytes \(.*?\) of (\w+), (\d+) bytes", server.log_text())
    assert found
    return found


def scheduler_bytes(server: Server) -> int:
    return max(process.memory_info().rss for process in server.processes())


def rows(*in_ci: str) -> list[Any]:
    """Return the names of `ROWS`; those outside `in_ci` only run in `make test-full`."""
    return [name if name in in_ci else pytest.param(name, marks=pytest.mark.full) for name in ROWS]


def start(pool: Any, row: Row, flags: tuple[str, ...]) -> Server:
    return pool.get(target=row.target, flags=(*flags, *row.flags), env=dict(row.env))


def require_no_growth(server: Server, n_bytes: list[int]) -> None:
    """Require that each round released the same bytes on all ranks, and that a scheduler's memory did not grow."""
    found = released(server)
    n = len(found) // N_ROUNDS
    rounds = [sorted(found[i : i + n]) for i in range(0, len(found), n)]
    assert n % len(TAGS) == 0
    assert rounds == rounds[:1] * N_ROUNDS
    assert n_bytes[-1] < n_bytes[1] + GROWTH


@pytest.mark.parametrize("name", rows("hybrid"))
def test_answers_and_steps_stay(name: str, pool: Any, questions: Callable, reference: Callable) -> None:
    row = ROWS[name]
    server = start(pool, row, KEPT)
    prompts, n_bytes = questions(N_PROMPTS, row.target, seed=31), []
    expected = [reference(prompt, MAX_NEW_TOKENS, row.target) for prompt in prompts]
    expert = oracle(PAIRS[row.target], None, row.draft_window)
    wanted = [expert.accepted_histogram(prompt, MAX_NEW_TOKENS) for prompt in prompts] if row.knows_steps else None

    def ask(concurrency: int) -> list[dict[int, int]]:
        """Return the steps of right answers."""
        answers = server.generate_many(prompts, concurrency=concurrency, max_new_tokens=MAX_NEW_TOKENS)
        assert tokens_of(answers) == expected
        return list(map(steps, answers))

    before = ask(1)
    assert before == (wanted or before)
    for options in OPTIONS:  # memory that some requests need is released too
        server.generate(prompts[0], max_new_tokens=8, fields={"return_logprob": True}, **options)
    for _ in range(N_ROUNDS):
        release(server, *TAGS)
        resume(server, *TAGS)
        for concurrency in (1, 3):  # a graph captured for 4 requests runs 3
            assert ask(concurrency) == before or row.varies
        n_bytes.append(scheduler_bytes(server))
    require_no_growth(server, n_bytes)
    pool.drop(server)


def test_a_cpu_releases_nothing(server: Callable, questions: Callable) -> None:
    """Without CUDA `torch_memory_saver` itself would end every process that SGLang starts."""
    kept, prompts = server(flags=(*DRAFT_KEPT, *VARIANTS["hybrid"].flags)), questions(2, seed=35)
    before = kept.generate_many(prompts, concurrency=1, max_new_tokens=MAX_NEW_TOKENS)
    release(kept, *TAGS)
    resume(kept, *TAGS)
    after = kept.generate_many(prompts, concurrency=1, max_new_tokens=MAX_NEW_TOKENS)
    assert tokens_of(after) == tokens_of(before)
    assert list(map(steps, after)) == list(map(steps, before))


def changed(tensors: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """Return the tensors with noise added to matrices."""
    torch.manual_seed(2)
    return {
        name: tensor + 0.1 * tensor.std() * torch.randn_like(tensor) if tensor.ndim == 2 else tensor
        for name, tensor in tensors.items()
    }


@pytest.mark.full
@pytest.mark.parametrize("target", ["hybrid", "dense"])
def test_a_trainer_pushes_weights_between_rollouts(target: str, pool: Any, questions: Callable) -> None:
    """Play the cycle of RL frameworks five times, with new weights and the old ones by turns.

    Only the draft's weights have a copy. The KV cache is resumed after the push, when the trainer's memory is free.
    """
    server, pair = start(pool, ROWS[target], DRAFT_KEPT), PAIRS[target]
    prompts, n_bytes = questions(N_PROMPTS, target, seed=32), []
    old = [{name: t.float() for name, t in load_file(path / "model.safetensors").items()} for path in pair]
    weights = [changed(old[0]), changed(old[1])], old
    experts = Oracle(pair, None, None), oracle(pair, None, None)
    for model, tensors in zip((experts[0].target, experts[0].draft), weights[0], strict=True):
        assert not model.load_state_dict(tensors, strict=False).unexpected_keys
    expected = [expert.expect(prompts, MAX_NEW_TOKENS) for expert in experts]
    assert expected[0].token_ids != expected[1].token_ids
    expected[1].require_from(server, concurrency=1)
    for i in range(N_ROUNDS):
        release(server, *TAGS)
        resume(server, "weights", "cuda_graph")
        for tensors, selector in zip(weights[i % 2], ("target", "draft"), strict=True):
            assert push(server, tensors, selector=selector).status_code == 200
        resume(server, "kv_cache")
        server.flush_cache()
        for concurrency in (1, 3):
            expected[i % 2].require_from(server, concurrency)
        n_bytes.append(scheduler_bytes(server))
    require_no_growth(server, n_bytes)
    pool.drop(server)


@pytest.mark.full
@pytest.mark.parametrize("kind", ["reduced", "laguna"])
def test_another_kind_of_draft_is_kept(kind: str, pool: Any, questions: Callable, tmp_path: Path) -> None:
    """A reduced vocabulary has a copy of the head's rows. It follows the target's weights, which are pushed."""
    prompts = questions(N_PROMPTS, "dense", seed=36)
    pair = write_kind(kind, DENSE, prompts, tmp_path / kind)
    expected = Oracle(pair, None, None).expect(prompts, MAX_NEW_TOKENS)
    server = pool.get(target=kind, pair=pair, flags=(*DRAFT_KEPT, *FA3, *GRAPHS), env=dict(SM90 + GRAPH_MEMORY))
    expected.require_from(server, concurrency=1)
    for _ in range(2):
        release(server, *TAGS)
        resume(server, *TAGS)
        assert push(server, load_file(DENSE.target / "model.safetensors")).status_code == 200
        for concurrency in (1, 3):
            expected.require_from(server, concurrency)
    pool.drop(server)


@pytest.mark.full
def test_the_draft_is_kept_without_a_push(pool: Any, questions: Callable) -> None:
    """Frameworks push the target's weights only."""
    server, target = start(pool, ROWS["hybrid"], DRAFT_KEPT), load_file(PAIRS["hybrid"].target / "model.safetensors")
    expected = oracle(PAIRS["hybrid"], None, None).expect(questions(N_PROMPTS, "hybrid", seed=33), MAX_NEW_TOKENS)
    release(server, "kv_cache", "weights")
    resume(server, "weights", "kv_cache")
    assert push(server, target).status_code == 200
    expected.require_from(server, concurrency=1)
    pool.drop(server)


@pytest.mark.full
def test_paused_requests_continue_after_a_resume(pool: Any, questions: Callable) -> None:
    """Requests that a pause has retracted keep no KV cache, and new ones wait. A resume serves both.

    Counts for penalties are among the memory that the resumed requests need again.
    """
    server, prompts = start(pool, ROWS["hybrid"], KEPT), questions(6, "hybrid", seed=34)
    asked: dict[str, Any] = {"max_new_tokens": 200, "ignore_eos": True, "frequency_penalty": 0.4}
    expected = [server.generate(prompt, **asked).token_ids for prompt in prompts]
    with ThreadPoolExecutor(len(prompts)) as threads:

        def ask(some: list[list[int]]) -> list[Future[list[int]]]:
            return [
                threads.submit(lambda prompt: server.generate(prompt, **asked).token_ids, prompt) for prompt in some
            ]

        answer = stream(server, prompts[0], **asked)
        next(answer)
        running = ask(prompts[1:4])
        assert next(answer).meta["completion_tokens"] < 150
        assert post(server, "/pause_generation", {"mode": "retract"}).status_code == 200
        release(server, *TAGS)
        waiting = ask(prompts[4:])
        time.sleep(1)
        assert not any(future.done() for future in (*running, *waiting))
        resume(server, *TAGS)
        assert post(server, "/continue_generation").status_code == 200
        *_, streamed = answer
        assert [streamed.token_ids, *(future.result() for future in (*running, *waiting))] == expected
    pool.drop(server)
