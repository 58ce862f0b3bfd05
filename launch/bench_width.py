"""Width benchmark: the width chosen every step, always the same one, and speculation off, on one machine.

    python -m launch.bench_width             # the tiny pair on this CPU
    python -m launch.bench_width --quick     # to see that it works: one repeat of little, its numbers say nothing

Six servers: no speculation, ours verifying always 1, 4, 8 or 16 tokens, and ours choosing. Workloads: `easy`, held-out
questions like those the pair was trained on; `hard`, questions unlike them, of whose drafts fewer are accepted;
`hopeless`, of whose drafts hardly any are; `changing`, easy, hopeless and easy again without a break.

Each repeat has servers of its own, for two processes started alike differ by up to 3 %. In each:

1. The server that chooses starts alone, for it measures what its steps cost; then the others. From then on at most one
   runs: the others are paused (SIGSTOP).
2. Gate: every arm answers every workload at its highest concurrency. Unless all answers are those without speculation,
   token for token, the program ends here and shows no speed. The server that chooses answers at every concurrency: when
   measuring begins it has seen all workloads in batches of every size, as one has that served for a while.
3. Every arm answers every workload at every concurrency, a few prompts at a time: then the next arm has its turn, in an
   order that rotates. Each part starts from an empty prefix cache and is preceded by a short unmeasured one. Its
   answers are compared as well.
4. In the first repeat, the changing workload and the width of every step of it.

Then a Markdown table, a JSON document and a plot of it under `launch/results/`; the last line of stdout is the JSON
file's path. Ctrl-C, or SIGINT at a time limit, ends it with the repeats that are whole; the first must be.
"""

import argparse
import json
import shlex
import sys
from collections import Counter, defaultdict
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from rich.console import Console

from launch import measure, report, tiny, width_report
from launch.bench_serve import N_WARM_UP, RESULTS, GateError
from launch.tiny import Arm, require_worker
from launch.width_report import AUTO, OFF, STATIC, Step
from launch.width_workloads import PER_PLACE, Workload, make_workloads
from sglang_dflash.bench.compare import differences
from sglang_dflash.bench.errors import ServerError
from sglang_dflash.bench.measure import EVERYTHING, Run, joined, rotated, slices
from sglang_dflash.bench.ports import free_port
from sglang_dflash.bench.progress import wait_ready
from sglang_dflash.bench.rows import noise, write
from sglang_dflash.bench.served import require_memory
from sglang_dflash.bench.server import Server, end_on_sigterm

ARMS = (OFF, *STATIC, AUTO)
GIB_PER_SERVER = 2.6  # host memory of one serving process group
BATCH = 16  # requests a server runs at once
FLAGS = (
    *(*tiny.FLAGS, *tiny.HYBRID_FLAGS),  # what is given last counts
    *("--max-running-requests", str(BATCH)),
    *("--max-mamba-cache-size", "160"),
    *("--max-total-tokens", "16384"),
)
CHANGE_CONCURRENCY = 8


