"""Checks of servers through HTTP only: without speculation, with SGLang's DFLASH worker, and with this plugin's."""

import json
import os
from collections.abc import Mapping, Sequence
from statistics import median
from time import perf_counter
from typing import Any

import pytest

from sglang_dflash.pairs.servers.server import Server
from sglang_dflash.pairs.tiny.pairs import ARMS, Arm
from sglang_dflash.tools.bench.__main__ import main as bench
from sglang_dflash.tools.prove import distribution, served
from sglang_dflash.tools.prove.machine import Place
from sglang_dflash.tools.prove.plugin import RUN, Finding, Found, check
from sglang_dflash.tools.prove.served import Reference

TEMPERATURE = 2.0  # at 1 the tiny pair is nearly certain of most tokens
N_DRAWS, N_DRAWS_EMULATED, DRAWN_AT_ONCE = 1200, 400, 8
N_LEFT_OUT, N_ONE_TOKEN = 16, 256  # tokens of the short answer, and further tokens of the long one
N_ONE_TOKEN_ROUNDS = 6  # pairs of a short and a long answer per median
ONE_TOKEN_WITHIN = 1.1  # bound of (time per token at width 1) / (time per token without speculation)
SPEED_AT, SPEED_AT_EMULATED = (1, 8, 16, 32), (1, 4)  # concurrencies

Answers = Mapping[int, list[list[int]]]  # token ids by concurrency


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    """Parametrize `check_parity` by attention backends and page sizes of this machine."""
    if "attention" in metafunc.fixturenames:
        place, proves = (
            metafunc.config.stash[RUN].place,
            "greedy answers are equal without speculation, with SGLang's DFLASH and with this plugin",
        )
        tried = [(attention, size) for attention in place.backends for size in place.page_sizes(attention)]
        first = place.backends[0], place.page_sizes(place.backends[0])[-1]
        marks = [check(f"parity {one[0]} page {one[1]}", proves, 6, short=one == first) for one in tried]
        params = [pytest.param(*one, marks=mark) for one, mark in zip(tried, marks, strict=True)]
        metafunc.parametrize(("attention", "page_size"), params)


def check_parity(place: Place, attention: str, page_size: int, found: Found) -> None:
    asked, tokens = served.prompts(place), dict[Arm, Answers]()
    # The server without speculation is last, so that it still runs when answers are compared:
    # `judge_parity` requests log-probabilities from it.
    for arms in [ARMS[::-1]] if place.side_by_side else [[arm] for arm in ARMS[::-1]]:
        with served.serving(place, arms, attention, page_size) as servers:
            for arm, server in servers.items():
                answers = served.ask_at_each(server, asked, served.n_new(place))
                tokens[arm] = {c: [one.token_ids for one in many] for c, many in answers.items()}
            if Arm.OFF in servers:
                reference = Reference(tokens[Arm.OFF][1], served.likeliest_of(servers[Arm.OFF]))
                finding = judge_parity(served.near_tie(place), asked, tokens, reference)
    found(finding)


def judge_parity(
    tie: float, asked: Sequence[Sequence[int]], tokens: Mapping[Arm, Answers], reference: Reference
) -> Finding:
    """Compare all answers with the reference. Only answers of the plugin that differ by more than a near tie fail."""
    numbers, shown, bad = dict[str, dict[str, Any]](), list[str](), list[str]()
    for arm in ARMS:
        compared = {c: served.compare(asked, reference, answers, tie) for c, answers in tokens[arm].items()}
        numbers |= {f"{arm} {c}": one._asdict() for c, one in compared.items()}
        equal, of = sum(one.equal for one in compared.values()), sum(one.of for one in compared.values())
        beyond = [f"{arm} with {c} at once: {text}" for c, one in compared.items() for text in one.beyond_a_tie]
        shown.append(f"{arm} {equal} of {of}" + (f" ({len(beyond)} beyond a tie)" if beyond else ""))
        bad += beyond if arm is Arm.PLUGIN else []
    text = f"equal to one request at a time without speculation: {', '.join(shown)}"
    return Finding("; ".join([text, *bad[:1]]), numbers, not bad)


@check("one token", "a step of one token costs little more than decoding without speculation", 6, short=True, gpu=True,
       expected=f"at most {ONE_TOKEN_WITHIN:.2f} times")  # fmt: skip
def check_one_token(place: Place, found: Found) -> None:
    """Compare the median times per token of one request: with a width of 1, and without speculation."""
    prompt, ms = served.prompts(place)[0], dict[Arm, float]()
    env = {"SGLANG_DFLASH_WIDTHS": "1", "SGLANG_DFLASH_COPY": "off"}
    for arm in (Arm.OFF, Arm.PLUGIN):  # one after the other, so that no server disturbs the times
        with served.serving(place, [arm], place.backends[0], env=env) as servers:
            ms[arm] = median(token_ms(servers[arm], prompt) for _ in range(N_ONE_TOKEN_ROUNDS))
    found(judge_one_token(ms[Arm.OFF], ms[Arm.PLUGIN]))


