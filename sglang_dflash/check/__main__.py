"""Command line of the check: selects a report, and prints it as lines or as JSON."""

import dataclasses
import json
import subprocess
import sys
from argparse import ArgumentParser
from collections.abc import Sequence
from functools import partial

from sglang_dflash.capacity import report as capacity_report
from sglang_dflash.check import __doc__ as usage
from sglang_dflash.check import served
from sglang_dflash.check.findings import Finding, find, installation


def asked_of_sglang(argv: Sequence[str]) -> list[Finding]:
    """Return the findings of `check.launch`, run in a separate process; a failure of the process is a finding too."""
    command = [sys.executable, "-m", "sglang_dflash.check.launch", *argv]
    ended = subprocess.run(command, capture_output=True, text=True, check=False)
    if ended.returncode:
        lines = ended.stderr.strip().splitlines() or [f"ended with status {ended.returncode} and no word"]
        return [Finding("launch", False, lines[-1])]
    return [Finding(**finding) for finding in json.loads(ended.stdout.splitlines()[-1])]


def draft_steps(argv: Sequence[str], n_steps: int) -> list[Finding]:
    """Return the finding about acceptance of the drafts, see `check.draft_steps`."""
    from sglang_dflash.check import draft_steps

    parser = ArgumentParser(add_help=False)
    parser.add_argument("--model-path", "--model", required=True)
    parser.add_argument("--speculative-draft-model-path", "--speculative-draft-model", required=True)
    paths, _ = parser.parse_known_args(argv)
    measure = partial(draft_steps.measure, paths.model_path, paths.speculative_draft_model_path, n_steps)
    return find({"draft steps": measure})


def check(argv: Sequence[str], *, as_json: bool, n_steps: int = 0) -> int:
    """Print each part of the report when it is complete, and return the exit status."""
    findings: list[Finding] = []
    parts = [installation, *([lambda: asked_of_sglang(argv)] if argv else [])]  # without flags SGLang is not run
    if n_steps:
        parts.append(lambda: draft_steps(argv, n_steps))
    for part in parts:
        found = part()
        findings += found
        if not as_json:
            print(*found, sep="\n", flush=True)
    ok = all(finding.ok for finding in findings)
    if as_json:
        print(json.dumps({"ok": ok, "checks": [dataclasses.asdict(finding) for finding in findings]}))
    return 0 if ok else 1


def main(argv: Sequence[str]) -> int:
    """Run the command line and return the exit status."""
    as_json = "--json" in argv
    if {"-h", "--help"} & set(argv) and len(argv) == 1:
        print(usage)
        return 0
    if argv[:1] == ["--server"]:
        return served.main(argv[1:], as_json=as_json)
    if any(argument.split("=")[0] == "--gpu-memory" for argument in argv):
        return capacity_report.main(argv)
    own = ArgumentParser(add_help=False, allow_abbrev=False)
    own.add_argument("--json", action="store_true")
    own.add_argument("--draft-steps", type=int, default=0)
    mine, launch_flags = own.parse_known_args(argv)
    return check(launch_flags, as_json=as_json, n_steps=mine.draft_steps)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
