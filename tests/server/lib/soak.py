"""Soak test: twelve clients send random requests of all kinds at once, and compare the answers with known ones.

The book is a list of prompts with their answers from a server without speculation, written before the soak. During the
soak, clients send prompts of the book, disconnect early, abort, send invalid requests or use sessions. Some flush the
cache, pause the server or load weights. A finished greedy answer must equal the answer in the book. An unfinished
answer must be a prefix of that one. Log probabilities of finished greedy answers must agree within `TOLERANCE`. A small
error of a state or of K/V changes them, but hardly ever a token.
"""

import time
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from random import Random
from threading import Lock
from typing import Any, NamedTuple

import httpx

from sglang_dflash.pairs.servers.server import Generation, Server
from sglang_dflash.pairs.tiny.pairs import HYBRID
from tests.server.lib.bad_requests import SAMPLING
from tests.server.lib.talk import (
    LOGPROBS,
    TOLERANCE,
    as_prompt,
    as_text,
    conversation,
    logprobs_of,
    post,
    steps,
    stream,
    worst,
)

N_TOKENS = 72  # largest number of tokens of an answer in the book
MIB = 2**20
# Tokens. A prompt and its answer must fit a context of 256, also in a session of two turns.
LONGEST_PROMPT = 150


class Entry(NamedTuple):
    prompt: list[int]
    options: dict[str, Any]
    token_ids: list[int]
    logprobs: list[float]


class Report(NamedTuple):
    asked: Counter[str]
    wrong: list[str]
    rss_mib: list[float]  # resident memory of the scheduler, sampled about 40 times
    n_retractions: int
    n_steps: int
    seconds: float

    def __str__(self) -> str:
        kinds = ", ".join(f"{n} {kind}" for kind, n in self.asked.most_common())
        return (
            f"{self.asked.total()} requests in {self.seconds:.0f} s ({kinds}); {self.n_retractions} retractions, "
            f"{self.n_steps} steps; scheduler {self.rss_mib[0]:.0f} -> {self.rss_mib[-1]:.0f} MiB"
        )


def write_book(off: Server, n_entries: int, seed: int) -> list[Entry]:
    """Return entries with the answers of `off`. Every third request has a bias, a grammar or a stop string."""
    random = Random(seed)
    asked = []
    for i in range(n_entries):
        prompt = as_prompt(conversation(seed + i, n_turns=random.choice((1, 1, 2, 3))))[-LONGEST_PROMPT:]
        special = random.choice(
            (
                {"logit_bias": {str(random.randrange(3, 1024)): 4.0}},
                {"regex": rf"key {1000 + i}( [a-z]{{1,6}}){{2,5}}\."},
                {"stop": random.choice((" is", ", ", "\n", " = "))},
            )
        )
        asked.append((prompt, {"max_new_tokens": N_TOKENS} | (special if i % 3 == 0 else {})))
    with ThreadPoolExecutor(8) as clients:
        answers = list(clients.map(lambda request: off.generate(request[0], fields=LOGPROBS, **request[1]), asked))
    return [
        Entry(*request, answer.token_ids, logprobs_of(answer)) for request, answer in zip(asked, answers, strict=True)
    ]


