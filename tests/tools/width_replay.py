"""Replay recorded acceptance with the width policy, and with verify widths per request.

    python -m tests.tools.width_replay

First table: tokens per second of the policy, relative to the best fixed width. Second table: the same for short answers
after each other set of the pair, mean and worst. Third table: tokens per second with finer widths, and with a width for
each request, relative to the default widths. In the third table each answer's mean acceptance is known before, and the
last columns show the set that loses most.
"""

from collections.abc import Iterator, Sequence
from statistics import mean

from sglang_dflash.engine.width.policy import Fixed
from tests.tools.replay.replay import Traffic, adaptive, after, best_fixed, ragged, traces, uniform, with_policy
from tests.tools.replay.times import MACHINES, Machine

SIZES, LARGE_SIZES = (1, 8), (8, 16, 32, 64)
MIXES = {  # sets of a mix, by pair; each set has equally many requests
    "SmolLM2": (
        ("edits", "chats"),
        ("humaneval", "chats"),
        ("edits", "random words"),
        ("edits", "humaneval", "chats", "summaries"),
    ),
    "tiny": (("synthetic", "hard"), ("repeating", "synthetic", "hard")),
}


def fitting(widths: Sequence[int], traffic: Traffic) -> list[int]:
    return [width for width in widths if width <= traffic.block]


def policy_rows() -> Iterator[tuple[Machine, str, int, int, float, float]]:
    """Yield machine, set, number of requests, best fixed width, its rate over no speculation, the policy's over it."""
    for machine in MACHINES:
        for pair, sets in traces().items():
            for name in sets:
                for n in SIZES:
                    traffic = Traffic(sets, [name] * n)
                    widths = fitting(machine.widths, traffic)
                    width, best = best_fixed(traffic, machine, widths)
                    policy = with_policy(traffic, machine, adaptive(machine, n, widths))
                    off = 1000 * n / machine.off(n)
                    yield machine, f"{pair}, {name}", n, width, best.rate / off, policy.rate / best.rate


def change_rows() -> Iterator[tuple[Machine, str, int, int, list[float]]]:
    """Yield machine, set, number of requests, best fixed width, and the policy's rate over it after each other set."""
    for machine in MACHINES:
        for pair, sets in traces().items():
            for name in sets:
                for n in SIZES:
                    traffic = Traffic(sets, [name] * n).short()
                    others = [Traffic(sets, [other] * n).short() for other in sets if other != name]
                    widths = fitting(machine.widths, max((traffic, *others), key=lambda one: one.block))
                    width, _ = best_fixed(traffic, machine, widths)
                    rates = [
                        after(other, traffic, machine, adaptive(machine, n, widths)).rate
                        / after(other, traffic, machine, Fixed(width)).rate
                        for other in others
                    ]
                    yield machine, f"{pair}, {name}", n, width, rates


def ragged_rows() -> Iterator[tuple[Machine, str, int, list[float]]]:
    """Yield machine, mix, number of requests, and four ratios to default widths: see the module's docstring."""
    for machine in MACHINES:
        for pair, mixes in MIXES.items():
            for mix in mixes:
                for n in LARGE_SIZES:
                    traffic = Traffic(traces()[pair], [mix[i % len(mix)] for i in range(n)])
                    base = uniform(traffic, machine, fitting(machine.widths, traffic))
                    finer = uniform(traffic, machine, fitting(machine.finer, traffic))
                    own = ragged(traffic, machine, [traffic.block])
                    slowest = [min(one.by_set[name] / base.by_set[name] for name in mix) for one in (finer, own)]
                    yield (
                        machine,
                        f"{pair}: {', '.join(mix)}",
                        n,
                        [finer.rate / base.rate, own.rate / base.rate, *slowest],
                    )


def main() -> None:
    print("| times of | set | requests | best fixed width | over no speculation | policy over it |")
    print("|---|---|---:|---:|---:|---:|")
    for machine, name, n, width, over_off, ratio in policy_rows():
        print(f"| {machine.name} | {name} | {n} | {width} | {over_off:.2f} | {ratio:.3f} |")
    print("\n| times of | set | requests | best fixed width | policy over it, mean | worst |")
    print("|---|---|---:|---:|---:|---:|")
    for machine, name, n, width, changed in change_rows():
        print(f"| {machine.name} | {name} | {n} | {width} | {mean(changed):.3f} | {min(changed):.3f} |")
    print(
        "\n| times of | mix | requests | finer widths | per request | slowest set, finer | slowest set, per request |"
    )
    print("|---|---|---:|---:|---:|---:|---:|")
    for machine, name, n, ratios in ragged_rows():
        print(f"| {machine.name} | {name} | {n} | {' | '.join(f'{ratio:.2f}' for ratio in ratios)} |")


if __name__ == "__main__":
    main()
