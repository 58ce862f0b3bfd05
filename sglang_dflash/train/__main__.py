"""Command line of the trainer.

    sglang-dflash train draft --target PATH --data FILE --out DIR
    torchrun --nproc-per-node 8 -m sglang_dflash.train draft --target PATH --data FILE --out DIR
    sglang-dflash train prompts --server URL --target PATH --out FILE
    sglang-dflash train answers --server URL --prompts FILE --out FILE
    sglang-dflash train chats --out FILE
    sglang-dflash train tiny [--kind hybrid|dense] [--out DIR]

The same command resumes an interrupted run.
"""

import argparse
import json
import sys
import sysconfig
from collections.abc import Sequence
from dataclasses import fields, replace
from pathlib import Path
from random import Random
from typing import Any

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from sglang_dflash.tiny import corpus
from sglang_dflash.train import answers, prompts
from sglang_dflash.train.draft import Data, Second, Settings, draft_config_for, train_draft
from sglang_dflash.train.features import FeatureCache
from sglang_dflash.train.loop import TrainRecipe
from sglang_dflash.train.ranks import joined
from sglang_dflash.train.text import Batches, read_documents
from sglang_dflash.train.tiny_pair import (
    DRAFT_RECIPES,
    RECIPES,
    load_pair,
    make_draft,
    make_pair,
    make_tokenizer,
    measure,
)
from sglang_dflash.train.tokens import text_digest

DTYPES = {"bf16": torch.bfloat16, "fp32": torch.float32}


def layer_ids(text: str) -> tuple[int, ...]:
    return tuple(int(part) for part in text.split(","))


def option(field: str) -> str:
    return "--" + field.replace("_", "-")


def make_parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="sglang-dflash train", description="Train DFlash drafts.")
    commands = parser.add_subparsers(dest="command", required=True)
    shows_defaults = argparse.ArgumentDefaultsHelpFormatter
    add_draft_options(commands.add_parser("draft", help="train a draft for a target", formatter_class=shows_defaults))

    add_text_options(commands, shows_defaults)

    chats = commands.add_parser(
        "chats", help="write conversations of the kind the tiny pair knows", formatter_class=shows_defaults
    )
    chats.add_argument("--out", type=Path, required=True, help=".jsonl to write")
    chats.add_argument("--lines", type=int, default=2000)
    chats.add_argument("--seed", type=int, default=0)

    tiny = commands.add_parser("tiny", help="make the tiny pair from nothing", formatter_class=shows_defaults)
    tiny.add_argument("--out", type=Path, default=Path("tiny"), help="folder for target/ and draft/")
    tiny.add_argument("--kind", choices=("hybrid", "dense"), default="hybrid", help="of the target")
    tiny.add_argument("--dflash2", action="store_true", help="train draft2/, a DFlash 2 draft, for the target in --out")
    tiny.add_argument("--target-steps", type=int, help="default: as the shipped pair")
    tiny.add_argument("--draft-steps", type=int, help="default: as the shipped pair")
    tiny.add_argument("--threads", type=int, default=1, help="torch threads; more than free cores is much slower")
    tiny.add_argument("--seed", type=int, default=0)
    return parser


def add_text_options(commands: Any, shows_defaults: type[argparse.HelpFormatter]) -> None:
    """Add the commands with which a served target writes its draft's training text."""
    asks = commands.add_parser(
        "prompts", help="let a target write user turns; add tasks", formatter_class=shows_defaults
    )
    asks.add_argument("--target", required=True, help="folder or hub name of the target, for its chat template")
    asks.add_argument("--out", type=Path, required=True, help=".jsonl to write")
    asks.add_argument("--turns", type=int, default=2000, help="user turns that the target is asked to write")
    asks.add_argument("--tasks", type=int, default=2000, help="tasks about code and documentation")
    asks.add_argument(
        "--folders", type=Path, nargs="*", help="Python packages to take them from; default: Python's own"
    )
    answer = commands.add_parser("answers", help="let a target answer prompts", formatter_class=shows_defaults)
    answer.add_argument("--prompts", type=Path, required=True, help='.jsonl of {"messages"} that end in a user turn')
    answer.add_argument("--out", type=Path, required=True, help=".jsonl to append to; what it holds is not asked again")
    answer.add_argument("--temperature", type=float, default=0.7, help="of every second answer; the others are greedy")
    answer.add_argument("--max-tokens", type=int, default=256, help="of an answer")
    for parser in (asks, answer):
        parser.add_argument("--server", default="http://127.0.0.1:30000/v1", help="an OpenAI server of the target")
        parser.add_argument("--at-once", type=int, default=32, help="requests in flight")
        parser.add_argument("--seed", type=int, default=0)


