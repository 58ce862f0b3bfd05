"""Environment flags: one typed table, `FLAGS`, of variables that the plugin reads or checks.

`read` parses an environment into `Flags` and refuses unknown values and unknown `SGLANG_DFLASH_*` names. `current`
returns the flags of this process. This module depends on neither SGLang nor the worker.
"""

import os
import re
from argparse import SUPPRESS, ArgumentParser
from collections.abc import Mapping
from dataclasses import dataclass
from enum import StrEnum
from functools import cache
from pathlib import Path
from typing import Any, NamedTuple

from sglang_dflash.cli import nearest

PREFIX = "SGLANG_DFLASH_"

# Variables of SGLang 0.5.23 with this prefix, read only by its built-in worker.
STOCK_ONLY = ("SGLANG_DFLASH_EAGER_DRAFT_SAMPLER",)


class Worker(StrEnum):
    PLUGIN = "plugin"
    STOCK = "stock"


class GdnState(StrEnum):
    FOLD = "fold"
    SNAPSHOT = "snapshot"


class Rehearse(NamedTuple):
    """GPU that is emulated on a CPU, if any, and the extent of the emulation."""

    gpu: str = ""  # compute capability, such as "sm90"; "": no emulation
    kernels: bool = False  # run Triton kernels in Triton's interpreter, instead of the CPU forms of the ops
    streams: bool = False  # raise on data races between two streams, or between a stream and the host


class WidthPolicy(StrEnum):
    AUTO = "auto"
    FIXED = "fixed"
    RANDOM = "random"


class Copy(StrEnum):
    AUTO = "auto"
    OFF = "off"
    ON = "on"
    RANDOM = "random"


class Simulated(NamedTuple):
    """Simulated acceptance: every step commits about `length` tokens per request, whatever the target's tokens are."""

    length: float  # tokens per step, bonus included
    method: str  # "match-expected": `length` rounded down or up; "multinomial": normally distributed around `length`
    tokens: str  # "fixed": committed tokens are token 100; "real-draft-token": drafts, then the target's token

    def __str__(self) -> str:
        return f"{self.length:g} tokens per step ({self.method}, {self.tokens})"


@dataclass(frozen=True)
class Flags:
    """Parsed environment flags.

    Attributes:
        worker: worker for `--speculative-algorithm DFLASH`.
        gdn_state: method that advances the recurrent states of hybrid targets after a partly accepted block.
        width_policy: policy that chooses the number of tokens of a block to verify (the width).
        widths: widths to choose from, ascending; empty: the policy's default widths.
        width_trace: directory for a trace of every step's width; None: no trace.
        copy: use of n-gram copies from a request's token history in place of a block's last drafts.
        fp8_head: score the draft's block with an fp8 copy of the target's head.
        rehearse: emulation of a GPU on the CPU.
        returns_features: requests with `return_hidden_states` get the draft's features.
        probe: report the worker's internals, see `tools/prove/probe.py`.
        overlap: allow the overlap schedule; False acts as `--disable-overlap-schedule`.
        simulated: acceptance to simulate; None: acceptance is real.
    """

    worker: Worker
    gdn_state: GdnState
    width_policy: WidthPolicy
    widths: tuple[int, ...]
    width_trace: Path | None
    copy: Copy
    fp8_head: bool
    returns_features: bool
    rehearse: Rehearse
    probe: bool
    overlap: bool
    simulated: Simulated | None


@dataclass(frozen=True)
class Flag:
    """One environment variable."""

    name: str
    default: str
    values: tuple[str, ...]  # accepted values
    meaning: str
    pattern: str = "(?!)"  # regular expression of further values; by default none
    form: str = ""  # words for the values that match `pattern`
    example: str = ""  # one of these values
    may_differ: bool = False  # between ranks of one model


# Values that SGLang accepts for a switch. For any other value SGLang logs a warning and uses the default.
_ON = ("1", "true", "yes", "y")
_OFF_ON = ("0", "false", "no", "n", *_ON)

