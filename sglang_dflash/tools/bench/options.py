"""Command line of the benchmark: options for arms, prompts and measurement.

A preset is the set of options of a benchmark that the documentation quotes. Options given with `--preset` replace
the preset's. Presets serve this package's tiny hybrid pair on CPU cores, unless other server flags follow `--`.
"""

import argparse
import os
from collections.abc import Callable, Mapping, Sequence
from datetime import datetime
from pathlib import Path
from typing import Any, NamedTuple

from sglang_dflash import plot
from sglang_dflash.cli import Add, Parser, RawHelp, count, positive, positive_or_zero
from sglang_dflash.pairs.servers import arms
from sglang_dflash.pairs.servers.ports import port_number
from sglang_dflash.pairs.tiny import pairs as tiny
from sglang_dflash.tools.bench import prompts
from sglang_dflash.tools.bench.client import ServerKind
from sglang_dflash.tools.bench.prompts import N_PROMPTS, SYNTHETIC, Task
from sglang_dflash.tools.bench.urls import named_urls

CONCURRENCY = (1, 8, 16, 32)
TRANSFORMERS = "transformers"
EXAMPLES = """
examples:
  a running server, with the options of the DFlash guides
    sglang-dflash bench --backend sglang --base-url http://127.0.0.1:30000 --model Qwen/Qwen3.5-27B \\
        --dataset gsm8k --num-prompts 128 --concurrency 1 --enable-thinking
  several running servers, compared with the first
    sglang-dflash bench --base-url off=http://127.0.0.1:30000 ours=http://127.0.0.1:30001 --dataset math500
  servers started here: no speculation (off), the target's MTP layers if it has any (mtp), SGLang's DFLASH (stock), this
  plugin (ours); a model card's flags after --
    sglang-dflash bench --serve --dataset gsm8k humaneval -- --model-path Qwen/Qwen3.5-27B \\
        --speculative-algorithm DFLASH --speculative-draft-model-path z-lab/Qwen3.5-27B-DFlash --attention-backend fa3
  one worker with different environments, and no result unless their answers are equal
    sglang-dflash bench --serve --require-equal --arms off ours ours:SGLANG_DFLASH_WIDTHS=16 -- ...
  the speed table of the tiny pair, on CPU cores
    sglang-dflash bench --preset readme
  no server: PyTorch
    sglang-dflash bench --backend transformers --model Qwen/Qwen3-8B --draft-model z-lab/Qwen3-8B-DFlash-b16
"""


class Preset(NamedTuple):
    """Options of a named comparison, the flags of its servers, and a description."""

    options: Mapping[str, str]
    server_flags: Sequence[str]
    about: str

    def beside(self, typed: Sequence[str]) -> list[str]:
        """Return the command line of the preset and the `typed` options, which replace the preset's."""
        own = {word.split("=", 1)[0] for word in typed if word.startswith("--")}
        words = [[option, *values.split()] for option, values in self.options.items() if option not in own]
        return [*(word for option in words for word in option), *typed]


SHARED = {
    **{"--serve": "", "--require-equal": "", "--no-latency": "", "--enable-thinking": "", "--max-new-tokens": "128"},
    **{"--num-prompts": "16", "--concurrency": "1 8", "--repeats": "3"},
}
SERVER_FLAGS = (*tiny.launch_flags(tiny.HYBRID), *tiny.FLAGS, *tiny.HYBRID_FLAGS)
# Flags for 16 requests at once; they replace those of SERVER_FLAGS, because SGLang takes the last of repeated flags.
WIDE = ("--max-running-requests", "16", "--max-mamba-cache-size", "160", "--max-total-tokens", "16384")
COPY_ARMS = (
    "off stock ours:SGLANG_DFLASH_COPY=off ours:SGLANG_DFLASH_COPY=on "
    "ours:SGLANG_DFLASH_COPY=on,SGLANG_DFLASH_WIDTHS=1,4,8,16,24,32"
)
WIDTH_ARMS = "off ours " + " ".join(f"ours:SGLANG_DFLASH_WIDTHS={width}" for width in (1, 4, 8, 16))
PRESETS = {
    "readme": Preset(
        {**SHARED, "--arms": "off stock ours", "--repeats": "5"},
        SERVER_FLAGS,
        "the speed table of the tiny pair",
    ),
    "copies": Preset(
        {**SHARED, "--arms": COPY_ARMS, "--dataset": "synthetic repeating hard"},
        SERVER_FLAGS,
        "blocks with and without n-gram copies",
    ),
    "widths": Preset(
        {**SHARED, "--arms": WIDTH_ARMS, "--dataset": "synthetic hard hopeless"},
        (*SERVER_FLAGS, *WIDE),
        "chosen verify widths against fixed ones",
    ),
}


def _counts(text: str) -> list[int]:
    """Parse numbers separated by commas: `8`, or `1,8,16`."""
    return [count(part) for part in text.split(",")]


NUMBER: dict[str, Any] = {"type": count, "metavar": "N"}
SEVERAL: dict[str, Any] = {"nargs": "+", "action": "extend"}


