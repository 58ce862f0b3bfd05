"""GPU emulation on a CPU: captured graphs and GPU attention backends change neither answers nor steps.

A wrong draft changes no answer, so the steps of every request are compared with those of the PyTorch reference.
"""

import re
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any, NamedTuple

import pytest

from sglang_dflash.pairs.servers.errors import ServerError
from sglang_dflash.pairs.servers.server import Generation, Server
from sglang_dflash.pairs.tiny.pairs import Pair
from tests.server.conftest import PAIRS
from tests.server.lib.oracle import oracle
from tests.server.lib.pairs import pair_of
from tests.server.lib.rehearsals import REHEARSALS, Rehearsal
from tests.server.lib.rows import require_rows
from tests.server.lib.talk import steps, tokens_of
from tests.tools import parameters
from tests.tools.parameters import REQUEST_FLAGS

ON_GRAPH, EAGER = "cpu graph: True", "cpu graph: False"  # parts of SGLang's log line for a decode batch


class Serving(NamedTuple):
    server: Server
    rehearsal: Rehearsal
    pair: Pair
    prompts: list[list[int]]
    expected: list[list[int]]  # Transformers' continuations

    def generate(self, concurrency: int) -> list[Generation]:
        self.server.flush_cache()
        return self.server.generate_many(
            self.prompts, concurrency=concurrency, max_new_tokens=self.rehearsal.max_new_tokens
        )

    def require_answers_and_steps(self, concurrency: int) -> None:
        """Check that answers, and steps if they are known, are those of the PyTorch reference."""
        answers = self.generate(concurrency)
        assert tokens_of(answers) == self.expected
        if self.rehearsal.knows_steps:
            expert = oracle(self.pair, None, self.rehearsal.draft_window, self.rehearsal.page_size)
            n_new = self.rehearsal.max_new_tokens
            assert list(map(steps, answers)) == [expert.accepted_histogram(prompt, n_new) for prompt in self.prompts]


@pytest.fixture(
    scope="module",
    params=[pytest.param(r, id=name, marks=pytest.mark.full if r.full else ()) for name, r in REHEARSALS.items()],
)
def serving(
    request: pytest.FixtureRequest,
    pool: Any,
    questions: Callable,
    reference: Callable,
    tmp_path_factory: pytest.TempPathFactory,
) -> Iterator[Serving]:
    rehearsal: Rehearsal = request.param
    pair = pair_of(rehearsal, tmp_path_factory.mktemp("draft"))
    prompts = questions(rehearsal.n_prompts, rehearsal.target)
    expected = [reference(prompt, rehearsal.max_new_tokens, rehearsal.target) for prompt in prompts]
    running = pool.get(
        rehearsal.arm, target=rehearsal.target, pair=pair, flags=("--decode-log-interval", "1", *rehearsal.flags),
        env=dict(rehearsal.env),
    )  # fmt: skip
    yield Serving(running, rehearsal, pair, prompts, expected)
    pool.drop(running)


@pytest.mark.parametrize("concurrency", [3, 8])
def test_answers_and_steps_are_plain_torchs(serving: Serving, concurrency: int) -> None:
    serving.require_answers_and_steps(concurrency)


def test_one_request_at_a_time_in_captured_graphs(serving: Serving) -> None:
    """SGLang's log line for each decode batch shows whether a captured graph ran."""
    serving.require_answers_and_steps(concurrency=1)
    decoded = [line for line in serving.server.log_text().splitlines() if "Decode batch" in line]
    assert len(decoded) > 20
    if not serving.rehearsal.captures:
        assert all(EAGER in line for line in decoded)
        return
    assert all(ON_GRAPH in line for line in decoded if "#running-req: 1," in line)
    largest = max(
        map(int, re.search(r"--cuda-graph-bs-decode ([0-9 ]+)", " ".join(serving.rehearsal.flags))[1].split())
    )
    assert all((ON_GRAPH in line) == (running(line) <= largest) for line in decoded)


def running(line: str) -> int:
    found = re.search(r"#running-req: (\d+),", line)
    assert found is not None, line
    return int(found[1])


def test_cuda_only_paths_are_captured(serving: Serving) -> None:
    """SGLang runs projections of Gated DeltaNet on two streams; for one token it fuses them with the convolution."""
    rehearsal, log = serving.rehearsal, serving.server.log_text()
    captured = rehearsal.captures and rehearsal.target == "hybrid"
    widths = re.findall(r"Captured the fused projection of Gated DeltaNet for (\d+) token", log)
    assert set(widths) == ({"1"} if captured and rehearsal.verifies_one_token else set())
    assert "Falling back from fused GDN decode projection" not in log
    assert ("A captured forward also runs on stream" in log) == (captured and rehearsal.watches_streams)


