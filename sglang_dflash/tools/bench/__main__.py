"""Command line of the benchmark: `sglang-dflash bench --help`.

Prints tables, and writes a JSON document to `OUTPUT.json`. The last line of stdout is the document's path.
"""

import argparse
import re
import shlex
import sys
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from functools import partial
from pathlib import Path

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn, TimeRemainingColumn

from sglang_dflash import plot
from sglang_dflash.pairs.servers.arms import OFF, OURS
from sglang_dflash.pairs.servers.document import require_folder, write
from sglang_dflash.pairs.servers.errors import ServerError
from sglang_dflash.pairs.servers.server import end_on_sigterm
from sglang_dflash.tools.bench.client import HttpEngine, ServerKind
from sglang_dflash.tools.bench.compare import GateError
from sglang_dflash.tools.bench.engine import Engine, Prompt, Sampling
from sglang_dflash.tools.bench.options import TRANSFORMERS, parse
from sglang_dflash.tools.bench.prompts import Task, complete, is_complete
from sglang_dflash.tools.bench.report import markdown, panels, report, table, title_of, warnings
from sglang_dflash.tools.bench.rows import Row
from sglang_dflash.tools.bench.schedule import Bench, Schedule, Turn
from sglang_dflash.tools.bench.served import ServedEngine, kept_in_memory

WIDEST = 1000


@contextmanager
def engines_of(options: argparse.Namespace, console: Console) -> Iterator[Sequence[Engine]]:
    """Yield the engines of all arms. Each accepts requests only inside the context of its method `running`.

    Raises:
        ServerError: an arm cannot be reached, started or loaded.
    """
    if options.backend == TRANSFORMERS:
        from sglang_dflash.reference.torch import plain
        from sglang_dflash.tools.bench.in_torch import TorchEngine  # torch and transformers take seconds to import

        try:
            models = plain.load(options.model, options.draft_model)
        except (OSError, ValueError) as error:
            raise ServerError(f"--model {options.model}, --draft-model {options.draft_model}: {error}") from error
        yield [TorchEngine(name, models) for name in (OFF, OURS)]
    elif options.serve:
        served, port = list[ServedEngine](), options.port
        for launch in options.launches:
            log = with_suffix(options.output, "-" + re.sub(r"[^\w.-]", "-", launch.name) + ".log")
            served.append(ServedEngine(launch, log=log, port=port, console=console))
            port = served[-1].server.port + 1
        if options.one_at_a_time:
            yield served
        else:
            with kept_in_memory(served, console):
                yield served
    else:
        yield options.remote


def meet(options: argparse.Namespace) -> None:
    """Contact the servers of `--base-url`, and add their engines to the options as `remote`.

    Raises:
        ServerError: see `HttpEngine.meet`.
    """
    about = {"model": options.model or "", "api_key": options.api_key}
    options.remote = [HttpEngine(name, url, **about) for name, url in options.base_url.items()]
    for engine in options.remote:
        engine.meet(ServerKind(options.backend) if options.backend else None)


def completed(tasks: Sequence[Task], first: Engine, sampling: Sampling, concurrency: int) -> list[Task]:
    """Return the tasks with complete conversations. The first arm generates the missing answers to earlier messages."""
    if all(map(is_complete, tasks)):
        return list(tasks)

    def answer(prompts: Sequence[Prompt]) -> list[str]:
        ask = partial(first.ask, sampling=sampling, stream=False)
        return [read().text for read in pool.map(ask, prompts)]

    with first.running(), ThreadPoolExecutor(max_workers=concurrency) as pool:
        return [complete(task, answer) for task in tasks]


