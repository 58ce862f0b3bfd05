"""Will DFLASH be served by this plugin? A report before the launch.

    python -m sglang_dflash.check                              the installation
    python -m sglang_dflash.check --model-path ... [flags]     the same, and a launch with these flags
    python -m sglang_dflash.check --json ...                   as one JSON document on the last line
    python -m sglang_dflash.check --server URL [--json]        a running server: what its steps cost, what it chose
    python -m sglang_dflash.check --model ... --gpu-memory ... how many requests a card holds (`capacity_report`)

The first two run SGLang's own plugin loading and argument resolution in this process and look at the result, so they
see what a launch would do up to the point where weights load. Exit status: 0 if everything is as it should be, else 1.
"""

import dataclasses
import json
import os
import platform
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from importlib.metadata import entry_points, version
from typing import Any
from urllib.error import URLError
from urllib.request import urlopen

from sglang_dflash import flags
from sglang_dflash.capacity import report as capacity_report
from sglang_dflash.flags import Worker
from sglang_dflash.host import contract as host
from sglang_dflash.host.arguments import asks_for_dflash
from sglang_dflash.host.names import SECTIONS, SGLANG
from sglang_dflash.width.cost import table

ENTRY_POINTS = {
    "sglang.srt.plugins": ("sglang_dflash", "sglang_dflash.plugin:register"),
    "sglang.srt.platforms": ("sglang_dflash_cpu", "sglang_dflash.cpu:activate"),
}

# What a check may raise to say no: our own errors, and those of SGLang's argument resolution.
REFUSALS = (ValueError, RuntimeError, AssertionError, OSError, ImportError)


@dataclass(frozen=True)
class Finding:
    """One line of the report."""

    name: str
    ok: bool
    text: str


def versions() -> str:
    packages = ", ".join(f"{name} {version(name)}" for name in ("sglang-dflash", "sglang", "torch"))
    return f"{packages}, python {platform.python_version()}"


def environment() -> str:
    read = flags.read(os.environ)
    return f"worker {read.worker}, overlap schedule {'allowed' if read.overlap else 'off'}"


def found_by_sglang() -> str:
    """The entry points that SGLang looks up, as this Python finds them.

    Raises:
        RuntimeError: one is missing, or another package's.
    """
    for group, (name, value) in ENTRY_POINTS.items():
        found = [point.value for point in entry_points(group=group) if point.name == name]
        if found != [value]:
            raise RuntimeError(f"entry point {name} in {group} is {found or 'missing'}, not {value}; install again")
    return " and ".join(name for name, _ in ENTRY_POINTS.values())


def live() -> str:
    """Load plugins as SGLang does, and see whether our hooks are where they should be.

    Raises:
        RuntimeError: the plugin ended the process, as it does under another SGLang.
        HostMismatch: see `host.require_live`.
    """
    from sglang.srt.plugins import load_plugins

    try:
        load_plugins()
    except SystemExit as end:  # the plugin's own way of stopping a launch
        raise RuntimeError(str(end)) from None
    host.require_live()
    if flags.read(os.environ).worker is Worker.STOCK:
        return "SGLANG_DFLASH_WORKER=stock: SGLang's built-in worker serves DFLASH"
    return "our worker serves DFLASH"


def contract() -> str:
    host.require()
    n_names = len(SECTIONS["seams"]) + len(SECTIONS["served"])
    return f"all {n_names} names we need are in sglang {SGLANG}"


def machine() -> str:
    from sglang.srt.platforms import current_platform

    return f"{type(current_platform).__name__}, device {current_platform.device_name}"


