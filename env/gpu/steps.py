"""Steps of a target of 27 billion parameters by worker and block size, kernels, and checks. `a.sh` runs this module.

Writes $OUT/a.json after every result. Arms: `off` is no speculation, `stock` SGLang's DFLASH worker, `ours` this
plugin's, and `width 1` this plugin's with one verified token per step. `rests.py` measures other arms and loads with
the same class.
"""

import json
import os
import statistics
import time
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from functools import partial
from pathlib import Path
from random import Random
from typing import Any, NamedTuple

import httpx

from env.gpu import checks, dry, models, servers27
from env.gpu.clock import Clock, Document
from env.gpu.log_lines import about_memory, intervals, mean_acceptance, shared_layers
from env.gpu.servers27 import DATA_SET, DRY, GPU, OFF, OURS, STOCK, WIDTH_1, Settings
from env.gpu.shared_layers import MARK
from sglang_dflash.pairs.servers import arms, document
from sglang_dflash.pairs.servers.errors import ServerError
from sglang_dflash.pairs.servers.server import Server
from sglang_dflash.pairs.tiny.pairs import Pair

ARMS = {16: (OFF, STOCK, OURS), 8: (OFF, STOCK, OURS, WIDTH_1)}  # by block size, in this order
PLACE = ("block", "backend", "prompt", "requests", "arm")  # fields of a row that name what was measured
WARM_STEPS = 2  # of the unmeasured answers before a server's first measurement
LOG_S = 0.3  # seconds after an answer until its last line is in the log
ANSWER_S = 120.0  # seconds, only against hangs
# Estimated seconds of each part. A part that does not fit is left out. The estimate for blocks covers the start of the
# servers and the first round.
ESTIMATES_S = {"blocks of 16": 170.0, "blocks of 8": 100.0, "kernels": 50.0}
ESTIMATES_DRY_S = {"blocks of 16": 60.0, "blocks of 8": 60.0, "kernels": 30.0}
START_S = {16: 240.0, 8: 120.0}  # limits of the servers' start
NOTES = [
    "Target and draft have the shapes of Qwen3.5-27B and z-lab/Qwen3.5-27B-DFlash, and random weights.",
    "In every arm all target layers of one kind share the matrices of the first (`env/gpu/shared_layers.py`), and the "
    "embedding is also the head. Otherwise three targets do not fit on one card. A layer's matrices exceed the L2 "
    "cache, so a step reads as many bytes as with own matrices.",
    "Acceptance is simulated (SGLANG_SIMULATE_ACC_LEN) with the draft's model card's lengths. Whole blocks are "
    "verified, and n-gram copies are off. The arm `width 1` verifies and commits one token.",
    "`intervals_ms`: milliseconds per step in SGLang's log, scheduling included; the interval with the prefill is left "
    "out. `ms` is their median. `tokens_per_s`: all tokens over a client's time for all answers, prefill included.",
    "The servers of one block size are in memory together, and take turns. Start-up times are those of servers that "
    "start together; `off` starts first and compiles kernels that all arms use.",
    "The prefix cache is disabled (`--disable-radix-cache`), so each request has one recurrent state.",
]


class Turn(NamedTuple):
    """One measurement: an arm answers `requests` prompts of `prompt` tokens at once."""

    round: int
    prompt: int
    requests: int
    arm: str


def turns(arms: Sequence[str], loads: Sequence[tuple[int, int]], n_rounds: int) -> list[Turn]:
    """Return the measurements in order. At each load every arm has its turn before the next load."""
    found = []
    for n in range(n_rounds):
        for i, (prompt, requests) in enumerate(loads):
            shift = (n + i) % len(arms)
            found += [Turn(n, prompt, requests, arm) for arm in (*arms[shift:], *arms[:shift])]
    return found


def prompts(n: int, length: int, n_vocab: int, seed: int) -> list[list[int]]:
    """Return prompts of random tokens."""
    random = Random(seed)
    return [[random.randrange(10, n_vocab - 10) for _ in range(length)] for _ in range(n)]


