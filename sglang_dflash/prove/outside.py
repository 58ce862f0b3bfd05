"""What a client of three servers sees: without speculation, SGLang's worker, ours."""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Sequence
from statistics import median
from time import perf_counter
from typing import Any

from sglang_dflash.bench.__main__ import main as bench
from sglang_dflash.prove import law, served
from sglang_dflash.prove.law import N_POSITIONS
from sglang_dflash.prove.machine import Place
from sglang_dflash.prove.record import Finding, require
from sglang_dflash.prove.served import Launch
from sglang_dflash.servers.server import Server
from sglang_dflash.tiny.pairs import ARMS, Arm

# A request draws its tokens from this; at 1 the tiny pairs are sure of nearly every one.
TEMPERATURE = 2.0
N_DRAWS, N_DRAWS_REHEARSED, DRAWN_AT_ONCE = 1200, 400, 8
N_ONE_TOKEN, N_ONE_TOKEN_ROUNDS = 256, 5
ONE_TOKEN_WITHIN = 1.1
SPEED_AT, SPEED_AT_REHEARSED = (1, 8, 16, 32), (1, 4)


def parity(attention: str, page_size: int) -> Callable[[Place], Finding]:
    """Greedy answers of SGLang's worker and of ours are those without speculation."""

    def check(place: Place) -> Finding:
        launch = Launch(place.main_pair, attention, page_size)
        asked = served.prompts(place, launch.pair)
        said = dict[Arm, dict[int, list[list[int]]]]()

        def collect(arm: Arm, server: Server) -> None:
            said[arm] = {c: told(server, asked, c, place) for c in (1, *served.CROWDS)}

        # The reference comes last, and is asked about differences while it is there.
        turns: Sequence[Sequence[Arm]] = [ARMS[::-1]] if place.side_by_side else [[arm] for arm in ARMS[::-1]]
        for arms in turns:
            with served.serving(place, launch, arms) as servers:
                for arm, server in servers.items():
                    collect(arm, server)
                if Arm.OFF in servers:
                    return judge_parity(place, launch, asked, said, served.served_gap(servers[Arm.OFF]))
        raise AssertionError("the reference was not served")

    return check


def one_token(place: Place) -> Finding:
    """Time of a step that verifies one token against decoding without speculation, one request, medians of rounds."""
    attention = place.backends[0]
    launch = Launch(place.main_pair, attention, env=(("SGLANG_DFLASH_WIDTHS", "1"), ("SGLANG_DFLASH_COPY", "off")))
    asked = served.prompts(place, launch.pair)[:1]
    ms = dict[Arm, float]()
    for arm in (Arm.OFF, Arm.PLUGIN):  # on a GPU each takes what memory is free
        with served.serving(place, launch, [arm]) as servers:
            ms[arm] = median(token_ms(servers[arm], asked) for _ in range(1 + N_ONE_TOKEN_ROUNDS))
    return judge_one_token(ms[Arm.OFF], ms[Arm.PLUGIN])


def token_ms(server: Server, asked: Sequence[Sequence[int]]) -> float:
    began = perf_counter()
    (answer,) = served.ask(server, asked, concurrency=1, n_new=N_ONE_TOKEN)
    return (perf_counter() - began) * 1e3 / len(answer.token_ids)


def judge_one_token(off_ms: float, ours_ms: float) -> Finding:
    """
    Raises:
        Failed: ours takes too much longer.
    """
    text = f"{ours_ms:.3f} ms a token, {off_ms:.3f} without speculation: {ours_ms / off_ms:.2f} times"
    return require(ours_ms <= ONE_TOKEN_WITHIN * off_ms, text, {"off_ms": off_ms, "ours_ms": ours_ms})


def told(server: Server, asked: Sequence[Sequence[int]], concurrency: int, place: Place) -> list[list[int]]:
    answers = served.ask(server, asked, concurrency=concurrency, n_new=served.n_new(place))
    return [answer.token_ids for answer in answers]