class Bench:
    """Paused servers, and the workloads they are asked."""

    def __init__(self, servers: dict[str, Server], workloads: Sequence[Workload], traces: Path) -> None:
        self.servers, self.workloads, self.traces = servers, workloads, traces
        self.reference: dict[str, list[tuple[int, ...]]] = {}  # by workload: the answers without speculation
        self.n_read = Counter[str]()  # steps, by arm

    def run(self, arm: str, workload: Workload, concurrency: int, part: slice = EVERYTHING) -> tuple[Run, list[Step]]:
        """One checked run over a part of the prompts, after a short unmeasured one, and its steps (of `off` none)."""
        server, prompts = self.servers[arm], workload.at(concurrency)[part]
        server.resume()
        ask = {"concurrency": concurrency, **workload.sampling}
        measure.run(server, prompts[:N_WARM_UP], **ask)
        self.read_steps(arm)
        run = measure.run(server, prompts, **ask)
        server.pause()
        steps = self.read_steps(arm)
        answers = [answer.token_ids for answer in run.answers]
        check(f"{arm}, {workload.name} at {concurrency}", self.reference[workload.name][part][: len(prompts)], answers)
        return run, steps

    def gate(self) -> None:
        """Every arm answers as without speculation.

        Raises:
            GateError: it does not.
        """
        for workload in self.workloads:
            self.reference[workload.name] = self.answers_without_speculation(workload)
            for arm in (*STATIC, AUTO):
                for concurrency in workload.concurrency if arm == AUTO else [max(workload.concurrency)]:
                    self.run(arm, workload, concurrency)

    def answers_without_speculation(self, workload: Workload) -> list[tuple[int, ...]]:
        server = self.servers[OFF]
        server.resume()
        run = measure.run(server, workload.prompts, concurrency=max(workload.concurrency), **workload.sampling)
        server.pause()
        return [answer.token_ids for answer in run.answers]

    def change(self) -> list[Step]:
        """Easy, hopeless and easy again without a break; every request's name begins with its phase's number."""
        server, (easy, _hard, hopeless) = self.servers[AUTO], self.workloads
        phases = list(enumerate((easy, hopeless, easy)))
        asked = [(i, workload, n, prompt) for i, workload in phases for n, prompt in enumerate(workload.prompts)]

        def ask(one: tuple[int, Workload, int, list[int]]) -> list[int]:
            phase, workload, n, prompt = one
            return server.generate(prompt, fields={"rid": f"{phase}-{n}"}, **workload.sampling).token_ids

        server.resume()
        server.flush_cache()
        self.read_steps(AUTO)
        with ThreadPoolExecutor(max_workers=CHANGE_CONCURRENCY) as pool:
            answers = list(pool.map(ask, asked))
        server.pause()
        for i, workload in phases:
            mine = [answer for answer, one in zip(answers, asked, strict=True) if one[0] == i]
            check(f"{AUTO}, phase {i} of the changing workload", self.reference[workload.name], mine)
        return self.read_steps(AUTO)

    def read_steps(self, arm: str) -> list[Step]:
        """What its server has done since the last call."""
        files = sorted((self.traces / arm).glob("*.jsonl"))
        lines = [line for path in files for line in path.read_text().splitlines()]
        new, self.n_read[arm] = lines[self.n_read[arm] :], len(lines)
        return [Step(**json.loads(line)) for line in new]


def check(what: str, reference: Sequence[Sequence[int]], answers: Sequence[Sequence[int]]) -> None:
    """
    Raises:
        GateError: an answer is not the one without speculation.
    """
    found = differences(reference, answers)
    if found:
        raise GateError(
            f"{what}: {len(found)} of {len(answers)} answers are not those without speculation, so no speed is "
            f"shown ({'; '.join(map(str, found[:5]))})"
        )


def make_servers(traces: Path, port: int) -> dict[str, Server]:
    servers = {}
    for arm in ARMS:
        port = free_port(port)
        kind = Arm.OFF if arm == OFF else Arm.PLUGIN
        width = {} if arm == OFF else {"SGLANG_DFLASH_WIDTHS": arm, "SGLANG_DFLASH_WIDTH_TRACE": str(traces / arm)}
        servers[arm] = Server(
            tiny.command(kind, tiny.HYBRID, *FLAGS),
            port=port,
            log=tiny.RUN_DIR / f"width-{port}-{arm}.log",
            env=tiny.ENV | tiny.environment(kind) | width,
            name=f"width {arm}" if width else arm,
        )
        port += 1
    return servers


def start_all(servers: dict[str, Server], console: Console) -> None:
    """Start and pause each.

    Raises:
        ServerError: too little memory for all of them, or one does not start or is not what it should be.
    """
    require_memory(len(servers), GIB_PER_SERVER, "end what else runs")
    for arms in ((AUTO,), (OFF, *STATIC)):
        for arm in arms:
            servers[arm].start()
        wait_ready([servers[arm] for arm in arms], console)
        for arm in arms:
            require_worker(Arm.OFF if arm == OFF else Arm.PLUGIN, servers[arm])
            servers[arm].pause()


