"""Servers of the checked pair (`Place.pair`), their answers to prompts, and the PyTorch reference's answers."""

from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from typing import Any, NamedTuple

import torch
from transformers import AutoTokenizer

from sglang_dflash.pairs.servers.ports import free_port
from sglang_dflash.pairs.servers.server import Generation, Server
from sglang_dflash.pairs.tiny import pairs as tiny
from sglang_dflash.pairs.tiny.pairs import Arm
from sglang_dflash.pairs.tiny.workloads import held_out
from sglang_dflash.reference.torch import plain
from sglang_dflash.reference.torch.generate import Options, spec_steps
from sglang_dflash.tools.bench.compare import Likeliest, Unequal, differences, is_near_tie, lead
from sglang_dflash.tools.bench.measure import Steps
from sglang_dflash.tools.check import served
from sglang_dflash.tools.prove.machine import Place

N_PROMPTS, N_PROMPTS_SHORT = 12, 4
NEW_TOKENS, NEW_TOKENS_SHORT = 96, 48
CONCURRENCIES = (1, 3, 8)  # in the emulation, 3 is padded to a captured batch of four
START_S = 900.0  # seconds until a server is ready: a 27B model is read from disk, and graphs are captured
TOP = 50  # number of log-probabilities per context

Draw = Callable[[int], Sequence[Any]]  # returns the given number of conversations


def prompts(place: Place, draw: Draw = held_out) -> list[list[int]]:
    """Return the token ids of conversations from `draw`, by default held-out questions."""
    tokenizer: Any = AutoTokenizer.from_pretrained(place.pair.target)
    return [
        tokenizer.apply_chat_template(conversation, add_generation_prompt=True, return_dict=False)
        for conversation in draw(N_PROMPTS_SHORT if place.short else N_PROMPTS)
    ]


def n_new(place: Place) -> int:
    return NEW_TOKENS_SHORT if place.short else NEW_TOKENS


@contextmanager
def serving(
    place: Place,
    arms: Sequence[Arm],
    attention: str,
    page_size: int | None = None,
    env: Mapping[str, str] | None = None,
) -> Iterator[dict[Arm, Server]]:
    """Run one server per arm, all at the same time.

    Args:
        env: additional environment variables of the plugin's server.

    Raises:
        ServerError: a server does not start, or runs another worker than its arm requires.
    """
    flags, servers, port = place.flags(attention, page_size), dict[Arm, Server](), place.port
    with ExitStack() as stack:
        for arm in arms:
            port = free_port(port)
            servers[arm] = Server(
                tiny.command(arm, place.pair, *flags),
                port=port,
                log=place.folder / f"{arm}-{attention}-{port}.log",
                env=place.env | tiny.environment(arm) | dict(env or {} if arm is Arm.PLUGIN else {}),
                name=f"{arm} {attention}",
            )
            stack.callback(servers[arm].stop)
            servers[arm].start()
            port += 1  # the started server does not listen yet, so its port still looks free
        for arm, server in servers.items():
            server.wait_ready(START_S)
            tiny.require_worker(arm, server)
        yield servers


def ask(server: Server, asked: Sequence[Sequence[int]], *, concurrency: int, n_new: int) -> list[Generation]:
    server.flush_cache()
    return server.generate_many(asked, concurrency=concurrency, max_new_tokens=n_new)


def ask_at_each(server: Server, asked: Sequence[Sequence[int]], n_new: int) -> dict[int, list[Generation]]:
    """Return the answers at each of `CONCURRENCIES`."""
    return {c: ask(server, asked, concurrency=c, n_new=n_new) for c in CONCURRENCIES}


class Watched(NamedTuple):
    """Answers of a server with this plugin and its probe, and the probe's records."""

    prompts: list[list[int]]
    answers: dict[int, list[Generation]]  # by concurrency
    dflash: dict[str, Any]  # the worker's part of the server info
    info: dict[str, Any]  # SGLang's server info
    copies: bool = False  # n-gram copies are on


