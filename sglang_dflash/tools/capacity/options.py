"""Options of `sglang-dflash check --gpu-memory`.

The options have SGLang's names too, so that a launch command can be pasted. Other launch flags are accepted. The report
names those that may change the result, see `uncounted`.
"""

import argparse
import re
from argparse import SUPPRESS
from typing import Any, NoReturn

from sglang_dflash import flags
from sglang_dflash.cli import Add, Parser, count, gib, nearest, positive
from sglang_dflash.engine.host.backends import TRTLLM_PAGES
from sglang_dflash.engine.memory.sizes import MAX_REQUESTS
from sglang_dflash.tools.capacity import geometry
from sglang_dflash.tools.capacity import known_models as models
from sglang_dflash.tools.capacity.division import MAMBA_RATIO, RadixStates

CONTEXT = 8192  # default number of tokens of a request, prompt and answer together
STRATEGIES = {radix.name.lower(): radix for radix in RadixStates}
MISSPELT = 0.85  # an unknown flag counts as misspelt if its similarity to an option is at least this
# Launch flags without an effect on this computation.
WITHOUT_EFFECT = (
    *("--speculative-algorithm", "--sampling-backend", "--grammar-backend", "--linear-attn-backend"),
    *("--trust-remote-code", "--device", "--host", "--port", "--served-model-name", "--api-key", "--chat-template"),
    *("--reasoning-parser", "--tool-call-parser", "--tokenizer-path", "--tokenizer-mode", "--skip-tokenizer-init"),
    *("--revision", "--speculative-draft-model-revision", "--load-format", "--download-dir", "--random-seed"),
    *("--log-level", "--log-requests", "--log-requests-level", "--decode-log-interval", "--enable-metrics"),
    *("--watchdog-timeout", "--schedule-policy", "--schedule-conservativeness", "--stream-interval", "--ep-size"),
    *("--nnodes", "--node-rank", "--dist-init-addr", "--nccl-port", "--base-gpu-id", "--skip-server-warmup"),
    *("--enable-cache-report", "--mamba-track-interval", "--num-continuous-decode-steps", "--moe-runner-backend"),
    *("--speculative-num-steps", "--speculative-eagle-topk", "--speculative-draft-sink-size"),
    *("--speculative-dspark-block-size", "--enable-memory-saver"),
    *("--enable-weights-cpu-backup", "--enable-draft-weights-cpu-backup"),
)
# Launch flags that are not counted, and that are so similar to an option that they would count as misspelt.
SIMILAR = ("--dp-size", "--pp-size", "--mm-attention-backend")
# Beginnings of launch flags that change only SGLang's default for --mem-fraction-static.
OF_FRACTION = (
    *("--cuda-graph-", "--disable-cuda-graph", "--disable-decode-cuda-graph", "--disable-prefill-cuda-graph"),
    *("--chunked-prefill-size", "--max-prefill-tokens"),
)
AUTO = "auto"
FA4_PAGE = 128  # tokens per page that SGLang sets for a target with fa4 on B200 and B300, whatever --page-size is
BLACKWELL_GIB = 150  # B200 and B300 have more memory; Hopper cards, on which fa4 keeps the page size, have less
TRTLLM_PAGE = 64  # tokens per page with trtllm_mha, if --page-size is none that it accepts


class CapacityParser(Parser):
    """Parser that accepts further launch flags, and stores their names as `not_counted`."""

    raises = False  # errors raise ValueError instead of ending the program

    def error(self, message: str) -> NoReturn:
        if self.raises:
            raise ValueError(message + self.suggestion(message))
        super().error(message)

    def parse_known_args(self, args: Any = None, namespace: Any = None) -> Any:
        options, rest = super().parse_known_args(args, namespace)
        names = [word.split("=")[0] for word in rest if word.startswith("--")]
        options.not_counted = tuple(dict.fromkeys(names))
        are_flags = rest[0].startswith("--") if rest else True  # a first word without -- belongs to no flag
        are_flags &= not any(re.match(r"-[a-zA-Z]", word) for word in rest)
        return options, [] if are_flags and not any(map(self.is_misspelt, names)) else rest

    def is_misspelt(self, name: str) -> bool:
        shown = [option for action in self._actions if action.help != SUPPRESS for option in action.option_strings]
        return name == "--" or (name not in SIMILAR and bool(nearest(name, shown, MISSPELT)))


