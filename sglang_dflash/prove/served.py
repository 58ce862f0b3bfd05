"""Servers of a place, what they are asked, and what plain torch says of a pair."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from typing import Any, NamedTuple

import torch
from transformers import AutoTokenizer

from sglang_dflash.bench.compare import Difference, differences, lead
from sglang_dflash.bench.measure import Steps
from sglang_dflash.check import served
from sglang_dflash.model import plain
from sglang_dflash.model.generate import Options, spec_steps
from sglang_dflash.prove.machine import Place
from sglang_dflash.servers.errors import ServerError
from sglang_dflash.servers.ports import free_port
from sglang_dflash.servers.server import Generation, Server
from sglang_dflash.tiny import pairs as tiny
from sglang_dflash.tiny.pairs import Arm
from sglang_dflash.tiny.workloads import held_out

N_PROMPTS, N_PROMPTS_SHORT = 12, 4
NEW_TOKENS, NEW_TOKENS_SHORT = 96, 48
CROWDS = (3, 8)  # requests at once; a captured batch of four is padded with three
START_S = 900.0  # a model of 27B from disk, and its graphs
WHOLE_BLOCKS = {"SGLANG_DFLASH_WIDTHS": "fixed", "SGLANG_DFLASH_COPY": "off"}  # as plain torch drafts and verifies
WITH_COPIES = WHOLE_BLOCKS | {"SGLANG_DFLASH_COPY": "on"}
TOP = 50  # logprobs that are looked at


def prompts(place: Place, pair: str, drawn: Callable[[int], Sequence[Any]] = held_out) -> list[list[int]]:
    """Conversations, of held-out questions unless others are drawn, as token ids of the pair's own tokenizer."""
    tokenizer: Any = AutoTokenizer.from_pretrained(place.pairs[pair].target)
    return [
        tokenizer.apply_chat_template(conversation, add_generation_prompt=True, return_dict=False)
        for conversation in drawn(N_PROMPTS_SHORT if place.short else N_PROMPTS)
    ]


def n_new(place: Place) -> int:
    return NEW_TOKENS_SHORT if place.short else NEW_TOKENS


class Launch(NamedTuple):
    """What is served."""

    pair: str
    attention: str
    page_size: int | None = None
    env: tuple[tuple[str, str], ...] = ()
    flags: tuple[str, ...] = ()

    def server(self, place: Place, arm: Arm, port: int) -> Server:
        models = place.pairs[self.pair]
        own = dict(self.env) if arm is Arm.PLUGIN else {}
        flags = [*place.flags(self.pair, self.attention, self.page_size), *self.flags]
        return Server(
            tiny.command(arm, models, *flags),
            port=port,
            log=place.folder / f"{arm}-{self.pair}-{self.attention}-{port}.log",
            env=place.env(self.attention) | tiny.environment(arm) | own,
            name=f"{arm} {self.pair} {self.attention}",
        )


@contextmanager
def serving(place: Place, launch: Launch, arms: Sequence[Arm]) -> Iterator[dict[Arm, Server]]:
    """Servers of these arms, side by side.

    Raises:
        ServerError: one does not start, or is not what its name says.
    """
    with ExitStack() as stack:
        servers, port = dict[Arm, Server](), place.port
        for arm in arms:
            port = free_port(port)  # of this process, whether or not it is listened on yet
            servers[arm] = launch.server(place, arm, port)
            port += 1
            stack.callback(servers[arm].stop)
            servers[arm].start()
        for arm, server in servers.items():
            server.wait_ready(START_S)
            tiny.require_worker(arm, server)
        yield servers


def ask(server: Server, asked: Sequence[Sequence[int]], *, concurrency: int, n_new: int) -> list[Generation]:
    server.flush_cache()
    return server.generate_many(asked, concurrency=concurrency, max_new_tokens=n_new)


class Watched(NamedTuple):
    """A server of ours with the probe, after it was asked."""

    launch: Launch
    prompts: list[list[int]]
    answers: dict[int, list[Generation]]  # by requests at once
    dflash: dict[str, Any]  # what it says of itself
    info: dict[str, Any]


