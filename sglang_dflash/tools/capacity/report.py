"""Report on how many requests a card holds, before anything is bought, downloaded or launched.

    sglang-dflash check --model Qwen3.5-27B --gpu-memory 140.4
    sglang-dflash check --model DIR --draft DIR --gpu-memory 80 --context 32768 --tp 2 --json

The numbers are computed for this plugin's worker and for SGLang's built-in DFLASH worker. Their sources are config.json
files and, if the target's folder has them, the headers or the index of its safetensors files.
"""

import argparse
import dataclasses
import json
import sys
from bisect import bisect_left
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, NamedTuple

from rich import box
from rich.console import Console
from rich.table import Table

from sglang_dflash.engine.memory.sizes import MAX_REQUESTS
from sglang_dflash.flags import Worker
from sglang_dflash.tools.capacity import geometry
from sglang_dflash.tools.capacity import known_models as models
from sglang_dflash.tools.capacity.division import (
    GIB,
    MIB,
    Bound,
    Capacity,
    DraftSizes,
    Serving,
    TargetSizes,
    capacity,
    heads,
)
from sglang_dflash.tools.capacity.fraction import default_mem_fraction
from sglang_dflash.tools.capacity.options import arguments, page_size, radix_states, uncounted

RATIOS = [tenth / 10 for tenth in range(1, 101)]  # tried values of --mamba-full-memory-ratio
TP_SIZES = (2, 4, 8)
LIMITS = {"--max-total-tokens": "max_tokens", "--max-mamba-cache-size": "n_states"}  # flag -> field of `Serving`
SMALL_CHUNK, SMALL_BATCH = 2048, 8  # if no request fits, these are tried: tokens of a prefill chunk, requests
COUNTED = {  # flag that `lifts` tries for a small card -> field of `Serving`
    "--mem-fraction-static": "mem_fraction",
    "--max-running-requests": "max_requests",
    "--mamba-full-memory-ratio": "mamba_ratio",
}
MOST = 4097  # tried values of --max-running-requests are below it
WINDOW = 4096  # tried value of --speculative-draft-window-size
MORE = "for more, raise --mem-fraction-static, use more or larger cards, or lower --context"
NAMES = {Worker.PLUGIN: "sglang-dflash", Worker.STOCK: "SGLang's DFLASH"}


class Report(NamedTuple):
    """Models, launch settings and memory of a card, and the computed capacity with each worker.

    Attributes:
        not_counted: sentences about flags that were given and are not counted.
    """

    target: TargetSizes
    draft: DraftSizes
    serving: Serving
    card_gib: float
    results: dict[Worker, Capacity]
    not_counted: list[str]


def main(argv: Sequence[str]) -> int:
    """Print the report. Return 1 if no request fits with this plugin's worker, or nothing can be computed, else 0."""
    options = arguments().parse_args(argv)
    try:
        report = answer(options)
    except ValueError as error:
        print(f"check: {error}", file=sys.stderr)
        return 1
    if options.json:
        print(json.dumps(document(report)))
    else:
        console = Console(highlight=False, soft_wrap=True)
        console.print(table(report))
        for line in sentences(report):
            console.print(line, markup=False)
    return 0 if report.results[Worker.PLUGIN].requests else 1


def answer(options: argparse.Namespace) -> Report:
    """Compute the report.

    Raises:
        ValueError: a model is unknown, its memory cannot be computed, or flags do not fit the models.
    """
    target, draft = pair(options)
    fraction = options.mem_fraction
    if fraction is None:
        fraction = default_mem_fraction(
            options.gpu_memory,
            tp_size=options.tp,
            image_width=target.image_width,
            max_requests=options.max_running_requests,
        )
    serving = Serving(
        mem_fraction=fraction,
        block_size=options.block or draft.block_size,
        context=options.context,
        tp_size=options.tp,
        window=options.window,
        max_requests=options.max_running_requests or MAX_REQUESTS,
        mamba_ratio=options.mamba_full_memory_ratio,
        page_size=page_size(options),
        radix=radix_states(options),
        copies=options.copy != "off",
        fp8_head=options.draft_head == "fp8",
        wider=options.widest or 0,
        max_tokens=options.max_total_tokens,
        n_states=options.max_mamba_cache_size,
    )
    results = {worker: capacity(target, draft, serving, options.gpu_memory, worker) for worker in Worker}
    return Report(target, draft, serving, options.gpu_memory, results, list(remarks(options)))


