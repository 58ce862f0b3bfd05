"""What a decode step takes of the host, SGLang's DFLASH and ours: rehearsed servers whose kernels do nothing.

    python -m launch.bench_host [--requests 1 8 32] [--repeats 5] [--target hybrid] [--out FILE.json]

On a GPU a step can be no faster than its host. The servers run as on a GPU, captured graphs and fa3, but replays,
kernels and matrix products return at once (`host_time/sitecustomize.py`), so what is left is Python and the small
operations outside of graphs, run here on tensors of a CPU. Figures are CPU seconds of the scheduler's thread, so a busy
machine changes them little. Both servers stay up, and are asked in turn.

`step`: from one decode step's launch to the next one's, the scheduler included. `launch`: the worker's part of it,
`run_batch`. `kernels`: launched outside of graphs in a step; what a launcher takes is not in the seconds.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
from collections.abc import Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any, NamedTuple

import httpx
from rich.console import Console
from rich.table import Table

from sglang_dflash.servers.document import head as head_of
from sglang_dflash.servers.ports import free_port
from sglang_dflash.servers.server import Server
from sglang_dflash.tiny import pairs as tiny
from sglang_dflash.tiny.pairs import Arm, Pair
from tests.tools.parameters import path_with

HOST_TIME = Path(__file__).parent / "host_time"
# By name: whose worker, and its flags of environment. Where nothing is computed there is no width to choose.
ARMS = {
    "stock": (Arm.STOCK, {}),
    "ours": (Arm.PLUGIN, {"SGLANG_DFLASH_WIDTHS": "fixed"}),
}
PAIRS = {"hybrid": tiny.HYBRID, "dense": tiny.DENSE}
N_PROMPT, MAX_NEW_TOKENS = 16, 720
SKIPPED = 8  # steps of a round that come before all requests run


class Step(NamedTuple):
    """A line of `host_time/sitecustomize.py`."""

    n_requests: int
    seconds: float
    launch_seconds: float
    kernels: int


class Timed:
    """A server and the steps it has written down."""

    def __init__(self, name: str, pair: Pair, flags: Sequence[str], port: int) -> None:
        arm, env = ARMS[name]
        tiny.RUN_DIR.mkdir(exist_ok=True)
        self.file = tiny.RUN_DIR / f"host-{arm}-{port}.txt"
        env = env | {"SGLANG_DFLASH_REHEARSE": "sm90", "HOST_TIME": str(self.file)} | path_with(HOST_TIME)
        self.server = Server(
            tiny.command(arm, pair, *tiny.FLAGS, *flags),
            port=port,
            log=self.file.with_suffix(".log"),
            env=tiny.ENV | tiny.environment(arm) | env,
            name=name,
        )

    def round(self, n_requests: int) -> dict[str, Any]:
        """Let as many requests run at once to their end; medians of the steps with all of them."""
        n_before = len(self._lines())
        prompts = [[5 + i] * N_PROMPT for i in range(n_requests)]
        parameters = {"temperature": 0, "max_new_tokens": MAX_NEW_TOKENS, "ignore_eos": True}
        body = {"input_ids": prompts, "sampling_params": parameters}  # in one request, so that all begin together
        answers = httpx.post(f"{self.server.url}/generate", json=body, timeout=600).raise_for_status().json()
        steps = [line for line in self._lines()[n_before:] if line.n_requests == n_requests][SKIPPED:]
        assert len(steps) > SKIPPED, f"{self.server.name}: {len(steps)} steps of {n_requests} requests are too few"
        n_steps = sum(answer["meta_info"]["spec_verify_ct"] for answer in answers)
        return {
            "arm": self.server.name,
            "requests": n_requests,
            "steps": len(steps),
            "step_us": 1e6 * statistics.median(step.seconds for step in steps),
            "launch_us": 1e6 * statistics.median(step.launch_seconds for step in steps),
            "kernels": statistics.median(step.kernels for step in steps),
            "committed": sum(len(answer["output_ids"]) for answer in answers) / n_steps,
        }

    def _lines(self) -> list[Step]:
        lines = map(str.split, self.file.read_text().splitlines())
        return [Step(int(n), float(step), float(launch), int(kernels)) for n, step, launch, kernels in lines]


def measure(options: argparse.Namespace, console: Console) -> list[dict[str, Any]]:
    sizes = [str(size) for size in sorted({*options.requests, 1})]
    most = max(options.requests)
    flags = [
        *("--attention-backend", "fa3", "--cuda-graph-backend-prefill", "disabled", "--cuda-graph-bs-decode", *sizes),
        *("--max-running-requests", str(most), "--max-total-tokens", str(most * 1024)),
    ]
    if options.target == "hybrid":
        flags += [*tiny.HYBRID_FLAGS, "--max-mamba-cache-size", str(8 * most)]
    rows = []
    with ExitStack() as stack:
        timed = []
        for name in options.arms:
            one = Timed(name, PAIRS[options.target], flags, free_port(options.port))
            console.print(f"starting {name}")
            stack.enter_context(one.server)
            timed.append(one)
        for repeat in range(options.repeats):
            for n_requests in options.requests:
                rows += [one.round(n_requests) | {"repeat": repeat} for one in timed]
            console.print(f"repeat {repeat + 1} of {options.repeats}")
    return rows


def table(rows: Sequence[dict[str, Any]], against: str = "stock") -> Table:
    """Medians over the repeats, and the ratio to `against` round by round."""
    shown = Table(
        "requests", "arm", "step, us", "launch, us", f"step / {against}", f"launch / {against}", "kernels", "tokens"
    )
    for n_requests in sorted({row["requests"] for row in rows}):
        there = [row for row in rows if row["requests"] == n_requests]
        base = [row for row in there if row["arm"] == against]
        for arm in dict.fromkeys(row["arm"] for row in there):
            mine = [row for row in there if row["arm"] == arm]
            shown.add_row(
                str(n_requests),
                arm,
                *(f"{statistics.median(row[what] for row in mine):.0f}" for what in ("step_us", "launch_us")),
                *(
                    ratio([a[what] / b[what] for a, b in zip(mine, base, strict=True)])
                    for what in ("step_us", "launch_us")
                ),
                f"{statistics.median(row['kernels'] for row in mine):.0f}",
                f"{statistics.median(row['committed'] for row in mine):.2f}",
            )
    return shown


def ratio(ratios: Sequence[float]) -> str:
    return f"{statistics.median(ratios):.2f} ({min(ratios):.2f}-{max(ratios):.2f})"


def main(arguments: Sequence[str] = tuple(sys.argv[1:])) -> None:
    parser = argparse.ArgumentParser(prog="python -m launch.bench_host", description=__doc__)
    parser.add_argument("--requests", type=int, nargs="+", default=[1, 8, 32])
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--target", choices=sorted(PAIRS), default="hybrid")
    parser.add_argument("--arms", nargs="+", choices=list(ARMS), default=list(ARMS))
    parser.add_argument("--port", type=int, default=31600)
    parser.add_argument("--out", type=Path)
    options = parser.parse_args(arguments)
    console = Console()
    rows = measure(options, console)
    console.print(table(rows))
    if options.out is not None:
        head = head_of("host", " ".join(["python -m launch.bench_host", *arguments]))
        document = head | {"level": "R: rehearsed on CPU", "rows": rows}
        options.out.write_text(json.dumps(document, indent=1) + "\n")


if __name__ == "__main__":
    main()