class Measurement:
    """The servers of all arms, and their measurements."""

    def __init__(self, settings: Settings, clock: Clock, out: Document, work: Path) -> None:
        self.settings, self.clock, self.out, self.work = settings, clock, out, work
        self.logs = work / f"{out.path.stem}-logs" / settings.backend
        self.live: dict[str, Server] = {}
        self.http = httpx.Client(timeout=ANSWER_S, trust_env=False)
        self.path = servers27.layers_path(work / "layers", os.environ.get("PYTHONPATH", ""))
        self.pair: Pair | None = None
        self.seed, self.port = 0, servers27.FIRST_PORT
        self.slowest_s = 0.0  # seconds of the longest turn so far

    def blocks_of(self, block: int, arms: Sequence[str], later_s: float = 0.0) -> None:
        """Start the arms of a block size, and measure them in turns. The server `off` keeps running.

        Args:
            later_s: seconds that a second round leaves to later parts.
        """
        self.pair = self.pair or models.write(self.work / "models", small=self.settings.small)
        self.n_vocab = json.loads((self.pair.target / "config.json").read_text())["vocab_size"]
        self.stop([arm for arm in self.live if arm != OFF])
        new = {arm: self.make(arm, block) for arm in arms if arm not in self.live}
        waves = [[new[OFF]]] if OFF in new else []
        waves.append([server for arm, server in new.items() if arm != OFF])
        self.live |= new  # stopped at the end, whatever happens
        started = servers27.bring_up(waves, self.clock, START_S[block])
        for arm, server in new.items():
            self.describe_start(arm, block, server, started[server.name])
        ready = [arm for arm in arms if arm in self.live]
        if not ready:
            raise ServerError("no server is ready")
        for arm in ready:
            self.attempt(arm, f"blocks of {block}, warm-up of {arm}", partial(self.warm_up, self.live[arm], block))
        planned = turns(ready, self.settings.loads, self.settings.rounds)
        for i, turn in enumerate(planned):
            # A second round is worth less than the first one of later blocks.
            if not self.clock.fits(2 * self.slowest_s + 2 + (later_s if turn.round else 0)):
                self.out.leave_out(*(f"blocks of {block}, {name(one)}" for one in planned[i:]))
                break
            if turn.arm in self.live:
                self.attempt(turn.arm, f"blocks of {block}, {name(turn)}", partial(self.measure, turn, block))
        self.summarise()

    def warm_up(self, server: Server, block: int) -> None:
        """Let a server compile and load what answers need."""
        loads = self.settings.loads
        for prompt, n in dict.fromkeys((loads[0], max(loads, key=lambda load: load[1]), loads[-1])):
            self.answer(server, prompt, n, WARM_STEPS * block)

    def attempt(self, arm: str, what: str, run: Callable[[], None]) -> None:
        """Ask an arm's server. If this fails the server is stopped, and has no further turns."""
        try:
            run()
        except (ServerError, httpx.HTTPError) as error:
            self.out.fail(what, f"{type(error).__name__}: {error}\n{self.live[arm].log_tail()}")
            self.stop([arm])

    def summarise(self) -> None:
        """Write and print the medians over rounds."""
        cells: dict[tuple[Any, ...], list[dict[str, Any]]] = {}
        for row in self.out.fields["rows"]:
            cells.setdefault(tuple(row[field] for field in PLACE), []).append(row)
        summary = []
        for place, rows in cells.items():
            line: dict[str, Any] = {**dict(zip(PLACE, place, strict=True)), "rounds": len(rows)}
            for field in ("ms", "tokens_per_s", "decode_tokens_per_s"):
                values = [row[field] for row in rows if row[field] is not None]
                line[field] = round(statistics.median(values), 3) if values else None
            summary.append(line)
        self.out.fields["summary"] = summary
        self.out.save()

    def make(self, arm: str, block: int) -> Server:
        assert self.pair is not None
        place = {"port": self.port, "logs": self.logs, "path": self.path}
        server = servers27.make(arm, block, self.pair, self.settings, **place)
        self.port = server.port + 1
        return server

    def describe_start(self, arm: str, block: int, server: Server, start: servers27.Start) -> None:
        """Record a start: seconds, memory, the worker. A server that failed is removed."""
        error, states = start.error, list[dict[str, Any]]()
        try:
            if not error:
                arms.require_worker(server, ours=arm in (OURS, WIDTH_1))
                states = server.server_info().get("internal_states", [])
        except ServerError as wrong:
            error = str(wrong)
        log = server.log_text()
        about = {"arm": arm, "block": None if arm == OFF else block, "backend": self.settings.backend}
        about |= {"ready_s": start.seconds, "stages_s": start.stages}
        about |= {"shared_layers": shared_layers(log, MARK), "memory": about_memory(log), "error": error[-3000:]}
        about |= {"command": document.portable(" ".join(server.command)), "gpu_used": gpu_used()}
        about["env"] = {name: value for name, value in server.env.items() if name != "PYTHONPATH"}
        if error:
            self.out.fail(f"start of {server.name}", error)
            self.stop([arm])
        about["internal_states"] = [slim(state) for state in states]
        self.out.fields["starts"].append(about)
        self.out.save()

    def answer(self, server: Server, prompt: int, n: int, n_tokens: int) -> tuple[float, int]:
        """Let the server answer `n` random prompts of `prompt` tokens at once.

        Returns:
            The seconds, and the number of tokens of all answers.
        """
        self.seed += 1
        asked = prompts(n, prompt, self.n_vocab, self.seed)
        sampling = {"temperature": 0.0, "max_new_tokens": n_tokens, "ignore_eos": True}
        began = time.perf_counter()
        body = {"input_ids": asked, "sampling_params": sampling}
        response = self.http.post(f"{server.url}/generate", json=body, timeout=max(5.0, self.clock.within(ANSWER_S)))
        passed = time.perf_counter() - began
        if response.status_code != 200:
            raise ServerError(f"{server.name}: /generate answered {response.status_code}: {response.text[:500]}")
        return passed, sum(len(one["output_ids"]) for one in response.json())

    def measure(self, turn: Turn, block: int) -> None:
        began, server, settings = self.clock.passed_s(), self.live[turn.arm], self.settings
        length = settings.acceptance[block] if turn.arm in (STOCK, OURS) else 1
        before = len(server.log_text())
        seconds, n_tokens = self.answer(server, turn.prompt, turn.requests, round(settings.steps * length))
        time.sleep(LOG_S)
        found = intervals(server.log_text()[before:], turn.requests)
        milliseconds = [round(one.step_ms, 3) for one in found]
        acceptance = mean_acceptance(found)
        row = {"block": block, "backend": settings.backend, **turn._asdict(), "began_s": round(began, 2)}
        row |= {"ms": round(statistics.median(milliseconds), 3) if found else None, "intervals_ms": milliseconds}
        row |= {"acceptance": acceptance and round(acceptance, 3), "tokens_per_s": round(n_tokens / seconds, 2)}
        row |= {"decode_tokens_per_s": statistics.median(one.tokens_per_s for one in found) if found else None}
        self.out.fields["rows"].append(row)
        self.slowest_s = max(self.slowest_s, self.clock.passed_s() - began)
        print(f"  {name(turn)}: {row['ms']} ms, {row['tokens_per_s']} tokens/s", flush=True)
        self.out.save()

    def stop(self, names: Sequence[str]) -> None:
        servers27.stop([self.live.pop(arm) for arm in names])

    def stop_all(self) -> None:
        self.stop(list(self.live))


