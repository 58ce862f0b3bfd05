"""Command line of the check: selects a report, and prints it as lines or as JSON."""

import dataclasses
import json
import subprocess
import sys
from argparse import ArgumentParser
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from signal import SIGKILL

from sglang_dflash.cli import Parser, RawHelp, count, nearest
from sglang_dflash.tools.capacity import options as capacity_options
from sglang_dflash.tools.check import __doc__ as usage
from sglang_dflash.tools.check import served
from sglang_dflash.tools.check.findings import Finding, find, installation

FORMS = (
    "%(prog)s [--json] [--draft-steps N [--data FILE]] [LAUNCH FLAGS] | --server URL | --model NAME --gpu-memory GIB"
)
OWN = ("--json", "--draft-steps", "--data", "--server", "--gpu-memory")
# Beginnings of flags that can select DFLASH: SGLang accepts abbreviations, and flags in a file.
SELECTING = ("--spec", "--config")
NOT_TESTED = "note  pairing        not tested: whether this draft belongs to this target; --draft-steps 20 tests it"


def help_text() -> str:
    """Return the help: the forms, this command's options, and those of `--gpu-memory`."""
    parser = Parser(prog="sglang-dflash check", usage=FORMS, description=usage, formatter_class=RawHelp)
    own = parser.add_argument_group("options")
    drafts = "with launch flags: draft N blocks in PyTorch, and print the share of accepted first drafts"
    own.add_argument("--draft-steps", type=count, metavar="N", help=drafts)
    lines = 'JSONL with a "prompt" or chat "messages" in every line: prompts of --draft-steps (default: one about tea)'
    own.add_argument("--data", metavar="FILE", help=lines)
    own.add_argument(
        "--server",
        metavar="URL",
        help="report on a running server, such as http://127.0.0.1:30000; takes no launch flags",
    )
    names = "SGLang's names are accepted too. The report names the launch flags that it does not count."
    of_capacity = parser.add_argument_group("options with --gpu-memory", names)
    capacity_options.add_options(of_capacity.add_argument)
    return parser.format_help()


def refusal(flags: Sequence[str]) -> str:
    """Return an error if the words misspell an option of this command, are no launch flags, or cannot select DFLASH.

    Otherwise return "". SGLang is not run here, because it would load the model's config first. If the config cannot be
    fetched from the hub, this takes minutes to fail.
    """
    for word in flags:
        if word.startswith("--") and (cure := nearest(word.split("=")[0], OWN, cutoff=0.85)):
            return f"there is no option {word.split('=')[0]}{cure}"
    if "sglang.launch_server" in flags or list(flags[:2]) == ["sglang", "serve"]:
        return "found a whole command; give only the flags after sglang.launch_server or sglang serve"
    if not flags[0].startswith("-"):
        meant = f"--server {flags[0]}" if "://" in flags[0] else f"--model {flags[0]} --gpu-memory GIB"
        meant = f"--model-path {flags[0]}" if any(word.startswith(SELECTING) for word in flags) else meant
        return f"{flags[0]} stands without an option; did you mean {meant}?"
    if any(word.startswith(SELECTING) for word in flags):
        return ""
    return (
        "the flags have no --speculative-algorithm DFLASH; add it for a launch, or add --gpu-memory GIB for the number "
        "of requests that a card holds"
    )


def asked_of_sglang(argv: Sequence[str]) -> list[Finding]:
    """Run `check.launch` in a child process, and return its findings.

    If the process fails, the last line that it printed to stderr is the only finding.
    """
    command = [sys.executable, "-m", "sglang_dflash.tools.check.launch", *argv]
    ended = subprocess.run(command, capture_output=True, text=True, check=False)
    if ended.returncode:
        lines = [] if ended.returncode == -SIGKILL else ended.stderr.strip().splitlines()
        lines = lines or [silence(ended.returncode)]
        return [Finding("launch", False, lines[-1])]
    return [Finding(**finding) for finding in json.loads(ended.stdout.splitlines()[-1])]