FLAGS = (
    Flag(
        "SGLANG_DFLASH_WORKER",
        "plugin",
        tuple(Worker),
        "Worker for `--speculative-algorithm DFLASH`. `plugin`: this plugin's. `stock`: SGLang's built-in worker.",
    ),
    Flag(
        "SGLANG_DFLASH_GDN_STATE",
        "fold",
        tuple(GdnState),
        "Recurrent states of Gated DeltaNet targets. `fold`: record each token's change of the state, and add the "
        "changes of accepted tokens. `snapshot`: store a full state per token, as the built-in worker does.",
    ),
    Flag(
        "SGLANG_DFLASH_WIDTHS",
        "auto",
        tuple(WidthPolicy),
        "[Verify widths](tuning.md#widths): `auto`, the whole block (`fixed`), one number, or a list from which `auto` "
        "chooses. `random`: for tests.",
        pattern=r"[0-9]+(,[0-9]+)*",
        form="a list of widths",
        example="1,4,8,16",
    ),
    Flag(
        "SGLANG_DFLASH_WIDTH_TRACE",
        "off",
        ("off",),
        "Directory for a trace. Each process writes one JSON line per step: width, requests and accepted drafts.",
        pattern="/.+",
        form="an absolute path",
        example="/a/directory",
        may_differ=True,
    ),
    Flag(
        "SGLANG_DFLASH_COPY",
        "auto",
        tuple(Copy),
        "[N-gram copies](tuning.md#copies). `auto`: copy if the server can. `on`: as `auto`, but refuse the launch if "
        "the server cannot. `random`: for tests.",
    ),
    Flag(
        "SGLANG_DFLASH_DRAFT_HEAD",
        "full",
        ("full", "fp8"),
        "[Output head of the draft](tuning.md#draft-head): the target's head (`full`), or an fp8 copy.",
    ),
    Flag(
        "SGLANG_DFLASH_HIDDEN_STATES",
        "final",
        ("final", "features"),
        "Answer to `return_hidden_states`: hidden states after the target's final norm (`final`), or the draft's "
        "[features](rl.md#training-the-draft-too).",
    ),
    Flag(
        "SGLANG_DFLASH_REHEARSE",
        "off",
        ("off", "1", "sm80", "sm89", "sm90", "sm100", "sm120"),
        "[GPU emulation](rehearsal.md) on a CPU, for tests. `1` is sm90.",
        pattern="(1|sm80|sm89|sm90|sm100|sm120)(,kernels|,streams|,kernels,streams)",
        form="a GPU with options",
        example="sm90,kernels,streams",
    ),
    Flag(
        "SGLANG_DFLASH_PROBE",
        "0",
        ("0", "1"),
        "`1`: record internals of every step in `/server_info`, for `sglang-dflash prove`. This slows the server.",
    ),
    Flag(
        "SGLANG_ENABLE_SPEC_V2",
        "1",
        _OFF_ON,
        "Variable of older SGLang that model cards still set. `1` changes nothing. With DFLASH, `0` acts as "
        "`--disable-overlap-schedule`.",
    ),
    Flag("SGLANG_ENABLE_DFLASH_SPEC_V2", "1", _OFF_ON, "As `SGLANG_ENABLE_SPEC_V2`."),
    Flag(
        "SGLANG_ENABLE_OVERLAP_PLAN_STREAM",
        "0",
        _OFF_ON,
        "SGLang's own variable, without effect on this plugin. `1`: its built-in worker reserves KV slots on a second "
        "CUDA stream, and SGLang refuses a launch with `--enable-lora`: then unset the variable.",
        may_differ=True,
    ),
    Flag(
        "SGLANG_ALLOW_OVERWRITE_LONGER_CONTEXT_LEN",
        "0",
        _OFF_ON,
        "SGLang's own variable. `1`: allow `--context-length` above the model's limit.",
        may_differ=True,
    ),
    Flag(
        "SGLANG_SIMULATE_ACC_LEN",
        "-1",
        ("-1",),
        "SGLang's own variable, for speed measurements. A positive number is the "
        "[simulated](tuning.md#simulated-acceptance) number of tokens per step. Answers are then meaningless.",
        pattern=r"[+-]?([0-9]+\.?[0-9]*|\.[0-9]+)(e[+-]?[0-9]+)?",
        form="a number",
        example="5.5",
    ),
    Flag(
        "SGLANG_SIMULATE_ACC_METHOD",
        "match-expected",
        ("match-expected", "multinomial"),
        "SGLang's own variable. `match-expected`: the simulated number is rounded down or up. `multinomial`: it is "
        "normally distributed with standard deviation 1.",
    ),
    Flag(
        "SGLANG_SIMULATE_ACC_TOKEN_MODE",
        "fixed",
        ("fixed", "real-draft-token"),
        "SGLang's own variable. Tokens of a simulated step: token 100 (`fixed`), or the drafts and a token of the "
        "target.",
    ),
)


def read(environ: Mapping[str, str]) -> Flags:
    """Return the flags set in `environ`.

    Raises:
        ValueError: a value is unknown or does not fit the worker, or a `SGLANG_DFLASH_*` name is not a flag.
    """
    raw = {flag.name: _value(flag, environ) for flag in FLAGS}
    worker = Worker(raw["SGLANG_DFLASH_WORKER"])
    _refuse_unknown(environ, worker)
    trace = raw["SGLANG_DFLASH_WIDTH_TRACE"]
    return Flags(
        worker=worker,
        gdn_state=GdnState(raw["SGLANG_DFLASH_GDN_STATE"]),
        **_widths(raw["SGLANG_DFLASH_WIDTHS"]),
        width_trace=None if trace == "off" else Path(trace),
        copy=Copy(raw["SGLANG_DFLASH_COPY"]),
        fp8_head=raw["SGLANG_DFLASH_DRAFT_HEAD"] == "fp8",
        returns_features=raw["SGLANG_DFLASH_HIDDEN_STATES"] == "features",
        rehearse=_rehearse(raw["SGLANG_DFLASH_REHEARSE"], worker),
        probe=raw["SGLANG_DFLASH_PROBE"] == "1",
        overlap=_on(raw["SGLANG_ENABLE_SPEC_V2"]) and _on(raw["SGLANG_ENABLE_DFLASH_SPEC_V2"]),
        simulated=_simulated(*(raw[f"SGLANG_SIMULATE_ACC_{name}"] for name in ("LEN", "METHOD", "TOKEN_MODE"))),
    )