def name(turn: Turn) -> str:
    return f"round {turn.round + 1}, {turn.requests} requests of {turn.prompt} tokens, {turn.arm}"


def slim(state: dict[str, Any]) -> dict[str, Any]:
    """Return the parts of a scheduler's state that describe memory."""
    return {
        key: state.get(key) for key in ("memory_usage", "mem_fraction_static", "effective_max_running_requests_per_dp")
    }


def gpu_used() -> str:
    """Return the used memory of the GPU, as nvidia-smi prints it; empty without one."""
    return checks.printed(["nvidia-smi", "--query-gpu=memory.used", "--format=csv,noheader"], 10)


def begin(script: str, title: str, settings: Settings, **fields: Any) -> tuple[Clock, Document, Path]:
    """Return the clock of `script`, its document with settings and further `fields`, and the folder for other files."""
    clock, folder, work = Clock.from_environment(), Path(os.environ["OUT"]), Path(os.environ["WORK"])
    head = document.head(title, f"env/gpu/{script}")
    if settings.small:
        head["level"] = "R: sm90 rehearsed on a CPU, tiny shapes"
    about = {**fields, "settings": servers27.describe(settings), "notes": NOTES}
    path = (folder / script).with_suffix(".json")
    out = Document(path, clock, **head, **about, starts=[], rows=[], summary=[])
    out.save()
    return clock, out, work


def main() -> int:
    servers27.end_on_first_sigterm()
    settings, small = (DRY, True) if dry.is_dry() else (GPU, False)
    title, results = "steps of a 27B target by worker and block size", {"kernels": {}, "prove": {}}
    clock, out, work = begin("a.sh", title, settings, data_set_of_acceptance=DATA_SET, **results)
    estimates = ESTIMATES_DRY_S if small else ESTIMATES_S
    measurement = Measurement(settings, clock, out, work)
    with ExitStack() as stack:
        stack.callback(measurement.stop_all)
        for block, arms in ARMS.items():
            title = f"blocks of {block}"
            later_s = estimates["blocks of 8"] if block == 16 else 0.0
            out.part(title, estimates[title], partial(measurement.blocks_of, block, arms, later_s))
    out.part("kernels", estimates["kernels"], partial(checks.kernels, out, work))
    checks.prove(out, work, small=small)
    out.finish()
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
