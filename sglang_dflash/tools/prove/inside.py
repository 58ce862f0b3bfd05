"""Checks of servers whose steps the probe records (`probe.py`), and of their answers.

Such a server is called watched. Its answers are compared with those of the PyTorch reference.
"""

from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

import pytest

from sglang_dflash.engine.memory.sizes import kept_window, ring_slots
from sglang_dflash.flags import Worker
from sglang_dflash.pairs.tiny.workloads import answered_conversations, held_out
from sglang_dflash.tools.capacity import geometry
from sglang_dflash.tools.capacity.division import Serving, capacity
from sglang_dflash.tools.prove import served
from sglang_dflash.tools.prove.machine import Gpu, Place
from sglang_dflash.tools.prove.plugin import Finding, Found, check
from sglang_dflash.tools.prove.served import Draw, Reference, Watched

STEPS_WITHIN = 0.1  # relative tolerance of the acceptance length on a GPU, because rounding differs
BYTES_WITHIN = 0.02  # relative tolerance of pool sizes, because of alignment and a page of padding
FP32 = 4  # bytes
SIZE = ("requests", "width")  # keys in an entry of the probe's `steps`: batch size and verify width
STAGES = {"step", "plan", "draft", "copy", "verify", "choose", "accept", "commit", "append"}


class Setting(NamedTuple):
    """Setting of a watched server: the prompts, and an environment that determines drafts and widths."""

    title: str
    where: str
    env: Mapping[str, str]
    draw: Draw = held_out


# With this environment a server drafts and verifies the same tokens as the PyTorch reference.
WHOLE_BLOCKS = {"SGLANG_DFLASH_WIDTHS": "fixed", "SGLANG_DFLASH_COPY": "off"}
WITH_COPIES = WHOLE_BLOCKS | {"SGLANG_DFLASH_COPY": "on"}
SETTINGS = {
    "whole_blocks": Setting("", "", WHOLE_BLOCKS),
    "every_width": Setting("every width", "where widths change", {"SGLANG_DFLASH_WIDTHS": "random"}),
    "copies": Setting("copies", "in conversations that repeat themselves", WITH_COPIES, answered_conversations),
}


def watching(name: str, proves: str, **minutes: float) -> pytest.MarkDecorator:
    """Mark a check that runs once for each setting in `minutes`: time limits by key of `SETTINGS`."""
    params = []
    for key, limit in minutes.items():
        title, where, *_ = SETTINGS[key]
        facts = (f"{name}, {title}", f"the same as `{name}`, {where}") if title else (name, proves)
        params.append(pytest.param(key, marks=check(*facts, limit, short=not title), id=key))
    return pytest.mark.parametrize("watched", params, indirect=True)


@pytest.fixture(scope="module")
def watched(place: Place, request: pytest.FixtureRequest) -> Watched:
    setting = SETTINGS[request.param]
    return served.watch(place, setting.env, setting.draw)


@pytest.fixture(scope="module")
def reference(place: Place, watched: Watched) -> Reference:
    """Return the PyTorch reference's answers, computed after the watched server has ended."""
    return served.by_plain_torch(place, watched.prompts, copies=watched.copies)


@watching("drafts", "drafts are the same before and after the target's replay, at every captured batch size",
          whole_blocks=12, every_width=8, copies=8)  # fmt: skip
def check_drafts(watched: Watched, found: Found) -> None:
    rows = watched.dflash["probe"]["steps"]
    bad = [row for row in rows if row["changed"]]
    n_steps, sizes, widths = sum(row["steps"] for row in rows), *({row[key] for row in rows} for key in SIZE)
    shown = ", ".join(map(str, sorted(widths)))
    text = f"no draft changed in {n_steps} steps of {min(sizes)} to {max(sizes)} requests, widths {shown}"
    if bad:
        worst = max(bad, key=lambda row: row["changed"])
        text = (
            f"{len(bad)} of {len(rows)} sizes have other drafts after the target's replay, most with "
            f"{worst['requests']} requests at width {worst['width']}: {worst['changed']} tokens in "
            f"{worst['steps']} steps"
        )
    captured = bool(watched.dflash["probe"]["captured"])
    text = text if captured else "no graph of the draft was captured; leave CUDA graphs enabled in --flags"
    found(Finding(text, {"steps": rows}, captured and not bad))


@watching(
    "steps",
    "the acceptance length equals the PyTorch reference's, for one request and for several",
    whole_blocks=8,
    copies=8,
)
def check_steps(place: Place, watched: Watched, reference: Reference, found: Found) -> None:
    ours = {c: [served.histogram(one) for one in answers] for c, answers in watched.answers.items()}
    plain, *measured = map(served.acceptance_length, (reference.histograms, *ours.values()))
    shown = ", ".join(f"{length:.3f} with {c} at once" for c, length in zip(ours, measured, strict=True))
    equal = [a == b for answers in ours.values() for a, b in zip(answers, reference.histograms, strict=True)]
    numbers = {"plain_torch": round(plain, 4), "served": dict(zip(ours, (round(x, 4) for x in measured), strict=True))}
    near = all(abs(length / plain - 1) <= STEPS_WITHIN for length in measured)
    equal_ones = f"{sum(equal)} of {len(equal)} answers have equal counts"
    text = f"{plain:.3f} tokens a step by the PyTorch reference, {shown}; {equal_ones}"
    found(Finding(text, numbers, all(equal) if place.exact else near))