class Soak:
    def __init__(self, server: Server, book: Sequence[Entry], n_requests: int, seed: int) -> None:
        self.server, self.book, self.n_requests, self.seed = server, book, n_requests, seed
        self.plain = [entry for entry in book if entry.options.keys() == {"max_new_tokens"}]
        self.scheduler = next(p for p in server.processes() if p.name().startswith("sglang::sched"))
        self.lock, self.pausing = Lock(), Lock()
        self.asked: Counter[str] = Counter()
        self.wrong: list[str] = []
        self.rss_mib = [self._rss_mib()]
        self.n_retractions = self.n_steps = 0

    def run(self, n_clients: int = 12) -> Report:
        began = time.monotonic()
        with ThreadPoolExecutor(n_clients) as clients:
            for _ in clients.map(self._one, range(self.n_requests)):
                pass
        seconds = time.monotonic() - began
        return Report(self.asked, self.wrong, self.rss_mib, self.n_retractions, self.n_steps, seconds)

    def kinds(self) -> dict[Callable[[Random, int], str | None], int]:
        return {
            self.whole: 30, self.shorter: 10, self.first_token: 5, self.resumed: 15, self.sampled: 10,
            self.left: 8, self.aborted: 8, self.bad: 8, self.too_long: 2, self.turns: 5,
            self.flushed: 3, self.paused: 1, self.updated: 1,
        }  # fmt: skip

    def _one(self, i: int) -> None:
        random = Random(self.seed * 1_000_003 + i)
        kinds = self.kinds()
        (kind,) = random.choices(list(kinds), list(kinds.values()))
        complaint = kind(random, i)
        with self.lock:
            self.asked[kind.__name__] += 1
            if complaint is not None:
                self.wrong.append(f"request {i}, {kind.__name__}: {complaint}")
            if self.asked.total() % max(1, self.n_requests // 40) == 0:
                self.rss_mib.append(self._rss_mib())

    def _rss_mib(self) -> float:
        return self.scheduler.memory_info().rss / MIB

    def _ask(self, prompt: list[int], fields: dict[str, Any] | None = None, **options: Any) -> Generation:
        answer = self.server.generate(prompt, fields=LOGPROBS | (fields or {}), **options)
        with self.lock:
            self.n_retractions += answer.meta["num_retractions"]
            self.n_steps += sum(steps(answer).values())
        return answer

    def whole(self, random: Random, i: int) -> str | None:
        entry = random.choice(self.book)
        return deviates(self._ask(entry.prompt, **entry.options), entry)

    def shorter(self, random: Random, i: int) -> str | None:
        entry, n = random.choice(self.plain), random.randrange(2, N_TOKENS)
        return deviates(self._ask(entry.prompt, max_new_tokens=n), entry, slice(n))

    def first_token(self, random: Random, i: int) -> str | None:
        entry = random.choice(self.plain)
        return deviates(self._ask(entry.prompt, max_new_tokens=1), entry, slice(1))

    def resumed(self, random: Random, i: int) -> str | None:
        """Send the prompt with a part of its answer; the rest of the answer must follow."""
        entry = random.choice(self.plain)
        cut = random.randrange(1, len(entry.token_ids))
        answer = self._ask(entry.prompt + entry.token_ids[:cut], max_new_tokens=N_TOKENS - cut)
        return deviates(answer, entry, slice(cut, None))

    def sampled(self, random: Random, i: int) -> str | None:
        """Sample at temperature 1 with a bias of 100 for one token; the answer must be this token repeated."""
        entry, token, n = random.choice(self.plain), 3 + i % 1000, random.randrange(1, 40)
        sampling = {"temperature": 1.0, "ignore_eos": True, "logit_bias": {str(token): 100.0}}
        return differs(self._ask(entry.prompt, max_new_tokens=n, **sampling).token_ids, [token] * n)

    def left(self, random: Random, i: int) -> str | None:
        entry, seen = random.choice(self.plain), []
        chunks = stream(self.server, entry.prompt, **entry.options)
        for chunk, _ in zip(chunks, range(random.randrange(1, 6)), strict=False):
            seen = chunk.token_ids
        chunks.close()
        return differs(seen, entry.token_ids[: len(seen)])

    def aborted(self, random: Random, i: int) -> str | None:
        entry, seen = random.choice(self.plain), []
        rid, after = f"soak-{self.seed}-{i}.", random.randrange(1, 6)
        for n, chunk in enumerate(stream(self.server, entry.prompt, fields={"rid": rid}, **entry.options), start=1):
            seen = chunk.token_ids
            if n == after:
                post(self.server, "/abort_request", {"rid": rid})
        return differs(seen, entry.token_ids[: len(seen)])

    def bad(self, random: Random, i: int) -> str | None:
        bad = SAMPLING[random.choice(sorted(SAMPLING))]
        status = httpx.post(f"{self.server.url}{bad.path}", timeout=60, **bad.content).status_code
        return None if status in (200, 400) else f"status {status}"

    def too_long(self, random: Random, i: int) -> str | None:
        body = {"input_ids": [5] * 5000, "sampling_params": {"max_new_tokens": 8}}
        status = post(self.server, "/generate", body).status_code
        return None if status == 400 else f"status {status}"

    def flushed(self, random: Random, i: int) -> str | None:
        status = post(self.server, "/flush_cache").status_code  # 400: requests are running
        return None if status in (200, 400) else f"status {status}"

    def paused(self, random: Random, i: int) -> str | None:
        with self.pausing:
            answers = [post(self.server, "/pause_generation", {"mode": random.choice(("in_place", "retract"))})]
            time.sleep(0.1)
            answers.append(post(self.server, "/continue_generation"))
        statuses = [answer.status_code for answer in answers]
        return None if statuses == [200, 200] else f"statuses {statuses}"

    def turns(self, random: Random, i: int) -> str | None:
        """Generate a part of an answer in a session, then send its next tokens as the second turn."""
        entry, session = random.choice(self.plain), f"soak-{self.seed}-{i}"
        cut = random.randrange(1, len(entry.token_ids) - 8)
        n = random.randrange(1, 4)
        body = {"capacity_of_str_len": 1000, "session_id": session}
        if (status := post(self.server, "/open_session", body).status_code) != 200:
            return f"status {status}"
        try:
            turn = {"session_params": {"id": session, "rid": None}}
            first = self._ask(entry.prompt, turn, max_new_tokens=cut)
            turn = {"session_params": {"id": session, "rid": first.meta["id"]}}
            second = self._ask(entry.token_ids[cut : cut + n], turn, max_new_tokens=N_TOKENS - cut - n)
        finally:
            post(self.server, "/close_session", {"session_id": session})
        return deviates(first, entry, slice(cut)) or deviates(second, entry, slice(cut + n, None))

    def updated(self, random: Random, i: int) -> str | None:
        """Reload the served weights of the target or of the draft.

        SGLang first waits for requests of connected clients. If a disconnected client's request still runs, SGLang
        loads the weights but reports that its cache was not flushed.
        """
        body = {"model_path": str(random.choice(HYBRID)), "flush_cache": True}
        with self.pausing:
            reply = post(self.server, "/update_weights_from_disk", body)
        updated = reply.status_code == 200 or "Weights were updated, but the cache was not flushed" in reply.text
        return None if updated else f"status {reply.status_code}: {reply.text}"


def differs(found: list[int], expected: list[int]) -> str | None:
    if found == expected:
        return None
    return f"{as_text(found)!r} for {as_text(expected)!r}"


def deviates(answer: Generation, entry: Entry, part: slice = slice(None)) -> str | None:
    """Return how an answer differs from a part of the entry's answer, in tokens or log probabilities, or None."""
    if wrong := differs(answer.token_ids, entry.token_ids[part]):
        return wrong
    error, i = worst(logprobs_of(answer), entry.logprobs[part])
    if error <= TOLERANCE:
        return None
    return f"log probability of token {i} of {as_text(answer.token_ids)!r} differs by {error:.1e}"


def growth(rss_mib: Sequence[float]) -> tuple[float, float]:
    """Return the MiB by which the peak of the second half exceeds that of the first half, and the limit for it.

    In the first half SGLang's caches and the allocator's arenas fill. The limit is the growth of the first half after
    its middle, plus 16 MiB for the allocator. If each step leaked the logits of its blocks, 64 KiB per request here,
    the growth would be many times the limit.
    """
    warm, rest = rss_mib[: len(rss_mib) // 2], rss_mib[len(rss_mib) // 2 :]
    still_growing = max(warm) - warm[len(warm) // 2]
    return max(rest) - max(warm), still_growing + 16


def complaints(report: Report) -> Iterable[str]:
    yield from report.wrong
    grown, allowed = growth(report.rss_mib)
    if grown > allowed:
        yield f"the scheduler grew by {grown:.0f} MiB after the warm half, {allowed:.0f} are allowed: {report.rss_mib}"
