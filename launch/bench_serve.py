"""Serving benchmark: speculation off, SGLang's built-in DFLASH worker, and ours, on one machine.

    python -m launch.bench_serve                                  # the tiny pair on this CPU
    python -m launch.bench_serve --target DIR --draft DIR -- --attention-backend fa3 --mem-fraction-static 0.25

Everything after `--` goes to all servers alike; `--arms off plugin snapshot` compares our two ways to keep recurrent
states instead. The order of things:

1. All servers start. From then on at most one runs: the others are paused (SIGSTOP). Where the memory does not hold
   them together, `--one-at-a-time` starts and stops them in turn instead, which takes a start per run.
2. Gate: every arm answers every prompt at every concurrency. Unless all answers are the same, token for token, the
   program ends here and shows no speed. This is also the warm-up.
3. Repeats: in each, every arm answers all prompts at every concurrency, a few at a time: then the next arm has its
   turn, in an order that rotates. Each part starts from an empty prefix cache and is preceded by a short unmeasured
   one. Its answers are compared as well.
4. A table for people, a JSON document under `launch/results/`; the last line of stdout is that file's path.
"""

import argparse
import shlex
import sys
from collections import defaultdict
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.progress import track

from launch import measure, report, tiny
from launch.gate import is_near_tie
from launch.tiny import Arm, Pair, require_worker
from sglang_dflash.bench.compare import Difference, differences
from sglang_dflash.bench.errors import ServerError
from sglang_dflash.bench.measure import EVERYTHING, Run, joined, rotated, slices
from sglang_dflash.bench.ports import free_port
from sglang_dflash.bench.prompts import Conversation, held_out, read
from sglang_dflash.bench.rows import noise, write
from sglang_dflash.bench.served import start_together
from sglang_dflash.bench.server import Server, end_on_sigterm

RESULTS = tiny.ROOT / "launch" / "results"
TABLE_WIDTH = 108
N_WARM_UP = 2  # unmeasured prompts after an arm gets the CPU back


class GateError(RuntimeError):
    """Answers differ between arms: there is no speed to show."""


class Bench:
    """Servers, of which one at a time may run, and the prompts they are asked."""

    def __init__(self, servers: dict[Arm, Server], prompts: list[list[int]], options: argparse.Namespace) -> None:
        self.servers, self.prompts, self.options = servers, prompts, options
        self.reference: list[tuple[int, ...]] = []
        self.n_ties = 0

    @contextmanager
    def running(self, arm: Arm) -> Iterator[Server]:
        """`arm` alone runs inside; outside it is paused, or stopped with `--one-at-a-time`."""
        server = self.servers[arm]
        if self.options.one_at_a_time:
            with server:
                require_worker(arm, server)
                yield server
            return
        server.resume()
        try:
            yield server
        finally:
            server.pause()

    def run(self, arm: Arm, concurrency: int, part: slice = EVERYTHING, *, stream: bool = False) -> Run:
        """One checked run over a part of the prompts, after a short unmeasured one."""
        with self.running(arm) as server:
            cap = self.options.max_new_tokens
            measure.run(server, self.prompts[:N_WARM_UP], concurrency=concurrency, max_new_tokens=cap, stream=stream)
            run = measure.run(server, self.prompts[part], concurrency=concurrency, max_new_tokens=cap, stream=stream)
        self._check(arm, concurrency, part, run)
        return run

    def gate(self) -> None:
        """Every arm gives the reference's answers at every concurrency. The reference: no speculation, one at a time.

        Raises:
            GateError: it does not.
        """
        self.reference = [answer.token_ids for answer in self.run(Arm.OFF, 1).answers]
        for concurrency in self.options.concurrency:
            for arm in self.servers:
                self.run(arm, concurrency)

    def _check(self, arm: Arm, concurrency: int, part: slice, run: Run) -> None:
        if not self.reference:  # this run becomes it
            return
        first = part.start or 0
        found = [
            difference._replace(prompt=first + difference.prompt)
            for difference in differences(self.reference[part], [answer.token_ids for answer in run.answers])
        ]
        ties = [difference for difference in found if self._forgiven(difference)]
        self.n_ties += len(ties)
        red = [difference for difference in found if difference not in ties]
        if red:
            shown = "; ".join(map(str, red[:5]))
            raise GateError(
                f"{arm} at concurrency {concurrency} answers {len(red)} of {len(run.answers)} prompts differently "
                f"from {Arm.OFF} at 1, so no speed is shown ({shown})"
            )

    def _forgiven(self, difference: Difference) -> bool:
        if not self.options.tie_gap:
            return False
        agreed = self.reference[difference.prompt][: difference.position]
        with self.running(Arm.OFF) as off:
            return is_near_tie(difference, [*self.prompts[difference.prompt], *agreed], off, self.options.tie_gap)


def tokenize(conversations: Sequence[Conversation], target: Path, thinking: bool) -> list[list[int]]:
    """Chat prompts as token ids: the same bytes for every arm, whatever a server's template code does."""
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(target)
    return [
        tokenizer.apply_chat_template(
            conversation, add_generation_prompt=True, enable_thinking=thinking, return_dict=False
        )
        for conversation in conversations
    ]


def conversations(options: argparse.Namespace) -> Sequence[Conversation]:
    """
    Raises:
        ValueError: the file has fewer than are asked for, or a line that is no prompt.
    """
    if not options.data:
        return held_out(options.num_prompts)
    found = read(options.data, options.num_prompts).conversations
    if len(found) < options.num_prompts:
        raise ValueError(f"{options.data}: {len(found)} prompts, but --num-prompts is {options.num_prompts}; lower it")
    return found