def measure(engines: Sequence[Engine], options: argparse.Namespace, console: Console) -> tuple[Bench, list[Row]]:
    """Measure according to the options, with a progress bar."""
    schedule = Schedule(
        concurrency=options.concurrency,
        repeats=options.repeats,
        together=not options.serve or not options.one_at_a_time,
        short_turns=options.serve or options.backend == TRANSFORMERS,
        latency=options.latency and options.steady is None,
        steady_s=options.steady,
        tie_gap=options.tie_gap if options.require_equal else None,
    )
    sampling = Sampling(
        max_new_tokens=options.max_new_tokens, temperature=options.temperature, thinking=options.enable_thinking
    )
    tasks = completed(options.tasks, engines[0], sampling, max(options.concurrency))
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
    with Progress(*columns, TimeRemainingColumn(), console=console, transient=True) as progress:

        def answered(turn: Turn, engine: Engine) -> None:
            what = f"{tasks[turn.task].name}, {turn.concurrency} in flight: {engine.name}"
            progress.update(shown, advance=1, description=f"repeat {turn.repeat + 1}/{options.repeats}, {what}")

        bench = Bench(engines, tasks, schedule, sampling, answered)
        shown = progress.add_task("warming up", total=bench.n_asked())
        return bench, every_repeat(bench, console)


def every_repeat(bench: Bench, console: Console) -> list[Row]:
    """Measure all repeats. Ctrl-C (SIGINT) or a failing server ends the measurement.

    The repeats completed so far are returned. The failure is kept in `bench.failure`.

    Raises:
        KeyboardInterrupt, ServerError: it came before the first repeat was complete.
    """
    rows, n_turns = list[Row](), 0
    try:
        for repeat in range(bench.schedule.repeats):
            rows += bench.repeat(repeat)
            n_turns = len(bench.widths)
            if not console.is_terminal:
                console.print(f"repeat {repeat + 1} of {bench.schedule.repeats} is measured")
    except (KeyboardInterrupt, ServerError) as error:
        if not rows:
            raise
        del bench.widths[n_turns:]  # of the repeat that is not complete
        bench.failure = error if isinstance(error, ServerError) else None
    return rows


def with_suffix(path: Path, suffix: str) -> Path:
    """Append a suffix to a name that may contain dots, such as a model's."""
    return path.with_name(path.name + suffix)


def without_key(arguments: Sequence[str]) -> list[str]:
    """Return a command line with API keys replaced, for publication."""
    shown, hiding = [], False
    for word in arguments:
        shown.append("KEY" if hiding else "--api-key=KEY" if word.startswith("--api-key=") else word)
        hiding = word == "--api-key"
    return shown


def main(arguments: Sequence[str]) -> int:
    try:
        return run(arguments)
    except (ServerError, GateError) as error:
        print(f"bench: {error}", file=sys.stderr)
        return 1


def run(arguments: Sequence[str]) -> int:
    """Measure, and write the results of complete repeats, also if an arm fails in a later one.

    Raises:
        ServerError: an arm cannot be reached, started or loaded, or fails later, or --output cannot be written.
        GateError: `--require-equal` is set, and answers differ by more than near ties.
    """
    options = parse(arguments, meet)
    end_on_sigterm()
    console = Console()
    require_folder(options.output.parent, "--output")
    for engine in options.remote:
        for task in options.tasks:
            engine.require_messages(task.prompts)
    with engines_of(options, console) as engines:
        bench, rows = measure(engines, options, console)
    command = shlex.join(["sglang-dflash", "bench", *without_key(arguments)])
    measured = report(bench, rows, options, command=command)
    shown = table(measured)
    # In a narrow terminal the table's lines wrap. By default rich would cut columns instead.
    natural = Console(width=WIDEST).measure(shown).maximum
    Console(width=max(console.width, natural)).print(shown)
    print(markdown(list(measured.arms), measured.lines))
    for line in warnings(measured):
        console.print(line, style="bold yellow", markup=False)
    if bench.failure:
        print(f"bench: {bench.failure}; repeats completed before: {measured.about['repeats']}", file=sys.stderr)
    path = write(measured.document(), with_suffix(options.output, ".json"))
    if options.plot:
        plot.draw(panels(measured), options.plot, title_of(measured))
    print(path)
    return 1 if bench.failure else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
