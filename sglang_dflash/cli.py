"""Flag names that model cards use and SGLang 0.5.23 has renamed."""

from argparse import SUPPRESS, ArgumentParser

OLD_NAMES = {
    "--speculative-dflash-draft-window-size": "--speculative-draft-window-size",
    "--mamba-scheduler-strategy": "--mamba-radix-cache-strategy",
}


def add_old_names(parser: ArgumentParser) -> None:
    """Let each old name set what its new name sets, with the same type and choices; the one given last wins."""
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
