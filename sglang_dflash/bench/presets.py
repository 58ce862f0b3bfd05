"""Benchmarks that pages quote, as options of `sglang-dflash bench`.

What is typed beside `--preset` replaces a preset's own. They serve the tiny hybrid pair without an accelerator, unless
other server flags follow `--`.
"""

from collections.abc import Mapping, Sequence
from typing import NamedTuple

from sglang_dflash.tiny import pairs as tiny


class Preset(NamedTuple):
    options: Mapping[str, str]
    server_flags: Sequence[str]
    about: str

    def beside(self, typed: Sequence[str]) -> list[str]:
        """The command line of both."""
        own = {word.split("=", 1)[0] for word in typed if word.startswith("--")}
        words = [[option, *values.split()] for option, values in self.options.items() if option not in own]
        return [*(word for option in words for word in option), *typed]


SHARED = {"--serve": "", "--enable-thinking": "", "--max-new-tokens": "128", "--no-latency": "", "--require-equal": ""}
SERVER_FLAGS = (*tiny.launch_flags(tiny.HYBRID), *tiny.FLAGS, *tiny.HYBRID_FLAGS)
# 16 requests at once; what is given last counts.
WIDE = ("--max-running-requests", "16", "--max-mamba-cache-size", "160", "--max-total-tokens", "16384")

PRESETS = {
    "readme": Preset(
        {**SHARED, "--arms": "off stock ours", "--num-prompts": "16", "--concurrency": "1 8", "--repeats": "5"},
        SERVER_FLAGS,
        "the README's first table",
    ),
    "copies": Preset(
        {
            **SHARED,
            "--arms": "off stock ours:SGLANG_DFLASH_COPY=off ours:SGLANG_DFLASH_COPY=on "
            "ours:SGLANG_DFLASH_COPY=on,SGLANG_DFLASH_WIDTHS=1,4,8,16,24,32",
            "--dataset": "synthetic repeating hard",
            "--num-prompts": "16",
            "--concurrency": "1 8",
            "--repeats": "3",
        },
        SERVER_FLAGS,
        "blocks continued by copies beside blocks alone",
    ),
    "widths": Preset(
        {
            **SHARED,
            "--arms": "off ours " + " ".join(f"ours:SGLANG_DFLASH_WIDTHS={width}" for width in (1, 4, 8, 16)),
            "--dataset": "synthetic hard hopeless",
            "--num-prompts": "16",
            "--concurrency": "1 8",
            "--repeats": "3",
        },
        (*SERVER_FLAGS, *WIDE),
        "the width chosen every step beside always the same one",
    ),
}
