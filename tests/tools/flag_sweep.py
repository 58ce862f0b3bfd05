"""Start the tiny pairs with every flag of SGLang's launch command, with DFLASH and without speculation, and compare.

    python -m tests.tools.flag_sweep resolve            # resolve the arguments of both launches, for every flag
    python -m tests.tools.flag_sweep serve [N_GROUPS]   # launch both servers with groups of flags; compare answers
    python -m tests.tools.flag_sweep report             # print the outcomes as a Markdown table

`sweep/flags.toml` has the flags and their values. Results are appended to .run/flag_sweep/*.jsonl, and a later run
skips what is in these files. If the servers of a group differ or do not start, the group is split in halves.
"""

import contextlib
import gc
import json
import os
import shlex
import signal
import sys
import tempfile
import time
import traceback
from collections import Counter
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from hashlib import sha256
from importlib import import_module
from typing import Any

import httpx

from sglang_dflash.pairs.servers.errors import ServerError
from sglang_dflash.pairs.servers.ports import free_port
from sglang_dflash.pairs.servers.server import end_on_sigterm
from sglang_dflash.pairs.tiny import pairs as tiny
from sglang_dflash.pairs.tiny.pairs import Arm
from tests.fixtures import forking
from tests.fixtures.forker import IMPORTED_ONCE
from tests.server.lib.forked import make_server
from tests.tools.sweep.launches import (
    KIND_FLAGS,
    OUT,
    TABLE,
    Ask,
    append,
    argv_of,
    asks,
    choices,
    pair_of,
    prompts_of,
    read,
)  # fmt: skip

N_TOKENS, CONCURRENCIES = 32, (1, 4)  # of a request; requests at once
GROUP = 30  # flags per launch
RESOLVE_S, START_S, ANSWER_S = 120, 300.0, 120.0
ARMS = (Arm.OFF, Arm.PLUGIN)
SERVED, ENDED, OK = "served", "ended", "ok"


# -- arguments only ---------------------------------------------------------------------------------------------------


def resolve(arm: Arm, argv: list[str]) -> None:
    """Resolve the arguments of a launch as `sglang-dflash check` does, with DFLASH or without speculation."""
    from sglang.srt.server_args import prepare_server_args

    from sglang_dflash.tools.check.launch import launch

    if arm is Arm.PLUGIN:
        launch(argv)
        return
    server_args = prepare_server_args(argv)
    server_args.resolve_once()
    server_args.check_server_args()


def in_child(arm: Arm, argv: list[str]) -> str:
    """Run `resolve` in a forked process; return "ok", or the last line of its output."""
    with tempfile.TemporaryFile("w+") as output:
        pid = os.fork()
        if not pid:
            signal.alarm(RESOLVE_S)
            for stream in (1, 2):
                os.dup2(output.fileno(), stream)
            status = 1
            try:
                resolve(arm, argv)
                status = 0
            except BaseException:  # an interpreter prints any error and exits
                traceback.print_exc()
            finally:
                sys.stdout.flush()
                sys.stderr.flush()
                os._exit(status)
        _, status = os.waitpid(pid, 0)
        output.seek(0)
        lines = [line for line in output.read().splitlines() if line.strip() and line != "SystemExit: 2"]
        return OK if status == 0 else f"{lines[-1] if lines else ''} (status {os.waitstatus_to_exitcode(status)})"


def resolve_all() -> None:
    """Resolve every launch and every choice in both arms."""
    from sglang.srt.plugins import load_plugins

    load_plugins()
    for module in IMPORTED_ONCE:
        import_module(module)
    for arm in ARMS:
        resolve(arm, argv_of(arm, "dense", []))  # applies hooks and imports the rest once, for all children
    gc.freeze()  # garbage collection in children would copy shared pages
    known = {(result["kind"], result["text"]) for result in read("resolve")}
    for ask in [Ask(kind, "") for kind in ("dense", "hybrid")] + asks() + list(choices()):
        if (ask.kind, ask.text) not in known:
            flags = ask.flags if ask.text else []
            found = {str(arm): in_child(arm, argv_of(arm, ask.kind, flags)) for arm in ARMS}
            append("resolve", {"kind": ask.kind, "text": ask.text} | found)