@contextmanager
def serving(workloads: Sequence[Workload], port: int, console: Console) -> Iterator[Bench]:
    """Six servers, of which every one answers as without speculation; stopped afterwards.

    Raises:
        GateError: one does not.
        ServerError: see `start_all`.
    """
    traces = tiny.RUN_DIR / f"width-{datetime.now(UTC):%Y%m%d-%H%M%S-%f}"
    servers = make_servers(traces, port)
    with ExitStack() as stack:
        for server in servers.values():
            stack.callback(server.stop)
        start_all(servers, console)
        bench = Bench(servers, workloads, traces)
        with console.status("comparing answers"):
            bench.gate()
        console.print("[green]✔[/] the same answers from all six, token for token")
        yield bench


def measure_repeat(bench: Bench, repeat: int) -> list[dict[str, Any]]:
    """One repeat, interleaved. One row per arm, workload and concurrency."""
    rows = []
    for workload in bench.workloads:
        for concurrency in workload.concurrency:
            runs, steps = defaultdict[str, list[Run]](list), defaultdict[str, list[Step]](list)
            for turn, part in enumerate(slices(len(workload.at(concurrency)), concurrency), start=repeat * 2):
                for arm in rotated(ARMS, turn):
                    run, its_steps = bench.run(arm, workload, concurrency, part)
                    runs[arm].append(run)
                    steps[arm] += its_steps
            rows += [
                width_report.row(arm, workload.name, concurrency, repeat, joined(runs[arm]), steps[arm]) for arm in runs
            ]
    return rows


def parse(arguments: Sequence[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m launch.bench_width", description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--concurrency", type=int, nargs="+", help="of the easy workload (1 2 4 8 16)")
    parser.add_argument("--repeats", type=int, help="interleaved repeats (3)")
    parser.add_argument("--num-prompts", type=int, help=f"of each workload at most ({PER_PLACE * BATCH})")
    parser.add_argument("--max-new-tokens", type=int, default=128, help="of an easy answer (128)")
    parser.add_argument("--quick", action="store_true", help="one repeat of 16 prompts at concurrency 1 and 8")
    parser.add_argument("--port", type=int, default=31000, help="look for free ports from here on (31000)")
    parser.add_argument(
        "--output", type=Path, help="the JSON file (launch/results/<date>-<machine>-<commit>-width.json)"
    )
    options = parser.parse_args(arguments)
    usual = ([1, 8], 1, 16) if options.quick else ([1, 2, 4, 8, 16], 3, PER_PLACE * BATCH)
    for name, value in zip(("concurrency", "repeats", "num_prompts"), usual, strict=True):
        if vars(options)[name] is None:
            setattr(options, name, value)
    if max(options.concurrency) > BATCH:
        parser.error(f"--concurrency: the servers run {BATCH} requests at once; name no more")
    return options


def main(arguments: Sequence[str] = tuple(sys.argv[1:])) -> None:
    options = parse(arguments)
    end_on_sigterm()
    console = Console()
    rows, workloads = list[dict[str, Any]](), make_workloads(options)
    try:
        for repeat in range(options.repeats):
            console.print(f"repeat {repeat + 1} of {options.repeats}")
            with serving(workloads, options.port, console) as bench:
                measured = measure_repeat(bench, repeat)
                if repeat == 0:
                    steps = bench.change()
                rows += measured
    except KeyboardInterrupt:
        if not rows:
            raise
    command = shlex.join(["python", "-m", "launch.bench_width", *arguments])
    document = width_report.document(
        bench.servers, bench.workloads, rows, steps, change_concurrency=CHANGE_CONCURRENCY, command=command
    )
    print(width_report.table(document))
    console.print(noise(document), style="bold yellow")
    name = report.file_name("width")
    path = options.output or RESULTS / name
    shown = write(document, path)
    from launch.plot_bench_width import plot  # needs matplotlib, which a server does not

    plot(document, path.with_suffix(".png"))
    print(shown)


if __name__ == "__main__":
    try:
        main()
    except (ServerError, GateError) as error:
        sys.exit(f"bench_width: {error}")
