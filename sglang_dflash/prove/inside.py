"""What the probe saw inside the scheduler of a server of ours, beside what plain torch says of the same prompts."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

from sglang_dflash.capacity import geometry
from sglang_dflash.capacity import report as capacity_report
from sglang_dflash.flags import Worker
from sglang_dflash.memory.sizes import ring_slots
from sglang_dflash.prove import served
from sglang_dflash.prove.machine import DENSE, OWN, Gpu, Place
from sglang_dflash.prove.record import Failed, Finding, Once, Skipped, require
from sglang_dflash.prove.served import Expected, Launch, Torch, Watched
from sglang_dflash.tiny.workloads import answered_conversations

STEPS_WITHIN = 0.1  # of tokens per step, where rounding differs
BYTES_WITHIN = 0.02  # a page of padding, alignment
EVERY_WIDTH = (("SGLANG_DFLASH_WIDTHS", "random"),)
FP32 = 4


def watch_whole_blocks(place: Place) -> Watched:
    launch = Launch(place.main_pair, place.backends[0], env=tuple(served.WHOLE_BLOCKS.items()))
    return served.watch(place, launch)


def watch_every_width(place: Place) -> Watched:
    return served.watch(place, Launch(place.main_pair, place.backends[0], env=EVERY_WIDTH))


def watch_copies(place: Place) -> Watched:
    launch = Launch(place.main_pair, place.backends[0], env=tuple(served.WITH_COPIES.items()))
    return served.watch(place, launch, answered_conversations)


def by_plain_torch(place: Place) -> tuple[Torch, list[Expected]]:
    return generate(place, whole_blocks(place), copies=False)


def by_plain_torch_with_copies(place: Place) -> tuple[Torch, list[Expected]]:
    return generate(place, copying(place), copies=True)


def generate(place: Place, watched: Watched, *, copies: bool) -> tuple[Torch, list[Expected]]:
    """Of the prompts that the watched server was asked; it has ended by now."""
    torch = Torch(place, place.main_pair)
    return torch, [torch.generate(prompt, served.n_new(place), copies=copies) for prompt in watched.prompts]


whole_blocks, every_width, copying = Once(watch_whole_blocks), Once(watch_every_width), Once(watch_copies)
plain_torch, plain_torch_with_copies = Once(by_plain_torch), Once(by_plain_torch_with_copies)


# -- drafts and padding --------------------------------------------------------------------------------------------


def drafts(place: Place) -> Finding:
    return judge_drafts(whole_blocks(place).dflash["probe"])


def drafts_with_copies(place: Place) -> Finding:
    return judge_drafts(copying(place).dflash["probe"])


def drafts_at_every_width(place: Place) -> Finding:
    return judge_drafts(every_width(place).dflash["probe"])


def judge_drafts(probe: dict[str, Any]) -> Finding:
    rows = probe["drafts"]
    if not probe["captured"]:
        raise Failed("no graph of the draft was captured", {"drafts": rows})
    bad = [row for row in rows if row["changed"]]
    n_steps, widths = sum(row["steps"] for row in rows), sorted({row["width"] for row in rows})
    sizes = sorted({row["requests"] for row in rows})
    where = f"{n_steps} steps of {sizes[0]} to {sizes[-1]} requests, widths {', '.join(map(str, widths))}"
    if bad:
        worst = max(bad, key=lambda row: row["changed"])
        text = (
            f"{len(bad)} of {len(rows)} sizes have other drafts after the target's replay, most with "
            f"{worst['requests']} requests at width {worst['width']}: {worst['changed']} in {worst['steps']} steps"
        )
        raise Failed(text, {"drafts": rows})
    return Finding(f"no draft changed in {where}", {"drafts": rows})


def padding(place: Place) -> Finding:
    return judge_padding(whole_blocks(place).dflash["probe"])


def padding_at_every_width(place: Place) -> Finding:
    return judge_padding(every_width(place).dflash["probe"])


def judge_padding(probe: dict[str, Any]) -> Finding:
    rows, slot = probe["rows"], probe["padding_slot"]
    n_padded, n_bad = sum(row["padded"] for row in rows), sum(row["not_finite"] for row in rows)
    n_real = sum(row["not_finite_real"] for row in rows)
    numbers = {"rows": rows, "padding_slot": slot}
    if not n_padded:
        raise Failed("no replay had a padded row, so nothing was looked at", numbers)
    text = (
        f"{n_padded} padded rows: {n_bad} values that are not finite; requests' own rows {n_real}; "
        f"padding slot {slot['target']} in the target's K and V, {slot['draft']} in the draft's"
    )
    return require(not (n_bad or n_real or slot["target"] or slot["draft"]), text, numbers)


# -- beside plain torch --------------------------------------------------------------------------------------------


def answers(place: Place) -> Finding:
    return judge_answers(place, whole_blocks(place), *plain_torch(place))


def answers_with_copies(place: Place) -> Finding:
    return judge_answers(place, copying(place), *plain_torch_with_copies(place))


def judge_answers(place: Place, watched: Watched, torch: Torch, expected: list[Expected]) -> Finding:
    allowed, numbers, bad = served.tie(place, watched.launch.attention), {}, []
    for concurrency, said in watched.answers.items():
        parted = served.apart(
            watched.prompts, [one.token_ids for one in expected], [one.token_ids for one in said], torch.gap
        )
        bad += [one for one in parted if one.gap > allowed]
        numbers[str(concurrency)] = {"equal": len(said) - len(parted), "of": len(said), "apart": list(map(str, parted))}
    counts = ", ".join(f"{row['equal']} of {row['of']} with {c} at once" for c, row in numbers.items())
    excuse = f"; the others part where two tokens are within {allowed} nats" if allowed else ""
    text = f"{counts}{excuse}" if not bad else f"{counts}; {bad[0]}"
    return require(not bad, text, numbers)


def steps(place: Place) -> Finding:
    return judge_steps(place, whole_blocks(place), plain_torch(place)[1])


def steps_with_copies(place: Place) -> Finding:
    return judge_steps(place, copying(place), plain_torch_with_copies(place)[1])


def judge_steps(place: Place, watched: Watched, expected: list[Expected]) -> Finding:
    theirs = [one.histogram for one in expected]
    ours = {c: [served.histogram(one) for one in said] for c, said in watched.answers.items()}
    plain = served.committed_per_step(theirs)
    measured = {c: served.committed_per_step(histograms) for c, histograms in ours.items()}
    numbers = {"plain_torch": round(plain, 4), "served": {str(c): round(value, 4) for c, value in measured.items()}}
    shown = ", ".join(f"{value:.3f} with {c} at once" for c, value in measured.items())
    if place.gpu is None:
        equal = sum(a == b for histograms in ours.values() for a, b in zip(histograms, theirs, strict=True))
        of = sum(map(len, ours.values()))
        return require(
            equal == of, f"{plain:.3f} tokens a step by plain torch, {shown}; {equal} of {of} answers alike", numbers
        )
    holds = all(abs(value / plain - 1) <= STEPS_WITHIN for value in measured.values())
    return require(holds, f"{plain:.3f} tokens a step by plain torch, {shown}", numbers)


# -- times and bytes -----------------------------------------------------------------------------------------------


def stages(place: Place) -> Finding:
    rows = whole_blocks(place).dflash["probe"]["stages"]
    one = {row["stage"]: row for row in rows if row["requests"] == 1}
    if missing := {"step", "plan", "draft", "copy", "verify", "choose", "accept", "commit", "append"} - set(one):
        raise Failed(f"no times of {', '.join(sorted(missing))}", {"stages": rows})
    shown = [f"{name} {row['host_ms']:.2f}{device(row)}" for name, row in one.items()]
    unit = "host" if place.gpu is None else "host / device"
    return Finding(f"ms {unit}, one request: {', '.join(shown)}", {"stages": rows})


def device(row: dict[str, Any]) -> str:
    return "" if row["device_ms"] is None else f" / {row['device_ms']:.2f}"


def memory(place: Place) -> Finding:
    """Bytes of the pools as they were allocated, against the formulas of the capacity report."""
    watched = whole_blocks(place)
    found, counted = watched.dflash["probe"]["bytes"], count(place, watched)
    rows = {name: {"allocated": found[name], "counted": counted[name]} for name in counted}
    off = {name: row["allocated"] / row["counted"] - 1 for name, row in rows.items()}
    shown = ", ".join(
        f"{name.replace('_', ' ')} {rows[name]['allocated'] / 2**20:.1f} MiB ({share:+.1%})"
        for name, share in off.items()
    )
    numbers: dict[str, Any] = {"bytes": found, "counted": rows}
    if place.gpu is not None and watched.launch.pair == OWN:
        numbers["tokens"] = {"served": found["target_tokens"], "counted": counted_tokens(place.gpu, watched, place)}
        shown += f"; tokens of K and V {found['target_tokens']:,}, counted {numbers['tokens']['counted']:,}"
    return require(all(abs(share) <= BYTES_WITHIN for share in off.values()), shown, numbers)


def counted_tokens(gpu: Gpu, watched: Watched, place: Place) -> int:
    """By the capacity report, for a card of which nothing is taken before the launch."""
    info, models = watched.info, place.pairs[watched.launch.pair]
    flags = {
        "--model": models.target,
        "--draft": models.draft,
        "--gpu-memory": gpu.memory / 2**30,
        "--block": watched.dflash["block_size"],
        "--widest": watched.dflash["widest"],
        "--copy": "auto" if watched.dflash["copies"] else "off",
        "--context-length": info.get("context_length"),
        "--tp": info["tp_size"],
        "--mem-fraction": info["mem_fraction_static"],
        "--max-running-requests": watched.dflash["probe"]["bytes"]["requests"],
        "--page-size": info["page_size"],
        "--window": info.get("speculative_draft_window_size"),
    }
    words = [str(word) for pair in flags.items() if pair[1] is not None for word in pair]
    report = capacity_report.answer(capacity_report.arguments().parse_args(words))
    return report.results[Worker.PLUGIN].n_tokens


def count(place: Place, watched: Watched) -> dict[str, int]:
    found, info, models = watched.dflash["probe"]["bytes"], watched.info, place.pairs[watched.launch.pair]
    if not Path(models.target).is_dir():
        raise Skipped(f"{models.target} is no directory, so its config.json is not here to be counted")
    target, draft = geometry.read_target(str(models.target)), geometry.read_draft(str(models.draft))
    ranks, widest = info["tp_size"], watched.dflash["widest"]
    wide = place.exact(watched.launch.attention) and watched.launch.pair != OWN  # served in fp32
    attention = [replace(one.attention, itemsize=FP32) if wide else one.attention for one in (target, draft)]
    per_token, draft_per_token = (one.bytes_per_token(ranks) for one in attention)
    page, window = found["page_size"], info.get("speculative_draft_window_size") or draft.window
    draft_tokens = found["target_tokens"]
    if window:
        draft_tokens = (found["requests"] + 1) * ring_slots(window, widest, page)
    counted = {
        "target_kv": (found["target_tokens"] + page) * per_token,
        "draft_kv": (draft_tokens + page) * draft_per_token,
    }
    if target.recurrent and watched.launch.pair != DENSE:
        rank = target.recurrent.shard(ranks)
        rank = replace(rank, conv_itemsize=FP32) if wide else rank
        counted["state_bytes"] = found["states"] * rank.state_bytes
        counted["block_bytes"] = found["block_rows"] * rank.record_bytes(widest)
    return counted