def arguments(*, raises: bool = False) -> CapacityParser:
    """Return the parser of `check --gpu-memory`; with `raises` it has no --help, and its errors are ValueErrors."""
    parser = CapacityParser(
        prog="sglang-dflash check",
        description="Compute how many requests a card holds.",
        allow_abbrev=False,
        add_help=not raises,
    )
    parser.raises = raises
    add_options(parser.add_argument)
    return parser


def add_options(add: Add) -> None:
    """Add the options with `add`, an argument parser's `add_argument`. SGLang's names of options are accepted too."""
    _add_pair(add)
    _add_memory(add)
    _add_caches(add)
    _add_plugin(add)
    add("--json", action="store_true", help="print one JSON document instead of tables")
    for name in WITHOUT_EFFECT:
        add(name, nargs="*", dest="without_effect", default=SUPPRESS, help=SUPPRESS)


def page_size(options: argparse.Namespace) -> int:
    """Return the number of tokens per page of the KV cache, with SGLang's changes for attention backends."""
    # fa4 changes the page size only as the target's backend.
    if "fa4" in options.attention_backends and options.gpu_memory > BLACKWELL_GIB:
        return FA4_PAGE
    uses_trtllm = "trtllm_mha" in (*options.attention_backends, options.draft_backend)
    if uses_trtllm and options.page_size not in TRTLLM_PAGES:
        return TRTLLM_PAGE
    return options.page_size or 1


def radix_states(options: argparse.Namespace) -> RadixStates:
    """Return the strategy of the prefix cache, with SGLang's choice for "auto"."""
    strategy, overlap = options.mamba_radix_cache_strategy, not options.disable_overlap_schedule
    if strategy == AUTO:
        # SGLang resolves the strategy before an attention backend changes the page size.
        strategy = "extra_buffer" if overlap or (options.page_size or 1) > 1 else "no_buffer"
    # Without the overlap schedule `extra_buffer` needs four state slots per request, as many as the lazy strategy.
    return RadixStates.EXTRA_BUFFER_LAZY if strategy == "extra_buffer" and not overlap else STRATEGIES[strategy]


def uncounted(options: argparse.Namespace) -> tuple[list[str], list[str]]:
    """Return the launch flags that are not counted: those that may change the result, and those of `OF_FRACTION`.

    With `--mem-fraction-static` the latter have no effect, and are left out.
    """
    of_fraction = [name for name in options.not_counted if name.startswith(OF_FRACTION)]
    others = [name for name in options.not_counted if name not in of_fraction]
    dtype, draft_dtype = options.kv_cache_dtype, options.draft_kv_dtype or options.kv_cache_dtype
    if dtype not in (AUTO, *geometry.KV_ITEMSIZES):
        others.append(f"--kv-cache-dtype {dtype}")
    # The draft's K and V are counted in the dtype in which the draft is loaded. Some backends store them in fp8.
    if geometry.KV_ITEMSIZES.get(draft_dtype, 2) < 2:
        others.append(f"--speculative-draft-kv-cache-dtype {draft_dtype}")
    return others, of_fraction if options.mem_fraction is None else []


def share(text: str) -> float:
    """Parse a number above 0 and below 1."""
    if not positive(text) < 1:
        raise argparse.ArgumentTypeError(f"{text!r} is not between 0 and 1")
    return positive(text)


def _add_pair(add: Add) -> None:
    known = ", ".join(models.TARGETS)
    add("--model", "--model-path", required=True, help=f"the target: a directory, a config.json, or one of {known}")
    add(
        "--draft",
        "--speculative-draft-model-path",
        "--speculative-draft-model",
        help="the DFlash draft: a directory, a config.json, or a published draft's name on the hub "
        "(default: that of a named target)",
    )
    add(
        "--draft-quantization",
        "--speculative-draft-model-quantization",
        choices=(*geometry.QUANTIZED_ITEMSIZES, "unquant"),
        help="quantization of the draft while it loads",
    )