def add_draft_options(draft: argparse.ArgumentParser) -> None:
    draft.add_argument("--target", required=True, help="folder or hub name of the target, with its tokenizer")
    draft.add_argument("--data", type=Path, required=True, help=".txt, or .jsonl of text, prompt/response or messages")
    draft.add_argument("--out", type=Path, required=True, help="folder for the draft, the checkpoint and the log")

    shape = draft.add_argument_group("the draft")
    shape.add_argument("--layers", type=int, default=5, help="layers of the draft")
    shape.add_argument("--block-size", type=int, default=16, help="tokens of a block, the anchor included")
    shape.add_argument("--target-layer-ids", type=layer_ids, help="e.g. 1,9,17,25,33; default: spread evenly")
    shape.add_argument("--mask-token-id", type=int, help="default: the tokenizer's mask token")
    shape.add_argument("--dflash2", action="store_true", help="a DFlash 2 draft; the next four are its sizes")
    for field in fields(Second):
        shape.add_argument(option(field.name), type=int, default=field.default, help="see docs/training.md")

    course = draft.add_argument_group("the training")
    course.add_argument(
        "--start", choices=("target", "random"), default="target", help="weights of the target's last layers, or noise"
    )
    course.add_argument("--steps", type=int, default=10_000)
    course.add_argument("--learning-rate", type=float, default=6e-4)
    course.add_argument("--warmup-steps", type=int, default=400)
    course.add_argument("--rows", type=int, default=4, help="documents per step, shared among the processes")
    course.add_argument("--max-length", type=int, default=1024, help="tokens of a document; a longer one is cut up")
    course.add_argument("--anchors", type=int, default=64, help="blocks per document")
    course.add_argument("--gamma", type=float, help="decay of the loss along the block; default: the paper's")
    course.add_argument(
        "--scored",
        type=int,
        default=0,
        help="score this many of the most frequent tokens in a step, and 1,024 drawn ones; 0: the whole vocabulary",
    )
    course.add_argument("--seed", type=int, default=0)
    course.add_argument("--cache", type=Path, help="folder that keeps the target's features; default: none are kept")
    course.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    course.add_argument(
        "--dtype", choices=DTYPES, default="bf16", help="of the target, the forward and the saved draft; weights: fp32"
    )

    watch = draft.add_argument_group("what is written meanwhile")
    watch.add_argument("--save-every", type=int, default=200, help="steps between checkpoints")
    watch.add_argument("--report-every", type=int, default=100, help="steps between evaluations")
    watch.add_argument("--eval-prompts", type=int, default=8, help="held-out prompts that are answered")
    watch.add_argument("--eval-tokens", type=int, default=64, help="tokens of each answer")


def run_draft(args: argparse.Namespace) -> None:
    tokenizer = AutoTokenizer.from_pretrained(args.target)
    mask_token_id = tokenizer.mask_token_id if args.mask_token_id is None else args.mask_token_id
    if mask_token_id is None:
        raise ValueError(f"the tokenizer of {args.target} has no mask token; name an unused id with --mask-token-id")
    pad_id = mask_token_id if tokenizer.pad_token_id is None else tokenizer.pad_token_id
    documents = read_documents(args.data, tokenizer, args.max_length)
    batches = Batches(documents, n_rows=args.rows, pad_id=pad_id, seed=args.seed)
    data = Data(
        batches.at,
        batches.held_out,
        batches.prompts(args.eval_prompts),
        facts={"text": text_digest(documents), "rows": args.rows},
        frequent=batches.most_frequent(args.scored) if args.scored else None,
    )
    with joined(args.device) as (ranks, device):
        if args.rows % ranks.n:
            raise ValueError(
                f"--rows {args.rows} cannot be shared evenly by {ranks.n} processes; give a multiple of {ranks.n}"
            )
        target = AutoModelForCausalLM.from_pretrained(args.target, dtype=DTYPES[args.dtype])
        torch.nn.Module.to(target, device)
        config = draft_config_for(
            target,
            n_layers=args.layers,
            block_size=args.block_size,
            mask_token_id=mask_token_id,
            target_layer_ids=args.target_layer_ids,
            second=second_of(args),
        )
        cache = FeatureCache(args.cache, documents, target, config.target_layer_ids) if args.cache else None
        if ranks.is_first:
            print(plan(args, batches))
            if cache:
                cache.prepare(say=print)
        ranks.wait()
        if cache:
            cache.fill(ranks)
        train_draft(
            target,
            config,
            data,
            recipe_of(args),
            out=args.out,
            settings=Settings(args.anchors, args.gamma, args.seed, args.start == "target", args.eval_tokens),
            read=cache.read if cache else None,
            ranks=ranks,
        )
        if ranks.is_first:
            print(f"saved {args.out}")


