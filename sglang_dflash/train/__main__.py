"""Command line of the trainer.

    sglang-dflash train draft --target PATH --data FILE --out DIR
    torchrun --nproc-per-node 8 -m sglang_dflash.train draft --target PATH --data FILE --out DIR
    sglang-dflash train prompts --target PATH [--server URL] --out FILE
    sglang-dflash train answers (--target PATH | --server URL) --prompts FILE --out FILE
    sglang-dflash train chats --out FILE
    sglang-dflash train tiny [--kind hybrid|dense] [--out DIR]

The same command resumes an interrupted run.
"""

import sys
from collections.abc import Sequence

from sglang_dflash.errors import HostMismatch
from sglang_dflash.train.options import make_parser


def main(argv: Sequence[str]) -> int:
    """Run a command and return the exit status."""
    args = make_parser().parse_args(argv)
    from sglang_dflash.train.runs import RUNS  # torch and transformers take seconds to import

    try:
        RUNS[args.command](args)
    except (ValueError, OSError, HostMismatch) as error:
        print(f"train: {error}", file=sys.stderr)
        return 2
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
