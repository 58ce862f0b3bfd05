"""Parts that run in processes of their own: times of kernels, and checks of `sglang-dflash prove`."""

import json
import os
import signal
import subprocess
import sys
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

from env.gpu.clock import Document

# Checks in the order of their value, with estimated seconds on an H200.
PROVE_S = {
    "draft graph": 25.0, "one token": 110.0, "parity fa3 page 1": 80.0, "speed": 260.0, "parity triton page 1": 80.0,
    "parity flashinfer page 1": 80.0,
}  # fmt: skip
PROVE_DRY_S = {"draft graph": 15.0, "one token": 15.0}  # skipped on a CPU
PROVE_START_S = 25.0  # of `prove` itself
END_S = 10.0  # seconds after SIGTERM; `timeout` kills this process after 15


def printed(command: Sequence[str], limit_s: float) -> str:
    """Return what a short command prints; empty if it cannot run."""
    try:
        return subprocess.run(command, capture_output=True, text=True, timeout=limit_s, check=False).stdout.strip()
    except (OSError, subprocess.TimeoutExpired):
        return ""


def run(command: Sequence[str], limit_s: float, log: Path, env: dict[str, str] | None = None) -> str:
    """Run a command in a process group of its own, and write its output to `log`.

    Returns:
        "status N", or "timed out". After a time-out the command gets SIGTERM. At the end its group gets SIGKILL.
    """
    log.parent.mkdir(parents=True, exist_ok=True)
    with log.open("wb") as file:
        process = subprocess.Popen(
            command, stdin=subprocess.DEVNULL, stdout=file, stderr=subprocess.STDOUT, start_new_session=True,
            env=os.environ | (env or {}),
        )  # fmt: skip
        result = "timed out"
        try:
            result = f"status {process.wait(max(1.0, limit_s))}"
        except subprocess.TimeoutExpired:
            end(process)
        finally:
            end(process)
    return result


def end(process: subprocess.Popen[bytes]) -> None:
    """End a process and its group."""
    if process.poll() is None:
        process.terminate()
        with suppress(subprocess.TimeoutExpired):
            process.wait(END_S)
    with suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)
    process.wait()


def tail(log: Path, n: int = 25) -> str:
    return "\n".join(log.read_text(errors="replace").splitlines()[-n:])


def kernels(out: Document, folder: Path) -> None:
    """Time kernels in a process of their own (`kernel_times.py`), whose GPU memory is then free again."""
    path, log = folder / "a-kernels.json", folder / "a-logs" / "kernels.log"
    path.unlink(missing_ok=True)
    limit_s = out.clock.within(120)
    result = run([sys.executable, "-m", "env.gpu.kernel_times", str(path), str(limit_s - 10)], limit_s, log)
    out.fields["kernels"] = json.loads(path.read_text()) if path.exists() else {}
    out.leave_out(*(f"kernels, {name}" for name in out.fields["kernels"].pop("left_out", [])))
    if result != "status 0":
        raise RuntimeError(f"kernel_times: {result}\n{tail(log)}")


def chosen(estimates_s: dict[str, float], left_s: float) -> list[str]:
    """Return the checks that fit into the time left, the first ones first."""
    names, left_s = [], left_s - PROVE_START_S
    for name, seconds in estimates_s.items():
        if seconds <= left_s:
            names.append(name)
            left_s -= seconds
    return names


def prove(out: Document, folder: Path, *, small: bool) -> None:
    """Run the checks of `prove` for which time is left."""
    estimates_s = PROVE_DRY_S if small else PROVE_S
    names = chosen(estimates_s, out.clock.left_s())
    out.leave_out(*(f"prove, {name}" for name in estimates_s if name not in names))
    if names:
        out.part(f"prove: {', '.join(names)}", 0.0, lambda: prove_these(out, folder, names, small=small))


def prove_these(out: Document, folder: Path, names: Sequence[str], *, small: bool) -> None:
    path, log, left_s = folder / "a-prove.json", folder / "a-logs" / "prove.log", out.clock.left_s()
    path.unlink(missing_ok=True)
    minutes = max(0.1, (left_s - PROVE_START_S) / 60)
    command = [sys.executable, "-m", "sglang_dflash", "prove", "--only", *names]
    command += ["--minutes", f"{minutes:.2f}", "--out", str(path)]
    result = run(command, left_s, log, {"SGLANG_DFLASH_REHEARSE": "sm90"} if small else None)
    found: dict[str, Any] = json.loads(path.read_text()) if path.exists() else {"results": []}
    out.fields["prove"] = {"result": result, "results": found["results"]}
    # Status 1: a check failed, which its result says.
    if result not in ("status 0", "status 1") or not found["results"]:
        raise RuntimeError(f"prove: {result}\n{tail(log)}")
