"""All checks, those worth most first."""

from __future__ import annotations

from sglang_dflash.prove import draft_graph, environment, inside, ops, outside
from sglang_dflash.prove.machine import Place
from sglang_dflash.prove.record import Check, Needs

WHOLE, EVERY, COPIES, KERNELS = "whole blocks", "every width", "copies", "kernels"


def checks(place: Place) -> list[Check]:
    """Those of a place's form, whether it can run them or not."""
    made = [
        Check("environment", "versions, entry points, hooks and names of SGLang are as needed", 2,
              environment.environment, short=True),
        Check("drafts", "drafts are the same before and after the target's replay, at every captured batch size", 5,
              inside.drafts, short=True, process=WHOLE),
        Check("steps", "a step commits what it commits in plain torch, alone and in a crowd", 3, inside.steps,
              short=True, process=WHOLE),
        Check("answers", "greedy answers are plain torch's", 1, inside.answers, short=True, process=WHOLE),
        Check("padding", "nothing that is not finite in rows of no request, nor in the padding slot", 1, inside.padding,
              short=True, process=WHOLE),
        Check("memory", "pools take what the capacity report counts", 1, inside.memory, short=True, process=WHOLE),
        Check("stages", "time of every stage of a step", 1, inside.stages, short=True, process=WHOLE),
        Check("kernels", "each kernel computes its definition", 4, ops.definitions, short=True, process=KERNELS),
        Check("bandwidth", "time of each kernel, and its share of the bandwidth", 3, ops.bandwidth, Needs.GPU,
              short=True, process=KERNELS, expected=ops.EXPECTED),
        Check("draft graph", "a captured draft forward reads the target's head once for all requests", 2,
              draft_graph.check, Needs.GPU, short=True,
              expected="H200: 1.4 / 1.5 / 4.5 ms; with a head read per request 1.4 / 5.7 / 22"),
        *parities(place),
        Check("drafts, every width", "the same as `drafts`, where widths change", 8, inside.drafts_at_every_width,
              process=EVERY),
        Check("padding, every width", "the same as `padding`, where widths change", 1, inside.padding_at_every_width,
              process=EVERY),
        Check("drafts, copies", "the same as `drafts`, where the text continues them", 4, inside.drafts_with_copies,
              process=COPIES),
        Check("steps, copies", "the same as `steps`, in conversations that repeat themselves", 3,
              inside.steps_with_copies, process=COPIES),
        Check("answers, copies", "the same as `answers`, there", 1, inside.answers_with_copies, process=COPIES),
        Check("one token", "a step of one token costs little more than decoding without speculation", 6,
              outside.one_token, Needs.GPU, short=True, expected=f"at most {outside.ONE_TOKEN_WITHIN:.2f} times"),
        Check("law", "above temperature 0 tokens are drawn as without speculation", 6, outside.sampling_law),
        Check("speed", "tokens per second, off, stock and ours, over concurrency", 15, outside.speed),
    ]  # fmt: skip
    return [check for check in made if check.short or not place.short]


def parities(place: Place) -> list[Check]:
    """One for each attention backend and page size; the short form has the last page size of the first backend."""
    tried = [(attention, size) for attention in place.backends for size in place.page_sizes(attention)]
    first = place.backends[0], place.page_sizes(place.backends[0])[-1]
    return [
        Check(
            f"parity {attention} page {size}",
            "greedy answers are the same off, stock and ours",
            6,
            outside.parity(attention, size),
            short=(attention, size) == first,
        )
        for attention, size in tried
    ]


def processes(checks: list[Check]) -> list[list[Check]]:
    """Checks that share a process, in the order of their first."""
    together = dict[str, list[Check]]()
    for check in checks:
        together.setdefault(check.process or check.name, []).append(check)
    return list(together.values())
