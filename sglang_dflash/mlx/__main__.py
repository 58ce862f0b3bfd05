"""One prompt, answered with a draft: text as it comes, then what the steps were.

sglang-dflash mlx --model DIR --draft DIR --prompt "Why is the sky blue?" --temperature 0.7
"""

import argparse
import sys
import time
from collections.abc import Sequence

import mlx.core as mx
from mlx_lm.sample_utils import make_sampler

from sglang_dflash.errors import NotSupported
from sglang_dflash.mlx.generate import DecodedStep, Options, stream_generate
from sglang_dflash.mlx.pair import load


def arguments() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="sglang-dflash mlx", description=__doc__.splitlines()[0])
    add = parser.add_argument
    add("--model", required=True, help="the target: a folder, or a name on the Hugging Face hub")
    add("--draft", required=True, help="its DFlash draft, likewise")
    add("--prompt", required=True, help="a user's message; with --raw, the text to continue")
    add("--raw", action="store_true", help="no chat template around the prompt")
    add("--max-tokens", type=int, default=512, help="(%(default)s)")
    add("--temperature", type=float, default=0.0, help="(%(default)s)")
    add("--top-p", type=float, default=1.0, help="(%(default)s)")
    add("--top-k", type=int, default=0, help="(%(default)s: all)")
    add("--min-p", type=float, default=0.0, help="(%(default)s)")
    add("--seed", type=int, default=0, help="of what is drawn (%(default)s)")
    add("--width", type=int, help="slots drafted and verified per step; left out, the checkpoint's block")
    add("--draft-window", type=int, help="context tokens the draft sees; left out, all")
    return parser


def main(argv: Sequence[str]) -> int:
    options = arguments().parse_args(argv)
    try:
        answer(options)
    except (NotSupported, ValueError, FileNotFoundError) as error:
        print(error, file=sys.stderr)
        return 1
    return 0


def answer(options: argparse.Namespace) -> None:
    pair = load(options.model, options.draft)
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


def summary(steps: Sequence[DecodedStep], began: float, ends: Sequence[float]) -> str:
    """Return a line about the steps with drafts, without the prompt's step and the last one, which has no tokens."""
    decoded = steps[1:-1]
    if not decoded:
        return f"1 token, prompt {ends[0] - began:.2f} s"
    n_tokens, seconds = sum(len(step.committed) for step in decoded), ends[-1] - ends[0]
    return (
        f"{n_tokens + 1} tokens, prompt {ends[0] - began:.2f} s, then {n_tokens / seconds:.1f} tokens/s: "
        f"{len(decoded)} steps of {n_tokens / len(decoded):.2f} tokens, "
        f"drafts accepted {' '.join(str(step.n_accepted) for step in decoded)}"
    )


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