def make_servers(options: argparse.Namespace) -> dict[Arm, Server]:
    pair, flags = Pair(options.target, options.draft), options.server_flags
    servers, port = {}, options.port
    for arm in options.arms:
        port = free_port(port)
        servers[arm] = Server(
            tiny.command(arm, pair, *flags),
            port=port,
            log=tiny.RUN_DIR / f"bench-{port}-{arm}.log",
            env=options.env | tiny.environment(arm),
            name=str(arm),
        )
        port += 1
    return servers


def start_all(servers: dict[Arm, Server], console: Console) -> None:
    """Start them side by side and pause each.

    Raises:
        ServerError: too little memory for all of them, or one does not start or is not what it should be.
    """
    start_together(list(servers.values()), console)
    for arm, server in servers.items():
        require_worker(arm, server)
        server.pause()


def measure_all(bench: Bench, console: Console) -> list[dict[str, Any]]:
    """Every repeat, interleaved. One row per arm, concurrency and repeat.

    Ctrl-C, or SIGINT at a time limit, ends it with the repeats that are whole; the first must be.
    """
    rows: list[dict[str, Any]] = []
    try:
        for repeat in track(range(bench.options.repeats), "measuring", console=console, transient=True):
            if not console.is_terminal:
                console.print(f"repeat {repeat + 1} of {bench.options.repeats}")
            rows += measure_repeat(bench, repeat)
    except KeyboardInterrupt:
        if not rows:
            raise
    return rows


def measure_repeat(bench: Bench, repeat: int) -> list[dict[str, Any]]:
    rows, arms = [], list(bench.servers)
    for concurrency in bench.options.concurrency:
        parts = slices(len(bench.prompts), concurrency) if not bench.options.one_at_a_time else [EVERYTHING]
        speeds, latencies = defaultdict[Arm, list[Run]](list), defaultdict[Arm, list[Run]](list)
        for turn, part in enumerate(parts, start=repeat):
            for arm in rotated(arms, turn):
                speeds[arm].append(bench.run(arm, concurrency, part))
                if not bench.options.no_latency:
                    latencies[arm].append(bench.run(arm, concurrency, part, stream=True))
        for arm, runs in speeds.items():
            latency = joined(latencies[arm]) if latencies[arm] else None
            rows.append(report.row(arm, concurrency, repeat, joined(runs), latency))
    return rows


def parse(arguments: Sequence[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m launch.bench_serve", description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--target", type=Path, default=tiny.HYBRID.target, help="target checkpoint (the tiny hybrid)")
    parser.add_argument("--draft", type=Path, default=tiny.HYBRID.draft, help="its DFlash draft")
    arms = f"of {', '.join(Arm)} ({', '.join(tiny.ARMS)})"
    parser.add_argument("--arms", type=Arm, nargs="+", default=list(tiny.ARMS), help=arms)
    parser.add_argument("--concurrency", type=int, nargs="+", default=[1, 8])
    parser.add_argument("--repeats", type=int, default=5, help="interleaved repeats (5)")
    parser.add_argument("--num-prompts", type=int, default=32)
    parser.add_argument("--max-new-tokens", type=int, default=128)
    parser.add_argument("--data", type=Path, help='JSONL with "prompt" (held-out questions of the tiny corpus)')
    parser.add_argument("--no-latency", action="store_true", help="no streamed runs, which TTFT and TPOT come from")
    parser.add_argument("--no-thinking", action="store_true", help="ask the chat template for no thinking")
    parser.add_argument("--tie-gap", type=float, default=0.0, help="forgive differences between near-ties (0: none)")
    parser.add_argument("--one-at-a-time", action="store_true", help="never two servers in memory")
    parser.add_argument("--port", type=int, default=31000, help="look for free ports from here on (31000)")
    parser.add_argument("--output", type=Path, help="the JSON file (launch/results/<date>-<machine>-<commit>.json)")
    parser.add_argument("server_flags", nargs="*", help="after --: flags of all servers (those of the tiny pair)")
    options = parser.parse_args(arguments)
    if Arm.OFF not in options.arms:
        parser.error("--arms needs `off`: it is what the others are compared with")
    for path in (options.target, options.draft):
        if not (path / "config.json").is_file():
            parser.error(f"{path} holds no config.json; name a checkpoint directory with --target and --draft")
    try:
        options.conversations = conversations(options)
    except ValueError as error:
        parser.error(str(error))
    options.env = {}
    if not options.server_flags:  # the tiny pair's, which need no accelerator
        options.server_flags, options.env = [*tiny.FLAGS, *tiny.HYBRID_FLAGS], tiny.ENV
    return options


def main(arguments: Sequence[str] = tuple(sys.argv[1:])) -> None:
    options = parse(arguments)
    end_on_sigterm()
    console = Console()
    servers = make_servers(options)
    with ExitStack() as stack:
        for server in servers.values():
            stack.callback(server.stop)
        if not options.one_at_a_time:
            start_all(servers, console)
        prompts = tokenize(options.conversations, options.target, thinking=not options.no_thinking)
        bench = Bench(servers, prompts, options)
        with console.status("comparing answers"):
            bench.gate()
        console.print(f"[green]✔[/] the same {len(prompts)} answers from {', '.join(servers)}, token for token")
        rows = measure_all(bench, console)
    document = report.document(
        bench.servers,
        bench.prompts,
        rows,
        bench.options,
        n_ties=bench.n_ties,
        command=shlex.join(["python", "-m", "launch.bench_serve", *arguments]),
    )
    Console(width=max(console.width, TABLE_WIDTH)).print(report.table(document))
    console.print(noise(document), style="bold yellow")
    name = report.file_name()
    print(write(document, options.output or RESULTS / name))


if __name__ == "__main__":
    try:
        main()
    except (ServerError, GateError) as error:
        sys.exit(f"bench_serve: {error}")