def pair(options: argparse.Namespace) -> tuple[TargetSizes, DraftSizes]:
    """Return the sizes of target and draft, as the flags load them."""
    itemsize = geometry.LOADED_ITEMSIZES.get(options.dtype)  # None for "auto"
    target = geometry.read_target(options.model, itemsize)
    if target.recurrent and options.mamba_ssm_dtype:
        recurrent = dataclasses.replace(target.recurrent, state_itemsize=geometry.ITEMSIZES[options.mamba_ssm_dtype])
        target = dataclasses.replace(target, recurrent=recurrent)
    if options.context_length:
        target = dataclasses.replace(target, context_length=options.context_length)
    name = options.draft or models.draft_of(options.model)
    draft = geometry.read_draft(name, options.draft_quantization, target.itemsize)
    if options.kv_cache_dtype in geometry.KV_ITEMSIZES:
        of_kv = dataclasses.replace(target.attention, itemsize=geometry.KV_ITEMSIZES[options.kv_cache_dtype])
        target = dataclasses.replace(target, attention=of_kv)
    return target, draft


def remarks(options: argparse.Namespace) -> Iterator[str]:
    """Yield sentences about flags that were given and are not counted."""
    others, of_fraction = uncounted(options)
    if others:
        yield f"Not counted, but may change these numbers: {', '.join(others)}."
    if of_fraction:
        shown = ", ".join(of_fraction)
        yield f"Not counted: {shown}. SGLang's default for --mem-fraction-static depends on it, so give that flag too."


def lifts(report: Report, worker: Worker) -> Iterator[tuple[str, int]]:
    """Yield changes of flags, such as `--tp-size 2`, that each allow more requests, with the number of requests."""
    serving, now = report.serving, report.results[worker]

    def then(**changes: Any) -> int:
        changed = dataclasses.replace(serving, **changes)
        return capacity(report.target, report.draft, changed, report.card_gib, worker).requests

    tried: dict[str, int] = {}
    if report.target.recurrent and serving.n_states is None:
        ratio = max(RATIOS, key=lambda ratio: then(mamba_ratio=ratio))
        tried[f"--mamba-full-memory-ratio {ratio}"] = then(mamba_ratio=ratio)
    for flag, field in LIMITS.items():
        if vars(serving)[field] is not None:
            tried[f"without {flag}"] = then(**{field: None})
    # With more rows for requests there is less memory for their tokens.
    most = bisect_left(range(1, MOST), True, key=lambda n: then(max_requests=n) < n)
    tried[f"--max-running-requests {most}"] = most
    if worker is Worker.PLUGIN and not now.ring_bytes:
        tried[f"--speculative-draft-window-size {WINDOW}"] = then(window=WINDOW)
    if not now.requests:
        of_small = small_card(report)
        if report.target.recurrent and serving.n_states is None:
            of_small["--mamba-full-memory-ratio"] = max(
                RATIOS, key=lambda ratio: then(**changes_of(of_small | {"--mamba-full-memory-ratio": ratio}))
            )
        tried[" ".join(f"{flag} {value}" for flag, value in of_small.items())] = then(**changes_of(of_small))
        counts = heads(report.target, report.draft).values()
        cards = (tp_size for tp_size in TP_SIZES if not any(count % tp_size for count in counts))
        tried |= next(({f"--tp-size {n}": then(tp_size=n)} for n in cards if then(tp_size=n)), {})
    yield from ((flag, n) for flag, n in tried.items() if n > now.requests)


def small_card(report: Report) -> dict[str, float]:
    """Return the values of flags that leave less memory for prompts and graphs."""
    found = default_mem_fraction(
        report.card_gib,
        tp_size=report.serving.tp_size,
        image_width=report.target.image_width,
        max_requests=SMALL_BATCH,
        chunk=SMALL_CHUNK,
    )
    fraction = max(int(found * 1000) / 1000, report.serving.mem_fraction)
    return {
        "--mem-fraction-static": fraction,
        "--chunked-prefill-size": SMALL_CHUNK,
        "--max-running-requests": SMALL_BATCH,
        "--cuda-graph-max-bs-decode": SMALL_BATCH,
    }


def changes_of(flags: Mapping[str, float]) -> dict[str, float]:
    """Return the fields of `Serving` that `flags` set, with their values."""
    return {COUNTED[flag]: value for flag, value in flags.items() if flag in COUNTED}


