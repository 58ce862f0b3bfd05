"""Checks that import SGLang: they load its plugins, and resolve the arguments of a launch.

`python -m sglang_dflash.tools.check.launch [launch flags]` prints the findings as JSON on the last line of stdout.
`check` runs this module as a child process, because SGLang prints to stdout and stderr too.
"""

import dataclasses
import gc
import json
import sys
from collections.abc import Sequence

from sglang_dflash import flags
from sglang_dflash.cli import Parser, nearest
from sglang_dflash.engine.host import contract as host
from sglang_dflash.engine.host.arguments import asks_for_dflash
from sglang_dflash.engine.host.loading import require_free_port
from sglang_dflash.flags import Worker
from sglang_dflash.tools.check.findings import Check, Finding, find


def report(argv: Sequence[str]) -> list[Finding]:
    """Return the findings in the order of a launch. Without launch flags in `argv`, no arguments are resolved."""
    checks: dict[str, Check] = {"plugin": live, "platform": machine}
    if argv:
        checks["launch"] = lambda: launch(argv)
    return find(checks)


def live() -> str:
    """Load plugins as SGLang does, and check that the hooks are in place.

    Raises:
        RuntimeError: the plugin tried to end the process, because SGLang has another version or lacks a name.
        HostMismatch: see `host.require_live`.
    """
    from sglang.srt.plugins import load_plugins

    try:
        load_plugins()
    except SystemExit as end:  # raised by the plugin to stop a launch
        raise RuntimeError(str(end)) from None
    host.require_live()
    if flags.current().worker is Worker.STOCK:
        return "SGLANG_DFLASH_WORKER=stock: SGLang's built-in worker serves DFLASH"
    return "sglang-dflash's worker serves DFLASH"


def machine() -> str:
    """Return the platform that SGLang chose, and its device."""
    from sglang.srt.platforms import current_platform

    return f"{type(current_platform).__name__}, device {current_platform.device_name}"


def launch(argv: Sequence[str]) -> tuple[str, str]:
    """Resolve the arguments of a launch, and check target, draft and flags against each other.

    Returns:
        A line with `DFlashConfig.summary` and the notes, and a text with the whole configuration.

    Raises:
        ValueError: a flag is misspelt, DFLASH is not selected, the port is taken, or see
            `DFlashConfig.from_server_args`.
        AssertionError: SGLang's own checks reject a flag.
        SystemExit: SGLang's parser rejects the arguments for another reason than an unknown flag.
    """
    from sglang.srt.server_args import prepare_server_args

    from sglang_dflash.engine.config import DFlashConfig

    try:
        server_args = prepare_server_args(list(argv))
    except SystemExit:  # raised by argparse
        if wrong := misspelt(argv):
            raise ValueError(wrong) from None
        raise
    server_args.resolve_once()
    if not asks_for_dflash(server_args):
        raise ValueError(
            f"--speculative-algorithm is {server_args.speculative_algorithm or 'missing'}; set it to DFLASH"
        )
    server_args.check_server_args()
    require_free_port(server_args)
    if flags.current().worker is Worker.STOCK:
        return "SGLANG_DFLASH_WORKER=stock: not checked, SGLang's built-in worker serves it", ""
    config = DFlashConfig.from_server_args(server_args)
    shown = (field.name for field in dataclasses.fields(config) if field.repr)
    detail = ", ".join(f"{name}={vars(config)[name]}" for name in shown)
    return "; ".join([config.summary(), *config.notes, *config.ignored]), detail


def misspelt(argv: Sequence[str]) -> str:
    """Return a sentence with the first flag that SGLang lacks, and the nearest known flag; "" if all are known."""
    from sglang.srt.server_args import ServerArgs

    parser = Parser()
    ServerArgs.add_cli_args(parser)
    known = list(parser.option_names())
    names = (word.split("=")[0] for word in argv if word.startswith("--"))
    wrong = next((name for name in names if not any(one.startswith(name) for one in known)), "")
    return f"SGLang has no flag {wrong}{nearest(wrong, known) or '; drop it'}" if wrong else ""


if __name__ == "__main__":
    gc.disable()  # saves CPU time while SGLang is imported; this process is short
    print(json.dumps([dataclasses.asdict(finding) for finding in report(sys.argv[1:])]))
