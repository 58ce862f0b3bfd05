"""Command line of the check: selects a report, and prints it as lines or as JSON."""

import dataclasses
import json
import subprocess
import sys
from argparse import ArgumentParser
from collections.abc import Sequence
from functools import partial

from sglang_dflash.capacity import known_models as models
from sglang_dflash.capacity import options as capacity_options
from sglang_dflash.check import __doc__ as usage
from sglang_dflash.check import served
from sglang_dflash.check.findings import Finding, find, installation
from sglang_dflash.cli import Parser, RawHelp, nearest

OWN = ("--json", "--draft-steps", "--server", "--gpu-memory")
MODEL = ("--model", "--model-path")


def help_text() -> str:
    """Return the help: the forms, this command's options, and those of `--gpu-memory`."""
    forms = "%(prog)s [--json] [--draft-steps N] [LAUNCH FLAGS] | --server URL | --model NAME --gpu-memory GIB"
    parser = Parser(prog="sglang-dflash check", usage=forms, description=usage, formatter_class=RawHelp)
    own = parser.add_argument_group("options with launch flags, or with --server")
    own.add_argument("--draft-steps", type=int, metavar="N", help="draft N blocks in plain torch, and compare them")
    own.add_argument("--server", metavar="URL", help="report on a running server, such as http://127.0.0.1:30000")
    of_capacity = parser.add_argument_group(
        "options with --gpu-memory", "SGLang's names are accepted too, and launch flags without an effect are ignored."
    )
    capacity_options.add_options(of_capacity.add_argument)
    return parser.format_help()


def refusal(flags: Sequence[str]) -> str:
    """Return an error if a flag is a misspelt option of this command, or if only a model is given; else "".

    SGLang is not run.
    """
    for word in flags:
        if word.startswith("--") and word not in MODEL and (cure := nearest(word.split("=")[0], OWN, cutoff=0.85)):
            return f"there is no option {word.split('=')[0]}{cure}"
    words = [word for flag in flags for word in flag.split("=", 1)]
    is_positional = not words[0].startswith("-")
    if is_positional or (len(words) == 2 and words[0] in MODEL):
        name = words[0] if is_positional else words[1]
        known = any(models.is_called(target, name) for target in models.TARGETS)
        ask = "add --gpu-memory GIB for the requests that a card holds, or the flags of a launch"
        return f"found only the model {name}; {'did you mean --model ' + name + ' --gpu-memory GIB?' if known else ask}"
    return ""


def asked_of_sglang(argv: Sequence[str]) -> list[Finding]:
    """Run `check.launch` in a child process, and return its findings.

    If the process fails, the last line that it printed to stderr is the only finding.
    """
    command = [sys.executable, "-m", "sglang_dflash.check.launch", *argv]
    ended = subprocess.run(command, capture_output=True, text=True, check=False)
    if ended.returncode:
        lines = ended.stderr.strip().splitlines() or [
            f"SGLang ended with status {ended.returncode} and printed nothing"
        ]
        return [Finding("launch", False, lines[-1])]
    return [Finding(**finding) for finding in json.loads(ended.stdout.splitlines()[-1])]


def draft_steps(argv: Sequence[str], n_steps: int) -> list[Finding]:
    """Return one finding: the share of accepted first drafts at `n_steps` positions of an answer."""
    from sglang_dflash.check import draft_steps

    parser = ArgumentParser(add_help=False)
    parser.add_argument("--model-path", "--model", required=True)
    parser.add_argument("--speculative-draft-model-path", "--speculative-draft-model", required=True)
    paths, _ = parser.parse_known_args(argv)
    measure = partial(draft_steps.measure, paths.model_path, paths.speculative_draft_model_path, n_steps)
    return find({"draft steps": measure})


def check(argv: Sequence[str], *, as_json: bool, n_steps: int = 0) -> int:
    """Print each part of the report once complete, or with `as_json` all parts at the end. Return the exit status."""
    findings: list[Finding] = []
    parts = [partial(installation, launch=bool(argv))]
    if argv:  # without flags SGLang is not run
        parts.append(partial(asked_of_sglang, argv))
    if n_steps:
        parts.append(partial(draft_steps, argv, n_steps))
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
    if {"-h", "--help"} & set(argv):
        print(help_text(), end="")
        return 0
    if argv[:1] == ["--server"]:
        return served.main(argv[1:], as_json=as_json)
    if any(argument.split("=")[0] == "--gpu-memory" for argument in argv):
        from sglang_dflash.capacity import report

        return report.main(argv)
    own = ArgumentParser(add_help=False, allow_abbrev=False)
    own.add_argument("--json", action="store_true")
    own.add_argument("--draft-steps", type=int, default=0)
    mine, launch_flags = own.parse_known_args(argv)
    if launch_flags and (reason := refusal(launch_flags)):
        print(f"check: {reason}", file=sys.stderr)
        return 1
    return check(launch_flags, as_json=as_json, n_steps=mine.draft_steps)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