def launch(argv: Sequence[str]) -> str:
    """Resolve the arguments of a launch, which checks target, draft and flags against each other.

    Raises:
        ValueError: they do not ask for DFLASH, or it is refused; see `DFlashConfig.from_server_args`.
    """
    from sglang.srt.server_args import prepare_server_args

    from sglang_dflash.config import DFlashConfig

    server_args = prepare_server_args(list(argv))
    server_args.resolve_once()
    if not asks_for_dflash(server_args):
        raise ValueError("these flags do not ask for DFLASH; add --speculative-algorithm DFLASH")
    if flags.read(os.environ).worker is Worker.STOCK:
        return "left to SGLang's built-in worker"
    config = DFlashConfig.from_server_args(server_args)
    return ", ".join(f"{name}={value}" for name, value in vars(config).items())


def find(name: str, check: Callable[[], str]) -> Finding:
    """What `check` says; one that raises one of `REFUSALS` has said no."""
    try:
        return Finding(name, True, check())
    except REFUSALS as refusal:
        return Finding(name, False, str(refusal) or type(refusal).__name__)


def report(argv: Sequence[str]) -> list[Finding]:
    """All checks, in the order in which a launch meets them; `argv`: its flags, none for the installation alone."""
    checks: dict[str, Callable[[], str]] = {
        "versions": versions,
        "environment": environment,
        "entry points": found_by_sglang,
        "plugin": live,
        "host contract": contract,
        "platform": machine,
    }
    if argv:
        checks["launch"] = lambda: launch(argv)
    return [find(name, check) for name, check in checks.items()]


def fetch(url: str) -> dict[str, Any]:
    """What a running server says of its DFLASH: `internal_states[0]["dflash"]` of `GET /server_info`.

    Raises:
        OSError: no server answers.
        ValueError: the server is another one, or does not serve DFLASH with our worker.
    """
    try:
        with urlopen(f"{url.rstrip('/')}/server_info", timeout=30) as response:
            states = json.load(response)["internal_states"]
    except URLError as error:
        raise OSError(f"no SGLang server answers at {url}: {error}; give the URL it listens on") from error
    except (KeyError, TypeError, json.JSONDecodeError) as error:
        raise ValueError(f"{url} is no SGLang server: its /server_info has no internal_states") from error
    try:
        return states[0]["dflash"]
    except (KeyError, IndexError) as error:
        raise ValueError(f"the server at {url} does not serve DFLASH with our worker") from error


def render(dflash: dict[str, Any]) -> str:
    width, costs = dflash["width"], dflash["width"]["seconds"]
    lines = [f"sglang-dflash {dflash['version']}, blocks of {dflash['block_size']}, width {width['policy']}"]
    if costs:
        lines.append("seconds per step, requests x width:")
        lines.append(table(costs))
    if width["n_steps"]:
        lines.append(width["account"])
    if dflash["copies"]:
        n_blocks, n_drafts = (sum(counts) for counts in zip(*dflash["copies"], strict=True))
        lines.append(f"copies: {n_blocks} blocks continued by one, {n_drafts} copied drafts accepted")
    return "\n".join(lines)


def show_served(argv: Sequence[str], *, as_json: bool) -> int:
    urls = [argument for argument in argv if argument != "--json"]
    if len(urls) != 1:
        print("--server takes one URL, such as http://127.0.0.1:30000", file=sys.stderr)
        return 1
    try:
        dflash = fetch(urls[0])
    except (OSError, ValueError) as error:
        print(error, file=sys.stderr)
        return 1
    print(json.dumps(dflash) if as_json else render(dflash))
    return 0


def main() -> int:
    argv = sys.argv[1:]
    as_json = "--json" in argv
    if argv[:1] == ["--server"]:
        return show_served(argv[1:], as_json=as_json)
    if any(argument.split("=")[0] == "--gpu-memory" for argument in argv):
        return capacity_report.main(argv)
    findings = report([argument for argument in argv if argument != "--json"])
    ok = all(finding.ok for finding in findings)
    if as_json:
        print(json.dumps({"ok": ok, "checks": [dataclasses.asdict(finding) for finding in findings]}))
    else:
        for finding in findings:
            print(f"{'ok  ' if finding.ok else 'FAIL'}  {finding.name:14} {finding.text}")
    return 0 if ok else 1


if __name__ == "__main__":
    sys.exit(main())
