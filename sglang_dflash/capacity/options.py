"""Options of `sglang-dflash check --gpu-memory`."""

import argparse

from sglang_dflash import flags
from sglang_dflash.capacity import geometry
from sglang_dflash.capacity import known_models as models
from sglang_dflash.capacity.division import MAMBA_RATIO, MAX_REQUESTS, RadixStates
from sglang_dflash.cli import Add, Parser

CONTEXT = 8192  # default number of tokens of a request, prompt and answer together
STRATEGIES = {radix.name.lower(): radix for radix in RadixStates}
# Launch flags without an effect on this computation, accepted so that a launch command can be pasted.
WITHOUT_EFFECT = (
    *("--speculative-algorithm", "--attention-backend", "--prefill-attention-backend", "--decode-attention-backend"),
    *("--speculative-draft-attention-backend", "--sampling-backend", "--grammar-backend", "--linear-attn-backend"),
    *("--trust-remote-code", "--device", "--host", "--port", "--served-model-name", "--api-key", "--chat-template"),
    *("--reasoning-parser", "--tool-call-parser", "--tokenizer-path", "--revision", "--log-level", "--log-requests"),
    *("--speculative-draft-model-revision", "--enable-metrics", "--random-seed", "--watchdog-timeout"),
    *("--schedule-policy", "--stream-interval"),
)


def arguments() -> Parser:
    """Return the parser of `sglang-dflash check --gpu-memory`."""
    parser = Parser(prog="sglang-dflash check", description="Compute how many requests a card holds.")
    add_options(parser.add_argument)
    return parser


def add_options(add: Add) -> None:
    """Add the options with `add`, an argument parser's `add_argument`. SGLang's names of options are accepted too."""
    _add_pair(add)
    _add_memory(add)
    _add_plugin(add)
    add("--json", action="store_true", help="print one JSON document instead of tables")
    for name in WITHOUT_EFFECT:
        add(name, nargs="?", dest="without_effect", default=argparse.SUPPRESS, help=argparse.SUPPRESS)


def _add_pair(add: Add) -> None:
    known = ", ".join(models.TARGETS)
    add("--model", "--model-path", required=True, help=f"the target: a directory, a config.json, or one of {known}")
    add(
        "--draft",
        "--speculative-draft-model-path",
        "--speculative-draft-model",
        help="the DFlash draft, likewise (default: the published draft of a named target)",
    )
    add(
        "--draft-quantization",
        "--speculative-draft-model-quantization",
        choices=geometry.QUANTIZED_ITEMSIZES,
        help="quantization of the draft",
    )


def _add_memory(add: Add) -> None:
    add("--gpu-memory", type=float, required=True, metavar="GIB", help="memory of a card, as its driver reports it")
    add("--context", type=int, default=CONTEXT, metavar="N", help="tokens of a request, prompt and answer together")
    add(
        "--block",
        "--speculative-num-draft-tokens",
        "--speculative-dflash-block-size",
        type=int,
        metavar="N",
        help="tokens of a block (default: as the draft was trained)",
    )
    add(
        "--window",
        "--speculative-draft-window-size",
        "--speculative-dflash-draft-window-size",
        type=int,
        metavar="N",
        help="context tokens of the draft, in a ring buffer per request (default: all, in the KV cache)",
    )
    add("--tp", "--tp-size", "--tensor-parallel-size", type=int, default=1, metavar="N", help="number of cards")
    add(
        "--mem-fraction",
        "--mem-fraction-static",
        type=float,
        metavar="X",
        help="share of the card for weights, states and KV (default: as SGLang sets it for the card)",
    )
    _add_pools(add)


def _add_pools(add: Add) -> None:
    add("--max-running-requests", type=int, default=MAX_REQUESTS, metavar="N", help="SGLang's limit under DFLASH")
    add(
        "--mamba-full-memory-ratio",
        type=float,
        default=MAMBA_RATIO,
        metavar="X",
        help="memory of recurrent states per memory of KV",
    )
    add(
        "--mamba-ssm-dtype",
        choices=geometry.ITEMSIZES,
        help="dtype of recurrent states (default: that of config.json, else float32)",
    )
    add(
        "--mamba-radix-cache-strategy",
        "--mamba-scheduler-strategy",
        choices=STRATEGIES,
        default="extra_buffer",
        help="recurrent states kept for the prefix cache; off: --disable-radix-cache",
    )
    add(
        "--disable-radix-cache",
        action="store_const",
        const="off",
        dest="mamba_radix_cache_strategy",
        default=argparse.SUPPRESS,
        help="the same as --mamba-radix-cache-strategy off",
    )
    add("--page-size", type=int, default=1, metavar="N", help="tokens per page of the KV cache")


def _add_plugin(add: Add) -> None:
    add("--copy", choices=("auto", "off"), default=flags.read({}).copy, help="SGLANG_DFLASH_COPY")
    add("--draft-head", choices=("full", "fp8"), default="full", help="SGLANG_DFLASH_DRAFT_HEAD")
    add(
        "--context-length",
        type=int,
        metavar="N",
        help="longest text of the server, for the token history (default: the target's limit)",
    )
    add("--widest", type=int, default=0, metavar="N", help="widest of SGLANG_DFLASH_WIDTHS if it exceeds the block")