def test_draft_after_a_cached_prefix(serving: Serving, questions: Callable) -> None:
    """A windowed draft's ring lacks the cached prefix, so the draft's KV lengths differ from the target's."""
    rehearsal = serving.rehearsal
    if not rehearsal.knows_steps:
        pytest.skip("steps are not predicted here")
    expert = oracle(serving.pair, None, rehearsal.draft_window, rehearsal.page_size)
    text = [token for prompt in questions(8, rehearsal.target, seed=6) for token in prompt][:300]
    for n_first, n_second in ((150, 180), (210, 300)):
        serving.server.flush_cache()
        serving.server.generate(text[:n_first], max_new_tokens=8)
        answer = serving.server.generate(text[:n_second], max_new_tokens=32)
        n_unseen = answer.meta["cached_tokens"] if rehearsal.draft_window else 0
        assert steps(answer) == expert.accepted_histogram(text[:n_second], 32, n_unseen)


@pytest.mark.parametrize("concurrency", [1, 3])
def test_outputs_are_those_of_their_step(serving: Serving, concurrency: int) -> None:
    """Each request gets the hidden states of its own step, although the next replay overwrites the graph's memory."""
    if REQUEST_FLAGS[-1] not in serving.rehearsal.flags:
        pytest.skip("the server was not started for hidden states")
    serving.server.flush_cache()
    asked = {"return_hidden_states": True, "return_sampling_mask": True}
    n_new = serving.rehearsal.max_new_tokens
    answers = serving.server.generate_many(
        serving.prompts[:6], concurrency=concurrency, fields=asked, max_new_tokens=n_new
    )
    assert tokens_of(answers) == serving.expected[:6]
    for prompt, answer in zip(serving.prompts, answers, strict=False):
        require_rows(serving.pair.target, prompt, answer)
        assert answer.meta["output_token_sampling_mask"] == [[token] for token in answer.token_ids]


# -- faults that no server without captured graphs shows -----------------------------------------------------------

FAULTS = Path(__file__).parent / "faults"
CAPTURED = "not permitted while a stream is captured; at faults/sitecustomize"
FAULTY = {
    # fault: (server, evidence). Evidence is different "answers", more "steps", or the error that ends the server.
    "drafts_in_the_graph": (REHEARSALS["fa3-graphs"], "steps"),
    "a_value_read_in_the_draft": (REHEARSALS["fa3-graphs"], CAPTURED),
    "a_host_length_in_the_draft": (REHEARSALS["fa3-graphs"], "steps"),
    "a_page_table_in_new_memory": (REHEARSALS["fa3-graphs"], "answers"),
    "own_index_buffers": (REHEARSALS["fa3-graphs-streams-1-and-16"], "width 1 has its own decode_cuda_graph_metadata"),
    # Only fa3 with full prefill graphs checks that its metadata is for the right number of requests.
    "prompts_on_the_last_width": (REHEARSALS["fa3-full-prefill-graphs-widths"], "full-CG prefill metadata"),
    "a_barrier_left_out": (REHEARSALS["fa3-graphs-streams"], "UnorderedAccess"),
    "a_branch_not_forked": (
        REHEARSALS["fa3-graphs-streams-1-and-16"],
        "has not waited for the stream that is captured: not permitted",
    ),
    "a_branch_not_joined": (REHEARSALS["fa3-graphs-streams-1-and-16"], "reads what may not be written yet"),
}


@pytest.mark.full
@pytest.mark.parametrize("fault", FAULTY)
def test_a_fault_is_seen(fault: str, pool: Any, questions: Callable, reference: Callable) -> None:
    rehearsal, evidence = FAULTY[fault]
    env = dict(rehearsal.env) | parameters.path_with(FAULTS) | {"FAULT": fault}
    prompts = questions(6, rehearsal.target)
    if evidence not in ("steps", "answers"):
        with pytest.raises(ServerError, match=evidence), ExitStack() as stack:  # noqa: PT012  (at launch or later)
            server = pool.get(target=rehearsal.target, flags=rehearsal.flags, env=env)
            stack.callback(pool.forget, server)
            server.generate_many(prompts, concurrency=3, max_new_tokens=48)
        return
    server = pool.get(target=rehearsal.target, flags=rehearsal.flags, env=env)
    assert f"fault put in: {fault}" in server.log_text()
    # Several requests: whether a replay overwrites the drafts of another graph depends on the layout of their memory.
    answers = server.generate_many(prompts, concurrency=3, max_new_tokens=48)
    pool.drop(server)
    expected = [reference(prompt, 48, rehearsal.target) for prompt in prompts]
    if evidence == "answers":
        assert tokens_of(answers) != expected
        return
    assert tokens_of(answers) == expected  # a wrong draft changes no answer
    expert = oracle(PAIRS[rehearsal.target], None, None)
    wanted = [sum(expert.accepted_histogram(prompt, 48).values()) for prompt in prompts]
    assert sum(answer.meta["spec_verify_ct"] for answer in answers) > 3 * sum(wanted)