def _add_memory(add: Add) -> None:
    add("--gpu-memory", type=gib, required=True, metavar="GIB", help="memory of a card, as its driver reports it")
    add("--context", type=count, default=CONTEXT, metavar="N", help="tokens of a request, prompt and answer together")
    add(
        "--block",
        "--speculative-num-draft-tokens",
        "--speculative-dflash-block-size",
        type=count,
        metavar="N",
        help="tokens of a block (default: as the draft was trained)",
    )
    add(
        "--window",
        "--speculative-draft-window-size",
        "--speculative-dflash-draft-window-size",
        type=count,
        metavar="N",
        help="context tokens of the draft, in a ring buffer per request (default: the draft's window if all its layers "
        "slide, else all tokens, in the KV cache)",
    )
    add("--tp", "--tp-size", "--tensor-parallel-size", type=count, default=1, metavar="N", help="number of cards")
    add(
        "--mem-fraction",
        "--mem-fraction-static",
        type=share,
        metavar="X",
        help="share of the card for weights, states and KV (default: as SGLang sets it for the card)",
    )


def _add_caches(add: Add) -> None:
    _add_kv(add)
    _add_states(add)


def _add_kv(add: Add) -> None:
    add(
        "--dtype",
        choices=(AUTO, *geometry.LOADED_ITEMSIZES),
        default=AUTO,
        help="dtype of both models; auto: that of the target's config.json, and float16 for float32",
    )
    add("--kv-cache-dtype", default=AUTO, metavar="DTYPE", help="dtype of K and V; auto: as --dtype")
    own = "not counted: the draft's K and V have the draft's dtype here"
    add("--draft-kv-dtype", "--speculative-draft-kv-cache-dtype", metavar="DTYPE", help=own)
    add("--page-size", type=count, metavar="N", help="tokens per page of the KV cache (default: by attention backend)")
    backends = ("--attention-backend", "--prefill-attention-backend", "--decode-attention-backend")
    by_page = (
        f"attention backend; sets the page size: {TRTLLM_PAGE} for trtllm_mha, {FA4_PAGE} for fa4 on B200 and B300"
    )
    add(*backends, dest="attention_backends", action="append", default=[], metavar="NAME", help=by_page)
    only = "attention backend of the draft; trtllm_mha sets the page size too"
    add("--speculative-draft-attention-backend", dest="draft_backend", metavar="NAME", help=only)
    add("--max-total-tokens", type=count, metavar="N", help="largest number of tokens in the KV cache")
    most = f"largest number of requests at once (SGLang's default under DFLASH: {MAX_REQUESTS})"
    add("--max-running-requests", type=count, metavar="N", help=most)


def _add_states(add: Add) -> None:
    add(
        "--mamba-full-memory-ratio",
        type=positive,
        default=MAMBA_RATIO,
        metavar="X",
        help="ratio of recurrent-state memory to KV cache memory",
    )
    n_states = "number of recurrent states (default: by --mamba-full-memory-ratio; with strategy off, one a request)"
    add("--max-mamba-cache-size", type=count, metavar="N", help=n_states)
    add(
        "--mamba-ssm-dtype",
        choices=geometry.ITEMSIZES,
        help="dtype of recurrent states (default: that of config.json, else float32)",
    )
    add(
        "--mamba-radix-cache-strategy",
        "--mamba-scheduler-strategy",
        choices=(AUTO, *STRATEGIES),
        default=AUTO,
        help="strategy for recurrent states in the prefix cache; off: no prefix cache",
    )
    add(
        "--disable-radix-cache",
        action="store_const",
        const="off",
        dest="mamba_radix_cache_strategy",
        default=SUPPRESS,
        help="the same as --mamba-radix-cache-strategy off",
    )
    fewer = "SGLang's flag; with the strategies auto and extra_buffer a request then needs fewer recurrent states"
    add("--disable-overlap-schedule", action="store_true", help=fewer)


def _add_plugin(add: Add) -> None:
    copy = "off if the launch has SGLANG_DFLASH_COPY=off; otherwise the token histories of n-gram copies are counted"
    add("--copy", choices=("auto", "off"), default=flags.read({}).copy, help=copy)
    head = "head that scores drafts, the target's or an fp8 copy: the launch's variable SGLANG_DFLASH_DRAFT_HEAD"
    add("--draft-head", choices=("full", "fp8"), default="full", help=head)
    add(
        "--context-length",
        type=count,
        metavar="N",
        help="longest request in tokens, which sizes the token histories for n-gram copies "
        "(default: the target's limit)",
    )
    add("--widest", type=count, metavar="N", help="largest number in SGLANG_DFLASH_WIDTHS, if above the block size")