def watch(place: Place, env: Mapping[str, str], draw: Draw = held_out) -> Watched:
    asked = prompts(place, draw)
    with serving(place, [Arm.PLUGIN], place.backends[0], env={"SGLANG_DFLASH_PROBE": "1", **env}) as servers:
        server = servers[Arm.PLUGIN]
        answers, copies = ask_at_each(server, asked, n_new(place)), env.get("SGLANG_DFLASH_COPY") == "on"
        return Watched(asked, answers, served.fetch(server.url), server.server_info(), copies)


class Reference(NamedTuple):
    """Greedy answers, and a function that returns the log-probabilities of the likeliest tokens after a context."""

    answers: list[list[int]]
    likeliest: Likeliest
    histograms: Sequence[Mapping[int, int]] = ()  # per answer: number of accepted drafts -> number of decode steps


def by_plain_torch(place: Place, prompts: Sequence[Sequence[int]], *, copies: bool) -> Reference:
    """Compute the pair's answers in PyTorch, on the GPU if there is one."""
    models = plain.load(str(place.pair.target), str(place.pair.draft))
    options = Options(max_new_tokens=n_new(place), stop_token_ids=models.stop_token_ids, copies=copies)

    def on_device(tokens: Sequence[int]) -> torch.Tensor:
        return torch.tensor([list(tokens)], device=models.target.device)

    @torch.inference_mode()
    def likeliest(context: Sequence[int]) -> dict[int, float]:
        top = models.target(input_ids=on_device(context)).logits[0, -1].float().log_softmax(-1).topk(TOP)
        return dict(zip(top.indices.tolist(), top.values.tolist(), strict=True))

    answers, histograms = [], []
    for prompt in prompts:
        steps = list(spec_steps(models.draft, models.target, on_device(prompt), options))
        answers.append([token for step in steps for token in step.committed])
        histograms.append(Counter(step.n_accepted for step in steps[1:]))
    return Reference(answers, likeliest, histograms)


def likeliest_of(server: Server) -> Likeliest:
    def likeliest(context: Sequence[int]) -> dict[int, float]:
        fields = {"return_logprob": True, "top_logprobs_num": TOP}
        meta = server.generate(list(context), fields=fields, max_new_tokens=1).meta
        return {token: logprob for logprob, token, _ in meta["output_top_logprobs"][0]}

    return likeliest


def histogram(answer: Generation) -> dict[int, int]:
    """Return the number of decode steps of an answer for each number of accepted drafts."""
    return {n: count for n, count in enumerate(answer.meta.get("spec_correct_drafts_histogram", ())) if count}


def acceptance_length(histograms: Sequence[Mapping[int, int]]) -> float:
    """Return the mean number of committed tokens per step, the bonus included."""
    total = sum((Counter(one) for one in histograms), Counter())
    return Steps(total.total(), sum(n * count for n, count in total.items())).committed_per_step


def near_tie(place: Place) -> float:
    """Return the difference in nats within which rounding to bf16 may swap two tokens; 0 where servers use fp32."""
    return 0.0 if place.exact else 0.3


class Agreement(NamedTuple):
    """Result of a comparison of answers."""

    equal: int  # number of equal answers, among `of` answers
    of: int
    apart: list[str]  # first difference of each unequal answer
    beyond_a_tie: list[str]  # differences in `apart` that rounding does not explain


def compare(
    prompts: Sequence[Sequence[int]], reference: Reference, answers: Sequence[Sequence[int]], tie: float
) -> Agreement:
    """Compare answers with a reference. In a near tie both tokens are within `tie` nats of the likeliest token."""
    apart = dict[str, bool]()
    for one in differences(reference.answers, answers):
        context = [*prompts[one.prompt], *reference.answers[one.prompt][: one.position]]
        nats = lead(reference.likeliest(context), one.found)
        apart[f"{one} ({nats:.3f} nats below the likeliest)"] = is_near_tie(
            Unequal("", one, context), reference.likeliest, tie
        )
    beyond = [text for text, near in apart.items() if not near]
    return Agreement(len(answers) - len(apart), len(answers), list(apart), beyond)