def token_ms(server: Server, prompt: Sequence[int]) -> float:
    """Return the milliseconds per decoded token: (a long answer's time - a short one's) / (difference in tokens)."""
    seconds = []
    for n_new in (N_LEFT_OUT, N_LEFT_OUT + N_ONE_TOKEN):
        server.flush_cache()
        began = perf_counter()
        answer = server.generate(prompt, max_new_tokens=n_new, ignore_eos=True)
        seconds.append(perf_counter() - began)
        n = len(answer.token_ids)
        assert n == n_new, f"{n} tokens instead of {n_new}; raise --context-length"
    short, long = seconds
    return (long - short) * 1e3 / N_ONE_TOKEN


def judge_one_token(off_ms: float, ours_ms: float) -> Finding:
    text = f"{ours_ms:.3f} ms a token, {off_ms:.3f} without speculation: {ours_ms / off_ms:.2f} times"
    return Finding(text, {"off_ms": off_ms, "ours_ms": ours_ms}, ours_ms <= ONE_TOKEN_WITHIN * off_ms)


@check("distribution", "above temperature 0 the sampling distribution is the one without speculation", 6)
def check_distribution(place: Place, found: Found) -> None:
    prompt, drawn = served.prompts(place)[0], dict[Arm, list[distribution.Draw]]()
    n = N_DRAWS_EMULATED if place.gpu is None else N_DRAWS
    for arms in [(Arm.OFF, Arm.PLUGIN)] if place.side_by_side else [(Arm.OFF,), (Arm.PLUGIN,)]:
        with served.serving(place, arms, place.backends[0]) as servers:
            drawn |= {arm: draws(server, prompt, n) for arm, server in servers.items()}
    sets = drawn[Arm.OFF], drawn[Arm.PLUGIN]
    apart, kinds = distribution.violations(*sets), len(set(drawn[Arm.OFF]))
    enough = kinds > distribution.N_POSITIONS
    assert enough, f"only {kinds} different answers in {n} draws at temperature {TEMPERATURE:g}, too few to compare"
    shift = distribution.detectable(0.5, n)
    numbers = {"draws": n, "kinds": kinds, "apart": list(map(str, apart)), "detectable": shift}
    text = f"{n} draws each, {len(distribution.cells(*sets))} cells, {len(apart)} further apart than "
    text += f"{distribution.BOUND:.0f} standard errors"
    found(Finding("; ".join([text, *map(str, apart[:1])]), numbers, not apart))


def draws(server: Server, prompt: Sequence[int], n: int) -> list[distribution.Draw]:
    """Return the first tokens of `n` answers to separate requests."""
    answers = server.generate_many(
        [prompt] * n, concurrency=DRAWN_AT_ONCE, temperature=TEMPERATURE, max_new_tokens=distribution.N_POSITIONS
    )
    return [tuple(answer.token_ids) for answer in answers]


@check("speed", "tokens per second without speculation (off), with SGLang's DFLASH (stock) and this plugin (ours)", 15)
def check_speed(place: Place, found: Found) -> None:
    """Run `sglang-dflash bench`."""
    small, output = place.gpu is None or place.short, place.folder / "speed"
    concurrency, n_prompts, repeats = (SPEED_AT_EMULATED, 8, 1) if small else (SPEED_AT, 64, 3)
    n_tokens = 48 if place.gpu is None else 512
    os.environ.update(place.env)
    output.with_suffix(".json").unlink(missing_ok=True)  # of an earlier run
    status = bench(
        [
            *("--serve", "--arms", "off", "stock", "ours", "--no-latency", "--port", str(place.port)),
            *("--num-prompts", str(n_prompts), "--repeats", str(repeats), "--max-new-tokens", str(n_tokens)),
            *("--concurrency", *map(str, concurrency), "--output", str(output), "--"),
            *("--model-path", str(place.pair.target), *place.flags(place.backends[0])),
            *("--speculative-algorithm", "DFLASH", "--speculative-draft-model-path", str(place.pair.draft)),
        ]
    )
    assert status == 0, "bench ended with an error; see checks.log after the line `-- speed`"
    summary = json.loads(output.with_suffix(".json").read_text())["summary"]
    shown = dict[int, list[str]]()
    for line in summary:
        shown.setdefault(line["concurrency"], []).append(f"{line['arm']} {line['tokens_per_s']['median']:.0f}")
    text = "; ".join(f"{c} at once: {', '.join(arms)}" for c, arms in shown.items())
    found(Finding(f"tokens/s, {text}", {"summary": summary}))