def watch(place: Place, launch: Launch, drawn: Callable[[int], Sequence[Any]] = held_out) -> Watched:
    launch = launch._replace(env=(*launch.env, ("SGLANG_DFLASH_PROBE", "1")))
    asked = prompts(place, launch.pair, drawn)
    with serving(place, launch, [Arm.PLUGIN]) as servers:
        server = servers[Arm.PLUGIN]
        answers = {c: ask(server, asked, concurrency=c, n_new=n_new(place)) for c in (1, *CROWDS)}
        return Watched(launch, asked, answers, served.fetch(server.url), server.server_info())


# -- plain torch ---------------------------------------------------------------------------------------------------


class Expected(NamedTuple):
    """One generation by plain torch, greedy."""

    token_ids: list[int]
    histogram: dict[int, int]  # decode steps that accepted 0, 1, 2, ... drafts


class Torch:
    """A pair in plain torch: on the GPU where there is one."""

    def __init__(self, place: Place, pair: str) -> None:
        models = place.pairs[pair]
        self.models = plain.load(str(models.target), str(models.draft))

    def generate(self, prompt: Sequence[int], max_new_tokens: int, *, copies: bool = False) -> Expected:
        models = self.models
        options = Options(max_new_tokens=max_new_tokens, stop_token_ids=models.stop_token_ids, copies=copies)
        ids = torch.tensor([list(prompt)], device=models.target.device)
        steps = list(spec_steps(models.draft, models.target, ids, options))
        token_ids = [token for step in steps for token in step.committed]
        return Expected(token_ids, dict(Counter(step.n_accepted for step in steps[1:])))

    @torch.inference_mode()
    def gap(self, text: Sequence[int], said: int) -> float:
        """Nats between the likeliest token after `text` and `said`."""
        ids = torch.tensor([list(text)], device=self.models.target.device)
        logits_V = self.models.target(input_ids=ids).logits[0, -1].float()
        return float(logits_V.max() - logits_V[said])


def histogram(answer: Generation) -> dict[int, int]:
    """How many decode steps of a server accepted 0, 1, 2, ... drafts."""
    return {n: count for n, count in enumerate(answer.meta.get("spec_correct_drafts_histogram", ())) if count}


def committed_per_step(histograms: Sequence[dict[int, int]]) -> float:
    """Accepted drafts and the bonus."""
    total = sum((Counter(one) for one in histograms), Counter())
    return Steps(total.total(), sum(n * count for n, count in total.items())).committed_per_step


# -- answers that should be the same -------------------------------------------------------------------------------


class Apart(NamedTuple):
    """Where two answers part, and how nearly they did not."""

    difference: Difference
    gap: float  # nats, of the reference

    def __str__(self) -> str:
        return f"{self.difference} ({self.gap:.3f} nats behind)"


def tie(place: Place, attention: str) -> float:
    """Nats within which two tokens may swap: rounding in another order. None in fp32 on a CPU."""
    if place.gpu is None:
        return 0.0
    return 0.05 if place.exact(attention) else 0.3


def apart(
    asked: Sequence[Sequence[int]], reference: Sequence[Sequence[int]], found: Sequence[Sequence[int]], gap: Any
) -> list[Apart]:
    """Each answer's first difference; `gap(text, token)` asks the reference.

    A difference where one of the answers has ended has no token to ask for.
    """
    parted = []
    for one in differences(reference, found):
        text = [*asked[one.prompt], *reference[one.prompt][: one.position]]
        known = isinstance(one.expected, int) and isinstance(one.found, int)
        parted.append(Apart(one, gap(text, one.found) if known else float("inf")))
    return parted


def served_gap(off: Server) -> Any:
    """As `Torch.gap`, of a server."""

    def gap(text: Sequence[int], said: int) -> float:
        fields = {"return_logprob": True, "top_logprobs_num": TOP}
        meta = off.generate(list(text), fields=fields, max_new_tokens=1).meta
        return lead({token: logprob for logprob, token, _ in meta["output_top_logprobs"][0]}, said)

    return gap


def require_running(server: Server) -> None:
    if not server.running:
        raise ServerError(f"{server.name} ended while it was asked:\n{server.log_tail()}")