# -- servers ----------------------------------------------------------------------------------------------------------


def ask_one(url: str, prompt: list[int]) -> list[Any]:
    """Return the status of a request and its answer's tokens, or the message of a refusal."""
    body = {"input_ids": prompt, "sampling_params": {"temperature": 0, "max_new_tokens": N_TOKENS}}
    response = httpx.post(f"{url}/generate", json=body, timeout=ANSWER_S)
    if response.status_code != httpx.codes.OK:
        return [response.status_code, response.text[:300]]
    return [response.status_code, response.json().get("output_ids")]


def serve(arm: Arm, kind: str, flags: Sequence[str], port: int) -> dict[str, Any]:
    """Launch one server, ask it all prompts, and return its state, its answers and its log's errors."""
    own = [word.replace("{port}", str(port + 1000)) for word in flags]  # the other arm's server runs too
    command = tiny.command(arm, pair_of(kind), *tiny.FLAGS, *KIND_FLAGS[kind], *own)
    env = tiny.ENV | tiny.environment(arm)
    server = make_server(command, env, port=port, log=OUT / f"{kind}-{arm}.log", name=f"{arm} {kind}")
    found: dict[str, Any] = {"state": ENDED, "answers": []}
    try:
        server.start()
        server.wait_ready(START_S)
        for n in CONCURRENCIES:
            with ThreadPoolExecutor(n) as threads:
                found["answers"] += list(threads.map(lambda prompt: ask_one(server.url, prompt), prompts_of(kind)))
        found["state"] = SERVED if server.running else ENDED
    except (ServerError, httpx.HTTPError) as error:
        found["state"] = f"{ENDED}: {type(error).__name__}"
    finally:
        log = server.log_text().splitlines()
        with contextlib.suppress(ServerError):
            server.stop()
    # Without a warm-up SGLang may ask itself to freeze garbage collection before it listens, and logs the failure.
    too_early = any("/freeze_gc (Caused by" in line for line in log)
    found["tracebacks"] = 0 if too_early else sum("Traceback (most recent call last)" in line for line in log)
    if found["state"] != SERVED or found["tracebacks"]:
        found["log"] = [line[:400] for line in log if "Error" in line][-4:] + [line[:200] for line in log[-3:]]
    return found


def compare(kind: str, texts: Sequence[str]) -> bool:
    """Launch both servers with all flags of `texts`, store the result, and return whether both served alike."""
    flags = [word for text in texts if text for word in Ask(kind, text).flags]
    ports = [free_port(33100), free_port(33400)]
    prompts_of(kind)  # two threads cannot import Transformers at the same time
    began = time.monotonic()
    with ThreadPoolExecutor(len(ARMS)) as threads:
        off, ours = threads.map(lambda arm, port: serve(arm, kind, flags, port), ARMS, ports)
    answers = off["answers"] == ours["answers"]
    same = off["state"] == ours["state"] == SERVED and answers and off["tracebacks"] == ours["tracebacks"]
    result = {"kind": kind, "texts": list(texts), "same": same, "seconds": round(time.monotonic() - began)}
    for arm, found in ((Arm.OFF, off), (Arm.PLUGIN, ours)):
        result[str(arm)] = found | {"answers": digest(found)} if same else found
    append("serve", result)
    print(time.strftime("%H:%M:%S"), "same" if same else f"DIFFER off {off['state']}, plugin {ours['state']}",
          shlex.join(flags)[:300], flush=True)  # fmt: skip
    return same


def digest(served: dict[str, Any]) -> str:
    return sha256(json.dumps(served["answers"]).encode()).hexdigest()[:16]


