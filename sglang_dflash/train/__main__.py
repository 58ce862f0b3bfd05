"""Command line of the trainer.

    python -m sglang_dflash.train draft --target PATH --data FILE --out DIR
    python -m sglang_dflash.train tiny [--kind hybrid|dense] [--out DIR]

A run that was interrupted goes on where it stopped when the same command is given again.
"""

import argparse
import sys
from dataclasses import replace
from pathlib import Path

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from sglang_dflash.train.draft import draft_config_for, train_draft
from sglang_dflash.train.loop import Recipe
from sglang_dflash.train.text import Batches, read_documents
from sglang_dflash.train.tiny import DRAFT_RECIPES, load_pair, make_pair, measure
from sglang_dflash.train.tiny_target import RECIPES, make_tokenizer

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16}


def layer_ids(text: str) -> tuple[int, ...]:
    return tuple(int(part) for part in text.split(","))


def make_parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="python -m sglang_dflash.train", description="Train DFlash drafts.")
    commands = parser.add_subparsers(dest="command", required=True)
    shows_defaults = argparse.ArgumentDefaultsHelpFormatter

    draft = commands.add_parser("draft", help="train a draft for a target", formatter_class=shows_defaults)
    draft.add_argument("--target", required=True, help="folder or hub name of the target, with its tokenizer")
    draft.add_argument("--data", type=Path, required=True, help=".txt, or .jsonl of text, prompt/response or messages")
    draft.add_argument("--out", type=Path, required=True, help="folder for the draft and the checkpoint of the run")
    draft.add_argument("--layers", type=int, default=5, help="layers of the draft")
    draft.add_argument("--block-size", type=int, default=16, help="tokens of a block, the anchor included")
    draft.add_argument("--target-layer-ids", type=layer_ids, help="e.g. 1,9,17,25,33; default: spread evenly")
    draft.add_argument("--mask-token-id", type=int, help="default: the tokenizer's mask token")
    draft.add_argument("--steps", type=int, default=10_000)
    draft.add_argument("--learning-rate", type=float, default=6e-4)
    draft.add_argument("--warmup-steps", type=int, default=400)
    draft.add_argument("--rows", type=int, default=4, help="documents per step")
    draft.add_argument("--max-length", type=int, default=1024, help="tokens of a document; more are cut off")
    draft.add_argument("--anchors", type=int, default=64, help="blocks per document")
    draft.add_argument("--gamma", type=float, help="decay of the loss along the block; default: the paper's")
    draft.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    draft.add_argument("--dtype", choices=DTYPES, default="bfloat16", help="of the target and of the saved draft")
    draft.add_argument("--seed", type=int, default=0)

    tiny = commands.add_parser("tiny", help="make the tiny pair from nothing", formatter_class=shows_defaults)
    tiny.add_argument("--out", type=Path, default=Path("tiny"), help="folder for target/ and draft/")
    tiny.add_argument("--kind", choices=("hybrid", "dense"), default="hybrid", help="of the target")
    tiny.add_argument("--target-steps", type=int, help="default: as the shipped pair")
    tiny.add_argument("--draft-steps", type=int, help="default: as the shipped pair")
    tiny.add_argument("--threads", type=int, default=1, help="torch threads; more than free cores is much slower")
    tiny.add_argument("--seed", type=int, default=0)
    return parser


def run_draft(args: argparse.Namespace) -> None:
    tokenizer = AutoTokenizer.from_pretrained(args.target)
    mask_token_id = tokenizer.mask_token_id if args.mask_token_id is None else args.mask_token_id
    if mask_token_id is None:
        raise ValueError(f"the tokenizer of {args.target} has no mask token; name an unused id with --mask-token-id")
    pad_id = mask_token_id if tokenizer.pad_token_id is None else tokenizer.pad_token_id
    documents = read_documents(args.data, tokenizer, args.max_length)
    batches = Batches(documents, n_rows=args.rows, pad_id=pad_id, seed=args.seed)
    target = AutoModelForCausalLM.from_pretrained(args.target, dtype=DTYPES[args.dtype]).to(args.device)
    config = draft_config_for(
        target,
        n_layers=args.layers,
        block_size=args.block_size,
        mask_token_id=mask_token_id,
        target_layer_ids=args.target_layer_ids,
    )
    recipe = Recipe(steps=args.steps, learning_rate=args.learning_rate, warmup_steps=args.warmup_steps)
    train_draft(
        target,
        config,
        batches.at,
        recipe,
        held_out=batches.held_out,
        out=args.out,
        n_anchors=args.anchors,
        gamma=args.gamma,
        seed=args.seed,
    )
    print(f"saved {args.out}")


def run_tiny(args: argparse.Namespace) -> None:
    torch.set_num_threads(args.threads)
    recipes = []
    for recipe, steps in ((RECIPES[args.kind], args.target_steps), (DRAFT_RECIPES[args.kind], args.draft_steps)):
        recipes.append(replace(recipe, steps=steps, more_cycles=()) if steps else recipe)
    make_pair(args.out, args.kind, seed=args.seed, target_recipe=recipes[0], draft_recipe=recipes[1])
    for row in measure(*load_pair(args.out), make_tokenizer()):
        print(f"{row.task:16} {row.mean_committed:6.2f} tokens per step over {row.n_steps} steps")


def main(argv: list[str] | None = None) -> int:
    args = make_parser().parse_args(argv)
    try:
        {"draft": run_draft, "tiny": run_tiny}[args.command](args)
    except (ValueError, OSError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    return 0


if __name__ == "__main__":
    sys.exit(main())