def judge_parity(
    place: Place,
    launch: Launch,
    asked: Sequence[Sequence[int]],
    said: dict[Arm, dict[int, list[list[int]]]],
    gap: Callable[[Sequence[int], int], float],
) -> Finding:
    """Ours must agree; of SGLang's worker it is told."""
    reference, allowed = said[Arm.OFF][1], served.tie(place, launch.attention)
    numbers, bad = dict[str, Any](), []
    for arm, by_crowd in said.items():
        for concurrency, answers in by_crowd.items():
            parted = served.apart(asked, reference, answers, gap)
            beyond = [one for one in parted if one.gap > allowed]
            bad += [f"{arm} with {concurrency} at once: {one}" for one in beyond if arm is Arm.PLUGIN]
            numbers[f"{arm} {concurrency}"] = {
                "equal": len(answers) - len(parted),
                "of": len(answers),
                "beyond_a_tie": len(beyond),
                "apart": list(map(str, parted)),
            }
    shown = []
    for arm in ARMS:
        rows = [row for name, row in numbers.items() if name.startswith(f"{arm} ")]
        equal, of, beyond = (sum(row[field] for row in rows) for field in ("equal", "of", "beyond_a_tie"))
        shown.append(f"{arm} {equal} of {of}" + (f" ({beyond} beyond a tie)" if beyond else ""))
    text = f"equal to one request at a time without speculation: {', '.join(shown)}"
    return require(not bad, "; ".join([text, *bad[:1]]), numbers)


def sampling_law(place: Place) -> Finding:
    """First tokens above temperature 0 are distributed as without speculation."""
    attention = place.backends[0]
    launch = Launch(place.main_pair, attention)
    prompt = served.prompts(place, launch.pair)[0]
    n = N_DRAWS_REHEARSED if place.gpu is None else N_DRAWS
    drawn = dict[Arm, list[law.Draw]]()
    for arms in [(Arm.OFF, Arm.PLUGIN)] if place.side_by_side else [(Arm.OFF,), (Arm.PLUGIN,)]:
        with served.serving(place, launch, arms) as servers:
            for arm, server in servers.items():
                drawn[arm] = draws(server, prompt, n)
    apart = law.violations(drawn[Arm.OFF], drawn[Arm.PLUGIN])
    kinds = len(set(drawn[Arm.OFF]))
    numbers = {"draws": n, "kinds": kinds, "apart": list(map(str, apart)), "detectable": law.detectable(0.5, n)}
    assert kinds > N_POSITIONS, f"{kinds} kinds of answers in {n} draws; the comparison could not fail"
    cells = len(law.cells(drawn[Arm.OFF], drawn[Arm.PLUGIN]))
    text = f"{n} draws each, {cells} cells, {len(apart)} further apart than {law.BOUND:.0f} standard errors"
    return require(not apart, text + (f"; {apart[0]}" if apart else ""), numbers)


def draws(server: Server, prompt: Sequence[int], n: int) -> list[law.Draw]:
    """The first tokens of `n` answers, each a request of its own."""
    answers = server.generate_many(
        [prompt] * n, concurrency=DRAWN_AT_ONCE, temperature=TEMPERATURE, max_new_tokens=N_POSITIONS
    )
    return [tuple(answer.token_ids) for answer in answers]


def speed(place: Place) -> Finding:
    """`sglang_dflash.bench` over off, stock and ours."""
    pair, attention = place.main_pair, place.backends[0]
    models, output = place.pairs[pair], place.folder / "speed"
    flags = [*("--model-path", str(models.target)), *place.flags(pair, attention)]
    flags += ["--speculative-algorithm", "DFLASH", "--speculative-draft-model-path", str(models.draft)]
    small = place.gpu is None or place.short
    concurrency, n_prompts, repeats = (SPEED_AT_REHEARSED, 8, 1) if small else (SPEED_AT, 64, 3)
    n_tokens = 48 if place.gpu is None else 96 if place.side_by_side else 512
    os.environ.update(place.env(attention))
    bench(
        [
            *("--serve", "--arms", "off", "stock", "ours", "--no-latency", "--port", str(place.port)),
            *("--num-prompts", str(n_prompts), "--repeats", str(repeats), "--max-new-tokens", str(n_tokens)),
            *("--concurrency", *map(str, concurrency), "--output", str(output), "--", *flags),
        ]
    )
    summary = json.loads(output.with_suffix(".json").read_text())["summary"]
    shown = [
        f"{line['concurrency']} at once: " + ", ".join(one_arm(other) for other in summary if same(line, other))
        for line in summary
        if line["arm"] == Arm.OFF
    ]
    return Finding(f"tokens/s, {'; '.join(shown)}", {"summary": summary})


def same(line: dict[str, Any], other: dict[str, Any]) -> bool:
    return line["concurrency"] == other["concurrency"]


def one_arm(line: dict[str, Any]) -> str:
    return f"{line['arm']} {line['tokens_per_s']['median']:.0f}"