def halves(kind: str, texts: Sequence[str]) -> None:
    """Compare a group. If its servers are unlike, compare parts of it, down to single flags.

    If both logs name one flag of the group in an error, this flag is compared alone. Otherwise the group is halved.
    """
    if compare(kind, texts) or len(texts) == 1:
        return
    last = read("serve")[-1]
    errors = [" ".join(last[str(arm)].get("log", [])).replace("_", "-") for arm in ARMS]
    named = [text for text in texts if all(text.split(" ")[0].removeprefix("--") in error for error in errors)]
    middle = len(texts) // 2
    parts = (
        [named, [text for text in texts if text not in named]] if len(named) == 1 else [texts[:middle], texts[middle:]]
    )
    for part in parts:
        halves(kind, part)


def groups() -> Iterator[tuple[str, list[str]]]:
    """Yield groups of launches that both arms resolve and that are not compared yet. A flag occurs once in a group."""
    resolved = {(r["kind"], r["text"]): all(r[str(arm)] == OK for arm in ARMS) for r in read("resolve")}
    done = {(r["kind"], text) for r in read("serve") if r["same"] or len(r["texts"]) == 1 for text in r["texts"]}
    wanted = [ask for ask in asks() if resolved.get((ask.kind, ask.text), True)]
    wanted = [ask for ask in wanted if (ask.kind, ask.text) not in done]
    for kind in KIND_FLAGS:
        if (kind, "") not in done:
            yield kind, [""]
        open_groups: list[list[str]] = []
        for ask in (ask for ask in wanted if ask.kind == kind and not ask.alone):
            names = {word for word in ask.flags if word.startswith("--")}
            fits = (g for g in open_groups if len(g) < GROUP and not names & set(" ".join(g).split(" ")))
            if (group := next(fits, None)) is None:
                open_groups.append([ask.text])
            else:
                group.append(ask.text)
        yield from ((kind, group) for group in open_groups)
    yield from ((ask.kind, [ask.text]) for ask in wanted if ask.alone)


def report() -> None:
    """Print counts of outcomes, and every launch that differs."""
    resolved, served = read("resolve"), read("serve")
    texts = {(r["kind"], t): r for r in served if r["same"] or len(r["texts"]) == 1 for t in r["texts"]}
    counts: Counter[str] = Counter()
    for r in resolved:
        off, ours = (r[str(arm)] == OK for arm in ARMS)
        one = texts.get((r["kind"], r["text"]))
        outcome = f"resolve: off {'ok' if off else 'refused'}, DFLASH {'ok' if ours else 'refused'}"
        if one:
            outcome += "; served alike" if one["same"] else "; differ when served"
        counts[outcome] += 1
        if off and not ours:
            print(f"refused with DFLASH only: {r['text']}: {r[str(Arm.PLUGIN)]}")
    for (kind, text), one in texts.items():
        if not one["same"]:
            print(f"differ: {kind} {text}: off {one['off']['state']}, DFLASH {one['plugin']['state']}")
            print("   ", one["off"].get("log"), "\n   ", one["plugin"].get("log"))
    print("\n".join(f"| {outcome} | {n} |" for outcome, n in counts.items()))
    print("\n".join(f"| not launched: {reason} | {len(flags)} |" for reason, flags in TABLE["not_launched"].items()))


if __name__ == "__main__":
    os.environ |= {forking.RUN: str(os.getpid()), "CUDA_VISIBLE_DEVICES": "", "OMP_NUM_THREADS": "1"}
    os.environ |= {"HF_HUB_OFFLINE": "1"}
    (OUT / "files").mkdir(parents=True, exist_ok=True)
    match sys.argv[1:]:
        case ["resolve"]:
            resolve_all()
        case ["serve", *limit]:
            end_on_sigterm()  # after the servers of the present group have ended
            for _ in range(int(limit[0]) if limit else sys.maxsize):
                if (group := next(groups(), None)) is None:
                    break
                halves(*group)
        case ["report"]:
            report()
        case _:
            sys.exit(__doc__)