def parse(
    arguments: Sequence[str], meet: Callable[[argparse.Namespace], None] = lambda options: None
) -> argparse.Namespace:
    """Parse the command line.

    Args:
        meet: called with the checked options before data sets are downloaded, to contact running servers first.

    Returns:
        The options, with `server_flags` (the flags after `--`), `tasks` and `launches`.

    Raises:
        SystemExit: an option is wrong; argparse prints the option and the remedy.
    """
    parser = _parser()
    at = [*arguments, "--"].index("--")
    own, server_flags = list(arguments[:at]), list(arguments[at + 1 :])
    options, env = parser.parse_args(own), dict[str, str]()
    if options.preset:
        preset = PRESETS[options.preset]
        options = parser.parse_args(preset.beside(own))
        if not server_flags:
            server_flags, env = list(preset.server_flags), tiny.ENV
    options.server_flags = server_flags
    try:
        _check(options)
        text = arms.value_of("--max-running-requests", server_flags) or ""
        at_once = int(text) if text.isdecimal() else 0  # SGLang refuses a value that is no number
        if env and max(options.concurrency) > at_once:
            limit = f"the servers of --preset {options.preset} run {at_once} requests at once; give at most {at_once}"
            raise ValueError(f"--concurrency {max(options.concurrency)}: {limit}")
        options.launches = (
            arms.launches(options.arms or (), server_flags, mtp_steps=options.mtp_steps, env=env)
            if options.serve
            else []
        )
        options.tasks = _tasks(options, meet)  # after all checks, because data sets may be downloaded
    except ValueError as error:
        parser.error(str(error))
    return options


def _parser() -> Parser:
    parser = Parser(
        prog="sglang-dflash bench",
        allow_abbrev=False,  # `without_key` would leave an abbreviated --api-key in the report
        usage="%(prog)s (--base-url [NAME=]URL ... | --serve | --backend transformers | --preset NAME) [options] "
        "[-- SERVER FLAGS]",
        description="Measure tokens per second, latencies and acceptance, with and without speculation.",
        epilog=EXAMPLES,
        formatter_class=RawHelp,
    )
    _add_who(
        parser.add_argument_group("servers: one of --base-url, --serve, --backend transformers, --preset").add_argument
    )
    _add_what(parser.add_argument_group("prompts").add_argument)
    _add_how(parser.add_argument_group("measurement").add_argument)
    return parser


def _add_who(add: Add) -> None:
    add("--base-url", **SEVERAL, metavar="[NAME=]URL", help="running OpenAI-compatible servers")
    add("--serve", action="store_true", help="start the servers of --arms here, with the flags after --")
    add(
        "--backend",
        choices=[*ServerKind, TRANSFORMERS],
        help="kind of the servers (default: detected); transformers: PyTorch in this process, no server",
    )
    add(
        "--model",
        metavar="NAME",
        help="model name (default: the first that the server lists); with transformers the target",
    )
    add("--draft-model", metavar="NAME", help="DFlash draft for --backend transformers")
    names = f"servers that --serve starts: {', '.join(arms.ARMS)} (default: all that the model supports)"
    add("--arms", nargs="+", metavar="ARM", help=names + "; NAME:VAR=VALUE,... adds environment variables to one")
    add("--preset", choices=PRESETS, help="; ".join(f"{name}: {preset.about}" for name, preset in PRESETS.items()))
    mtp = "drafts per step of the arm mtp, which uses the target's own MTP layers"
    add("--mtp-steps", **NUMBER, default=3, help=mtp)
    memory = "never keep two servers of --serve in memory (default: yes, except with --device cpu)"
    add("--one-at-a-time", action=argparse.BooleanOptionalAction, help=memory)
    key = os.environ.get("OPENAI_API_KEY") or "none"
    add(
        "--api-key",
        default=key,
        metavar="KEY",
        help="key sent to the servers of --base-url (default: the variable OPENAI_API_KEY)",
    )


def _add_what(add: Add) -> None:
    packaged = ", ".join((*prompts.PACKAGED_SETS, prompts.CHATS, *prompts.BUNDLED_SETS))
    names = f"{', '.join(prompts.DATA_SETS)}, or without a download: {packaged} (default: {SYNTHETIC})"
    add("--dataset", **SEVERAL, choices=prompts.NAMES, metavar="NAME", help=names)
    lines = 'JSONL with a "prompt", chat "messages", or token ids as "input_ids" in every line'
    add("--data", **SEVERAL, type=Path, metavar="FILE", help=lines)
    n_prompts = "largest number of conversations of each set; each user turn is a prompt"
    add("--num-prompts", "--max-samples", **NUMBER, default=N_PROMPTS, help=n_prompts)
    longest = "largest number of tokens in an answer"
    add("--max-new-tokens", "--max-tokens", **NUMBER, default=4096, help=longest)
    add(
        "--temperature",
        type=positive_or_zero,
        metavar="T",
        default=0.0,
        help="sampling temperature; at 0 (greedy) the arms' answers are compared",
    )
    add(
        "--enable-thinking",
        action=argparse.BooleanOptionalAction,
        default=False,
        help="enable thinking in the chat template",
    )