# -- as text -------------------------------------------------------------------------------------------------------


def table(report: Report) -> Table:
    serving, draft, results = report.serving, report.draft, report.results.values()
    made = Table(
        box=box.SIMPLE_HEAD,
        title=f"{report.target.name} + {draft.name}, {serving.tp_size} x {report.card_gib:g} GiB (computed)",
        caption=f"blocks of {serving.block_size}, {serving.context} tokens a request, "
        f"--mem-fraction-static {serving.mem_fraction:.3f}, --mamba-full-memory-ratio {serving.mamba_ratio:g}, "
        f"--max-running-requests {serving.max_requests}, pages of {serving.page_size}; sizes per card",
    )
    made.add_column("")
    for worker in report.results:
        made.add_column(NAMES[worker], justify="right", no_wrap=True)
    rows = {
        "weights, target": [size(c.target_weights) for c in results],
        "weights, draft": [size(c.draft_weights) for c in results],
        "draft's copy of the head": [size(c.head_copy) for c in results],
        "target K and V per token": [f"{c.target_bytes_per_token:,} B" for c in results],
        "draft K and V per token": [f"{c.draft_bytes_per_token:,} B" for c in results],
        "draft ring buffers": [size(c.ring_bytes) for c in results],
        "token history": [size(c.text_bytes) for c in results],
        "recurrent states": [f"{c.n_states} = {size(c.state_bytes)}" for c in results],
        "per request for its block": [size(c.request_block_bytes) for c in results],
        "for all blocks": [size(c.block_bytes) for c in results],
        "tokens of K and V": [f"{c.n_tokens:,} = {size(kv_bytes(c))}" for c in results],
        "left for graphs, activations": [size(c.slack_bytes) for c in results],
    }
    rows |= {f"limit: {bound}": [limit(c, bound) for c in results] for bound in Bound}
    rows["[bold]requests at once[/bold]"] = [f"[bold]{c.requests}[/bold]" for c in results]
    for name, cells in rows.items():
        if set(cells) - {"", "0.00 MiB", "0 = 0.00 MiB"}:
            made.add_row(name, *cells)
    return made


def sentences(report: Report) -> Iterator[str]:
    """Yield a line with each worker's limit and the flags that raise it, then the sources of the numbers."""
    for worker, result in report.results.items():
        count = (
            f"{result.requests} requests at once"
            if result.requests
            else f"no request of {report.serving.context:,} tokens fits"
        )
        changes = ((flag if flag.startswith("without") else f"with {flag}", n) for flag, n in lifts(report, worker))
        better = " or ".join(f"{n} {change}" for change, n in changes)
        yield f"{NAMES[worker]}: {count}, bounded by {result.bound}; {better or more(report.serving)}."
    yield f"Target: {report.target.source}; weights {report.target.weights_from}."
    yield f"Draft: {report.draft.source}; weights computed from config.json."
    yield from report.not_counted
    yield "Memory is divided as in SGLang 0.5.23 (P: computed, not measured). Each rank holds its share of the target."


def more(serving: Serving) -> str:
    """Return advice on how to fit more requests, for use if no single flag is known to help."""
    limits = [flag for flag, field in LIMITS.items() if vars(serving)[field] is not None]
    return MORE + (f", after dropping {' and '.join(limits)}" if limits else "")


def size(n_bytes: float) -> str:
    return f"{n_bytes / GIB:.2f} GiB" if n_bytes >= GIB else f"{n_bytes / MIB:.2f} MiB"


def kv_bytes(result: Capacity) -> int:
    return result.n_tokens * (result.target_bytes_per_token + result.draft_bytes_per_token)


def limit(result: Capacity, bound: Bound) -> str:
    return str(result.limits[bound]) if bound in result.limits else ""


# -- as JSON -------------------------------------------------------------------------------------------------------


def document(report: Report) -> dict[str, Any]:
    """Return the report as JSON values; `level` states how the numbers were obtained."""
    return {
        "level": "P: computed",
        "card_gib": report.card_gib,
        "target": dataclasses.asdict(report.target),
        "draft": dataclasses.asdict(report.draft),
        "serving": dataclasses.asdict(report.serving),
        "not_counted": report.not_counted,
        "workers": {
            worker: dataclasses.asdict(result)
            | {"requests": result.requests, "bound": result.bound, "lifts": dict(lifts(report, worker))}
            for worker, result in report.results.items()
        },
    }