def silence(status: int) -> str:
    """Return an error for an end of SGLang without a message."""
    if status == -SIGKILL:
        return "the system killed SGLang, most often because memory ran out; free memory"
    cure = "start `python -m sglang.launch_server` with these flags for its log"
    return f"SGLang ended with status {status} and printed nothing; {cure}"


def draft_steps(argv: Sequence[str], n_steps: int, data: Path | None = None) -> list[Finding]:
    """Return one finding: the share of accepted first drafts at `n_steps` positions of answers."""
    from sglang_dflash.tools.check import draft_steps

    parser = ArgumentParser(prog="sglang-dflash check", add_help=False, allow_abbrev=False)
    parser.add_argument("--model-path", "--model", required=True)
    parser.add_argument("--speculative-draft-model-path", "--speculative-draft-model", required=True)
    parser.add_argument("--revision")
    parser.add_argument("--speculative-draft-model-revision")
    found, _ = parser.parse_known_args(argv)
    revisions = found.revision, found.speculative_draft_model_revision
    pair = draft_steps.Pair(found.model_path, found.speculative_draft_model_path, *revisions)
    return find({"draft steps": partial(draft_steps.measure, pair, n_steps, data)})


def check(argv: Sequence[str], *, as_json: bool, n_steps: int = 0, data: Path | None = None) -> int:
    """Print each part of the report once complete, or with `as_json` all parts at the end. Return the exit status."""
    findings: list[Finding] = []
    parts = [partial(installation, launch=bool(argv))]
    if argv:  # without flags SGLang is not run
        parts.append(partial(asked_of_sglang, argv))
    if n_steps:
        parts.append(partial(draft_steps, argv, n_steps, data))
    for part in parts:
        found = part()
        findings += found
        if not as_json:
            print(*found, sep="\n", flush=True)
    ok = all(finding.ok for finding in findings)
    is_untested = not n_steps and any(finding.name == "launch" and finding.ok for finding in findings)
    if is_untested and not as_json:
        print(NOT_TESTED)
    if as_json:
        print(json.dumps({"ok": ok, "checks": [dataclasses.asdict(finding) for finding in findings]}))
    return 0 if ok else 1


def main(argv: Sequence[str]) -> int:
    """Run the command line and return the exit status."""
    as_json = "--json" in argv
    if {"-h", "--help"} & set(argv):
        print(help_text(), end="")
        return 0
    if any(argument.split("=")[0] == "--server" for argument in argv):
        return served.main(argv, as_json=as_json)
    if any(argument.split("=")[0] == "--gpu-memory" for argument in argv):
        from sglang_dflash.tools.capacity import report

        if any(argument.split("=")[0] == "--draft-steps" for argument in argv):
            print("check: --draft-steps does not go with --gpu-memory; drop one of them", file=sys.stderr)
            return 1
        return report.main(argv)
    own = Parser(prog="sglang-dflash check", usage=FORMS, add_help=False, allow_abbrev=False)
    own.add_argument("--json", action="store_true")
    own.add_argument("--draft-steps", type=count, default=0)
    own.add_argument("--data", type=Path)
    mine, launch_flags = own.parse_known_args(argv)
    if mine.draft_steps and any(word.split("=")[0] == "--config" for word in launch_flags):
        print("check: --draft-steps does not read --config; give the paths of both models as flags", file=sys.stderr)
        return 1
    if mine.data and not mine.draft_steps:
        print("check: --data has an effect only with --draft-steps; add --draft-steps 20", file=sys.stderr)
        return 1
    if launch_flags and (reason := refusal(launch_flags)):
        print(f"check: {reason}", file=sys.stderr)
        return 1
    return check(launch_flags, as_json=as_json, n_steps=mine.draft_steps, data=mine.data)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