def _add_how(add: Add) -> None:
    add(
        "--concurrency",
        type=_counts,
        nargs="+",
        metavar="N",
        help="numbers of requests in flight (default: 1 8 16 32; transformers: 1)",
    )
    add("--repeats", **NUMBER, default=3, help="repeats of each measurement, interleaved")
    steady = "measure S seconds at steady load: a new request follows each answer, and prompts are sent again and again"
    add("--steady", type=positive, metavar="S", help=steady + " (default: each prompt once; implies --no-latency)")
    streamed = "also measure TTFT and TPOT, in streamed runs (default: yes)"
    add("--latency", action=argparse.BooleanOptionalAction, default=True, help=streamed)
    equal = "end without a result, with status 1, unless all answers are equal"
    add("--require-equal", action=argparse.BooleanOptionalAction, default=False, help=equal)
    add(
        "--tie-gap",
        type=positive_or_zero,
        metavar="G",
        default=0.0,
        help="accept a difference if both tokens are within G nats of the likeliest token; 0: accept none",
    )
    drawn = "picture of tokens per second and acceptance by slot; .png, .svg or .pdf (needs matplotlib)"
    add("--plot", type=Path, metavar="FILE", help=drawn)
    add("--port", type=port_number, metavar="N", default=31000, help="first port to try")
    add(
        "--output",
        type=Path,
        metavar="PREFIX",
        help="beginning of the output files: PREFIX.json, and PREFIX-ARM.log (default: dflash-bench-<time>)",
    )


def _check(options: argparse.Namespace) -> None:
    in_torch, serve = options.backend == TRANSFORMERS, f"--preset {options.preset}" if options.preset else "--serve"
    ways = {"--base-url": bool(options.base_url), serve: options.serve, f"--backend {TRANSFORMERS}": in_torch}
    given = [way for way, is_given in ways.items() if is_given]
    if len(given) != 1:
        found = " and ".join(given) or "no server to measure"
        raise ValueError(f"found {found}; give one of --base-url, --serve, --preset, --backend {TRANSFORMERS}")
    options.base_url = named_urls(options.base_url or ())
    if options.server_flags and not options.serve:
        raise ValueError(
            f"-- {options.server_flags[0]} ...: {given[0]} takes no server flags; drop them, or use --serve instead"
        )
    if options.serve and options.backend not in (None, ServerKind.SGLANG):
        raise ValueError(f"{serve} starts SGLang, not {options.backend}; drop --backend")
    if options.serve and arms.value_of("--api-key", options.server_flags):
        raise ValueError(f"{serve} sends no API key to the servers that it starts; drop --api-key after --")
    if options.serve and options.model:
        raise ValueError(f"{serve} takes no --model; drop it, and write --model-path among the launch flags after --")
    if options.arms and not options.serve:
        raise ValueError(f"--arms are servers that --serve starts; drop --arms, or use --serve instead of {given[0]}")
    if options.draft_model and not in_torch:
        raise ValueError(f"--draft-model needs --backend {TRANSFORMERS}, since servers load their own draft; drop it")
    if in_torch and not (options.model and options.draft_model):
        raise ValueError(f"--backend {TRANSFORMERS} needs --model and --draft-model; name both checkpoints")
    if in_torch and int(os.environ.get("WORLD_SIZE", "1")) > 1:
        raise ValueError(
            f"WORLD_SIZE is {os.environ['WORLD_SIZE']}, as torchrun sets it, but one process runs this benchmark; "
            "start it without torchrun, or unset WORLD_SIZE"
        )
    if options.require_equal and options.temperature > 0:
        raise ValueError(
            f"--require-equal (also of --preset) needs greedy answers; drop --temperature {options.temperature}"
        )
    if options.tie_gap and not options.require_equal:
        raise ValueError("--tie-gap needs --require-equal; add it, or drop --tie-gap")
    if options.plot:
        plot.require(options.plot)
    counts = [n for several in options.concurrency or () for n in several]
    options.concurrency = list(dict.fromkeys(counts)) or ([1] if in_torch else list(CONCURRENCY))
    if in_torch and options.concurrency != [1]:
        raise ValueError(f"--backend {TRANSFORMERS} runs one request at a time; drop --concurrency")
    if options.one_at_a_time is None:
        options.one_at_a_time = arms.value_of("--device", options.server_flags) != "cpu"
    output = options.output or Path(f"dflash-bench-{datetime.now():%Y%m%d-%H%M%S}")
    if not output.name:
        raise ValueError(f"--output {output} is a folder; give a path such as {output / 'bench'}")
    options.output = output.with_suffix("") if output.suffix == ".json" else output


def _tasks(options: argparse.Namespace, meet: Callable[[argparse.Namespace], None]) -> list[Task]:
    read = [prompts.read(path, options.num_prompts) for path in options.data or ()]
    meet(options)
    names = options.dataset or ([] if options.data else [SYNTHETIC])
    tasks = [prompts.load(name, options.num_prompts) for name in dict.fromkeys(names)] + read
    titles = [task.name for task in tasks]
    if len(set(titles)) < len(titles):
        raise ValueError(f"two data sets have the same name ({', '.join(titles)}); rename or drop a --data file")
    return tasks