def plan(args: argparse.Namespace, batches: Batches) -> str:
    n_tokens = sum(len(document.ids) for document in batches.documents)
    n_epochs = args.steps * args.rows / len(batches.trained_documents)
    return (
        f"{len(batches.documents):,} documents of {n_tokens:,} tokens, {len(batches.held_out_documents)} held out; "
        f"{args.steps:,} steps of {args.rows} documents read the others {n_epochs:.1f} times"
    )


def second_of(args: argparse.Namespace) -> Second | None:
    return Second(**{field.name: vars(args)[field.name] for field in fields(Second)}) if args.dflash2 else None


def recipe_of(args: argparse.Namespace) -> TrainRecipe:
    return TrainRecipe(
        steps=args.steps,
        learning_rate=args.learning_rate,
        warmup_steps=args.warmup_steps,
        save_every=args.save_every,
        report_every=args.report_every,
    )


def run_prompts(args: argparse.Namespace) -> None:
    tokenizer = AutoTokenizer.from_pretrained(args.target)
    folders = args.folders or [Path(sysconfig.get_paths()["stdlib"])]
    options = {"turns": args.turns, "n_tasks": args.tasks, "seed": args.seed, "at_once": args.at_once}
    print(f"{prompts.write_prompts(args.server, tokenizer, folders, args.out, **options):,} prompts in {args.out}")


def run_answers(args: argparse.Namespace) -> None:
    sampling = answers.Sampling(args.temperature, args.max_tokens, args.seed)
    n = answers.run(args.server, args.prompts, args.out, sampling, args.at_once)
    print(f"{n:,} answers written to {args.out}")


def run_chats(args: argparse.Namespace) -> None:
    random = Random(args.seed)
    with args.out.open("w") as file:
        for _ in range(args.lines):
            exchange = corpus.draw(random)
            turns = (("user", exchange.prompt), ("assistant", exchange.answer))
            file.write(json.dumps({"messages": [{"role": role, "content": content} for role, content in turns]}) + "\n")


def run_tiny(args: argparse.Namespace) -> None:
    torch.set_num_threads(args.threads)
    recipes = []
    for recipe, steps in ((RECIPES[args.kind], args.target_steps), (DRAFT_RECIPES[args.kind], args.draft_steps)):
        recipes.append(replace(recipe, steps=steps, more_cycles=()) if steps else recipe)
    target_recipe, draft_recipe = recipes
    if args.dflash2:
        make_draft(args.out, args.kind, seed=args.seed, recipe=draft_recipe, second=True)
    else:
        make_pair(args.out, args.kind, seed=args.seed, target_recipe=target_recipe, draft_recipe=draft_recipe)
    for row in measure(*load_pair(args.out, second=args.dflash2), make_tokenizer()):
        print(f"{row.task:16} {row.mean_committed:6.2f} tokens per step over {row.n_steps} steps")


RUNS = {
    "draft": run_draft,
    "prompts": run_prompts,
    "answers": run_answers,
    "chats": run_chats,
    "tiny": run_tiny,
}


def main(argv: Sequence[str]) -> int:
    args = make_parser().parse_args(argv)
    try:
        RUNS[args.command](args)
    except (ValueError, OSError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