@cache
def current() -> Flags:
    """Return the flags of this process, read from the environment at the first call without an error.

    Raises:
        ValueError: see `read`.
    """
    return read(os.environ)


def shared(environ: Mapping[str, str]) -> dict[str, str]:
    """Return the values in `environ` of the variables that must be equal on all ranks of a model, by name."""
    return {flag.name: _value(flag, environ) for flag in FLAGS if not flag.may_differ}


def require_trace_folder(read: Flags) -> None:
    """Check that the directory of `width_trace` can be written or made, or raise ValueError."""
    if read.width_trace is None:
        return
    nearest_one = next(path for path in (read.width_trace, *read.width_trace.parents) if path.exists())
    if not (nearest_one.is_dir() and os.access(nearest_one, os.W_OK | os.X_OK)):
        raise ValueError(
            f"SGLANG_DFLASH_WIDTH_TRACE={read.width_trace} cannot be written ({nearest_one} is no directory that this "
            "user may write to); name another directory"
        )


def selects_stock(environ: Mapping[str, str]) -> bool:
    """Return whether `environ` selects SGLang's own worker. Other variables are not checked, and may be invalid."""
    return environ.get("SGLANG_DFLASH_WORKER", "").lower() == Worker.STOCK


def table() -> str:
    """Return the flags as a Markdown table, for `docs/environment.md`."""
    rows = ["| variable | values | default | meaning |", "|---|---|---|---|"]
    rows += [
        f"| `{flag.name}` | {', '.join(f'`{value}`' for value in spellings(flag))} | `{flag.default}` "
        f"| {flag.meaning} |"
        for flag in FLAGS
    ]
    return "\n".join(rows) + "\n"


def spellings(flag: Flag) -> list[str]:
    """Return the accepted values, and an example if there is a pattern for more values."""
    return [*flag.values, *filter(None, [flag.example])]


def _widths(value: str) -> dict[str, Any]:
    if value in tuple(WidthPolicy):
        return {"width_policy": WidthPolicy(value), "widths": ()}
    return {"width_policy": WidthPolicy.AUTO, "widths": tuple(sorted(set(map(int, value.split(",")))))}


def _rehearse(value: str, worker: Worker) -> Rehearse:
    if value == "off":
        return Rehearse()
    gpu, *more = value.split(",")
    # The built-in worker's host buffers are on "cpu", and so are tensors of the emulated device.
    if "streams" in more and worker is Worker.STOCK:
        raise ValueError(
            f"SGLANG_DFLASH_REHEARSE={value} cannot distinguish the built-in worker's host and device tensors; "
            "leave out `,streams` or unset SGLANG_DFLASH_WORKER"
        )
    return Rehearse("sm90" if gpu == "1" else gpu, kernels="kernels" in more, streams="streams" in more)


def _simulated(length: str, method: str, tokens: str) -> Simulated | None:
    return Simulated(float(length), method, tokens) if float(length) > 0 else None


def _on(value: str) -> bool:
    return value in _ON


def _value(flag: Flag, environ: Mapping[str, str]) -> str:
    value = environ.get(flag.name, flag.default)
    if value.lower() in flag.values:
        return value.lower()
    if not re.fullmatch(flag.pattern, value):
        further = f" or {flag.form} such as {flag.example}" if flag.form else ""
        raise ValueError(
            f"{flag.name}={value!r} is not one of {', '.join(flag.values)}{further}; set one of them, or unset it"
        )
    return value


def _refuse_unknown(environ: Mapping[str, str], worker: Worker) -> None:
    ours = {flag.name for flag in FLAGS}
    for name in sorted(environ):
        if not name.startswith(PREFIX) or name in ours:
            continue
        if name not in STOCK_ONLY:
            known = sorted(known for known in ours if known.startswith(PREFIX))
            cure = nearest(name, known, prefix=PREFIX) or f"; use one of {', '.join(known)}, or unset it"
            raise ValueError(f"{name} is not a variable of sglang-dflash{cure}")
        if worker is not Worker.STOCK:
            raise ValueError(
                f"{name} affects only SGLang's built-in worker; unset it or set SGLANG_DFLASH_WORKER=stock"
            )


# Flag names in model cards that SGLang 0.5.23 does not have, with SGLang's present names.
OLD_NAMES = {
    "--speculative-dflash-draft-window-size": "--speculative-draft-window-size",
    "--mamba-scheduler-strategy": "--mamba-radix-cache-strategy",
}


def add_old_names(parser: ArgumentParser) -> None:
    """Add each old name as an option that sets the new name's value. If both are given, the last one applies."""
    for old, new in OLD_NAMES.items():
        action = parser._option_string_actions[new]  # argparse has no public look-up
        parser.add_argument(
            old,
            dest=action.dest,
            type=action.type or str,
            choices=action.choices,
            default=SUPPRESS,
            help=f"Older name of {new}.",
        )
