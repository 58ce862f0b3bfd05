"""Command line that answers one prompt with a target and its draft: streams the text, then prints a summary.

sglang-dflash mlx --model DIR --draft DIR --prompt "Why is the sky blue?" --temperature 0.7
"""

import sys
import time
from argparse import Namespace
from collections.abc import Sequence
from typing import TYPE_CHECKING

from sglang_dflash.cli import Parser, count, count_or_zero, positive_or_zero

if TYPE_CHECKING:
    from sglang_dflash.reference.mlx.generate import DecodedStep


def arguments() -> Parser:
    parser = Parser(prog="sglang-dflash mlx", description="Answer a prompt with a draft under MLX.")
    add = parser.add_argument
    add("--model", required=True, help="the target: a folder, or a name on the Hugging Face hub")
    add("--draft", required=True, help="its DFlash draft: a folder, or a name on the Hugging Face hub")
    add("--prompt", required=True, help="a user's message; with --raw, the text to continue")
    add("--raw", action="store_true", help="use the prompt without the chat template")
    add("--max-tokens", type=count, default=512, help="largest number of tokens in the answer")
    add("--temperature", type=positive_or_zero, default=0.0, help="sampling temperature; 0 is greedy")
    add("--top-p", type=positive_or_zero, default=1.0, help="draw from the likeliest tokens of this total probability")
    add("--top-k", type=count_or_zero, default=0, help="draw from this many likeliest tokens; 0: all")
    min_p = "drop tokens whose probability is below this share of the likeliest token's"
    add("--min-p", type=positive_or_zero, default=0.0, help=min_p)
    add("--seed", type=int, default=0, help="seed of the random draws")
    add("--width", type=count, help="slots drafted and verified per step (default: the draft's block size)")
    window = "largest number of context tokens that the draft attends to"
    add("--draft-window", type=count, help=f"{window} (default: no limit beyond the draft's own window)")
    return parser


def main(argv: Sequence[str]) -> int:
    options = arguments().parse_args(argv)
    try:
        answer(options)
    except (ModuleNotFoundError, ValueError, FileNotFoundError) as error:
        print(f"mlx: {error}", file=sys.stderr)
        return 1
    return 0


def answer(options: Namespace) -> None:
    """Print the answer as it is generated, then a summary of the steps.

    Raises:
        ModuleNotFoundError: MLX is not installed.
        ValueError, FileNotFoundError: the pair cannot be loaded, or an option does not fit the pair.
    """
    # If MLX is missing, this import raises ModuleNotFoundError with the pip command.
    from sglang_dflash.reference.mlx import Options, load, stream_generate

    pair = load(options.model, options.draft)

    import mlx.core as mx
    from mlx_lm.sample_utils import make_sampler

    tokenizer = pair.tokenizer
    message = [{"role": "user", "content": options.prompt}]
    prompt = (
        tokenizer.encode(options.prompt)
        if options.raw or not tokenizer.has_chat_template
        else tokenizer.apply_chat_template(message, add_generation_prompt=True)
    )
    mx.random.seed(options.seed)
    chosen = Options(
        max_new_tokens=options.max_tokens,
        sampler=make_sampler(options.temperature, options.top_p, options.min_p, top_k=options.top_k),
        stop_token_ids=frozenset(tokenizer.eos_token_ids),
        width=options.width,
        draft_window=options.draft_window,
    )
    began, ends = time.perf_counter(), list[float]()
    steps: list[DecodedStep] = []
    for text, step in stream_generate(pair, prompt, chosen):
        print(text, end="", flush=True)
        steps.append(step)
        ends.append(time.perf_counter())
    print("\n" + summary(steps, began, ends))


def summary(steps: Sequence["DecodedStep"], began: float, ends: Sequence[float]) -> str:
    """Return one line about the steps with drafts.

    The first step reads the prompt, and the last step has no tokens. All other steps have drafts.

    Args:
        steps: steps that `stream_generate` has yielded.
        began: time before the prompt, in seconds.
        ends: time after each step, in seconds.
    """
    decoded = steps[1:-1]
    if not decoded:
        return f"1 token, prompt {ends[0] - began:.2f} s"
    n_tokens, seconds = sum(len(step.committed) for step in decoded), ends[-1] - ends[0]
    return (
        f"{n_tokens + 1} tokens, prompt {ends[0] - began:.2f} s, then {n_tokens / seconds:.1f} tokens/s: "
        f"{len(decoded)} steps of {n_tokens / len(decoded):.2f} tokens, "
        f"drafts accepted {' '.join(str(step.n_accepted) for step in decoded)}"
    )