@watching("answers", "greedy answers equal the PyTorch reference's", whole_blocks=8, copies=8)
def check_answers(place: Place, watched: Watched, reference: Reference, found: Found) -> None:
    tie = served.near_tie(place)
    tokens = {c: [one.token_ids for one in answers] for c, answers in watched.answers.items()}
    compared = {c: served.compare(watched.prompts, reference, answers, tie) for c, answers in tokens.items()}
    bad = [text for one in compared.values() for text in one.beyond_a_tie]
    text = ", ".join(f"{one.equal} of {one.of} with {c} at once" for c, one in compared.items())
    if tie and not bad and any(one.equal < one.of for one in compared.values()):
        text += f"; the others first differ at a near tie, where both tokens are within {tie} nats of the likeliest"
    found(Finding("; ".join([text, *bad[:1]]), {c: one._asdict() for c, one in compared.items()}, not bad))


@watching("padding", "all values in padded rows and in the padding slot are finite",
          whole_blocks=6, every_width=6)  # fmt: skip
def check_padding(watched: Watched, found: Found) -> None:
    rows, slot = watched.dflash["probe"]["steps"], watched.dflash["probe"]["padding_slot"]
    n_padded, n_bad, n_real = (sum(row[key] for row in rows) for key in ("padded", "not_finite", "not_finite_real"))
    text = (
        f"values that are not finite: {n_bad} in {n_padded} padded rows, {n_real} in rows of requests, "
        f"{slot['target']} and {slot['draft']} in the padding slots of target and draft"
    )
    if not n_padded:
        pytest.skip("no batch was padded; leave CUDA graphs enabled, and serve at least 10 requests at once")
    holds = not (n_bad or n_real or slot["target"] or slot["draft"])
    found(Finding(text, {"steps": rows, "padding_slot": slot}, holds))


@watching("stages", "time of every stage of a step", whole_blocks=6)
def check_stages(watched: Watched, found: Found) -> None:
    rows = watched.dflash["probe"]["stages"]
    one = {row["stage"]: [row["host_ms"], row["device_ms"]] for row in rows if row["requests"] == 1}
    missing = ", ".join(sorted(STAGES - set(one)))
    shown = (f"{name} {' / '.join(f'{ms:.2f}' for ms in times if ms is not None)}" for name, times in one.items())
    text = f"ms host (/ device), one request: {', '.join(shown)}" if not missing else f"no times of {missing}"
    found(Finding(text, {"stages": rows}, not missing))


@watching("memory", "pools have the sizes of the capacity report", whole_blocks=6)
def check_memory(place: Place, watched: Watched, found: Found) -> None:
    allocated, counted = watched.dflash["probe"]["bytes"], count(place, watched)
    off = {name: allocated[name] / n_bytes - 1 for name, n_bytes in counted.items()}
    shown = [f"{name.replace('_', ' ')} {allocated[name] / 2**20:.1f} MiB ({x:+.1%})" for name, x in off.items()]
    numbers: dict[str, Any] = {"bytes": allocated, "counted": counted}
    if place.gpu is not None and place.is_own:
        numbers["counted_tokens"] = n = counted_tokens(place.gpu, place, watched)
        shown.append(f"tokens of K and V {allocated['target_tokens']:,}, counted {n:,}")
    found(Finding(", ".join(shown), numbers, all(abs(share) <= BYTES_WITHIN for share in off.values())))


def count(place: Place, watched: Watched) -> dict[str, int]:
    """Return the bytes of each pool by the capacity report's formulas."""
    pools, info, widest = watched.dflash["probe"]["bytes"], watched.info, watched.dflash["widest"]
    if not Path(place.pair.target).is_dir():
        pytest.skip(f"{place.pair.target} is no directory with a config.json to read; give --model-path a directory")
    try:
        target, draft = geometry.read_target(str(place.pair.target)), geometry.read_draft(str(place.pair.draft))
    except ValueError as error:  # not every model that can be served has computed sizes
        pytest.skip(str(error))
    ranks, page, in_fp32 = info["tp_size"], pools["page_size"], place.exact
    attention = [replace(one.attention, itemsize=FP32) if in_fp32 else one.attention for one in (target, draft)]
    per_token, draft_per_token = (one.bytes_per_token(ranks) for one in attention)
    draft_tokens = pools["target_tokens"]
    if window := kept_window(info.get("speculative_draft_window_size"), draft.window):
        draft_tokens = (pools["requests"] + 1) * ring_slots(window, widest, page)
    counted = {
        "target_kv": (pools["target_tokens"] + page) * per_token,
        "draft_kv": (draft_tokens + page) * draft_per_token,
    }
    if target.recurrent:
        rank = target.recurrent.shard(ranks)
        rank = replace(rank, conv_itemsize=FP32) if in_fp32 else rank
        counted["state_bytes"] = pools["states"] * rank.state_bytes
        counted["block_bytes"] = pools["block_rows"] * rank.record_bytes(widest)
    return counted


def counted_tokens(gpu: Gpu, place: Place, watched: Watched) -> int:
    """Return the capacity report's number of tokens of K and V for this GPU, if nothing else uses its memory."""
    info, dflash = watched.info, watched.dflash
    target, draft = geometry.read_target(str(place.pair.target)), geometry.read_draft(str(place.pair.draft))
    context = info.get("context_length") or target.context_length
    serving = Serving(
        mem_fraction=info["mem_fraction_static"],
        block_size=dflash["block_size"],
        context=context,
        tp_size=info["tp_size"],
        window=info.get("speculative_draft_window_size"),
        max_requests=dflash["probe"]["bytes"]["requests"],
        page_size=info["page_size"],
        copies=bool(dflash["copies"]),
        wider=dflash["widest"],
    )
    target = replace(target, context_length=context)
    return capacity(target, draft, serving, gpu.memory / 2**30, Worker.PLUGIN).n_tokens
