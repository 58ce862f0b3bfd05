"""Options of `sglang-dflash train`. This module does not import torch, so that `--help` is printed without delay."""

import os
from argparse import ArgumentTypeError
from dataclasses import fields
from pathlib import Path
from typing import Any

from sglang_dflash.cli import Add, Parser, count, count_or_zero, positive, positive_or_zero
from sglang_dflash.train.sizes import Rollout, Second

DTYPES = ("bf16", "fp32")
STEPS = 10_000  # of a run without --steps and --minutes
SECOND_HELP = {
    "conv_kernel_size": "taps of the convolution over the block",
    "conv_group_size": "channels that share a change of the taps; divides the hidden size",
    "selector_rank": "rank of the selector's two tables",
    "selector_top_k": "candidates per slot",
}
ROLLOUT_HELP = {
    "gru_hidden_dim": "width of the state that summarises the drafts so far",
    "emb_dim": "rank of the correction of the logits",
}
DOMINO = "domino"
DEVICE_HELP = "torch device (default: cuda if there is a GPU, else cpu)"
SEED: dict[str, Any] = {"type": int, "default": 0, "help": "seed of all random draws"}


def layer_ids(text: str) -> tuple[int, ...]:
    """Parse layer numbers separated by commas, such as `1,9,17`."""
    parts = text.split(",")
    if not all(part.strip().isdecimal() for part in parts):
        raise ArgumentTypeError(f"{text!r} is not a list of layer numbers; write it like 1,9,17,25,33")
    return tuple(map(int, parts))


def option(field: str) -> str:
    return "--" + field.replace("_", "-")


def make_parser() -> Parser:
    """Return the parser of all commands of the trainer."""
    parser = Parser(
        prog="sglang-dflash train",
        description="Train DFlash drafts. The guide is `sglang-dflash docs training`.",
    )
    commands = parser.add_subparsers(dest="command", required=True)
    _add_draft(commands.add_parser("draft", help="train a draft for a target"))
    _add_prompts(commands.add_parser("prompts", help="write prompts for `answers`: user turns by a target, and tasks"))
    _add_answers(commands.add_parser("answers", help="let a target answer prompts"))
    _add_chats(commands.add_parser("chats", help="write conversations of the kind that the tiny pair was trained on"))
    _add_tiny(commands.add_parser("tiny", help="train a tiny target and its draft from nothing"))
    return parser


def _add_draft(draft: Parser) -> None:
    draft.add_argument("--target", required=True, help="folder or hub name of the target, with its tokenizer")
    text = draft.add_mutually_exclusive_group(required=True)
    text.add_argument("--data", type=Path, help=".txt, or .jsonl of text, prompt/response or messages")
    text.add_argument("--rollouts", type=Path, help=".jsonl of a server's answers, with features of their tokens")
    draft.add_argument("--out", type=Path, required=True, help="folder for the draft, the checkpoint and the log")
    _add_shape(draft.add_argument_group("the draft").add_argument)
    _add_course(draft.add_argument_group("the training").add_argument)
    _add_watch(draft.add_argument_group("checkpoints and evaluation").add_argument)


def _add_shape(add: Add) -> None:
    add("--layers", type=count, default=5, help="layers of the draft")
    add("--block-size", type=count, default=16, help="tokens of a block, the anchor included")
    add(
        "--target-layer-ids",
        type=layer_ids,
        help="target layers whose features the draft reads, counted from 0, such as 1,9,17,25,33 "
        "(default: one per draft layer, spread evenly)",
    )
    add(
        "--mask-token-id",
        type=count_or_zero,
        help="id of the token in slots to fill, one that no text uses (default: the tokenizer's mask token)",
    )
    add("--dflash2", action="store_true", help="train a DFlash 2 draft; the next four options are its sizes")
    for field in fields(Second):
        add(option(field.name), type=count, help=f"{SECOND_HELP[field.name]} (default: {field.default})")
    rollout = "correct each draft by the drafts before it (SpecForge's Domino); the next two options are its sizes"
    add("--projector", choices=(DOMINO,), help=rollout)
    for field in fields(Rollout):
        add(option(field.name), type=count, help=f"{ROLLOUT_HELP[field.name]} (default: {field.default})")
    listed = "draft only this many of the most frequent tokens of the text (default: the whole vocabulary)"
    add("--draft-vocab-size", type=count, help=listed)


def _add_course(add: Add) -> None:
    add(  # not `--start`, which torchrun takes for its own `--start-method`
        "--start-from",
        dest="start",
        default="target",
        help="initial weights: target (its last layers), random, or the folder of a draft to train further, "
        "with as many layers or fewer",
    )
    add("--steps", type=count, help=f"training steps; a resumed run may raise them (default: {STEPS:,})")
    minutes = "time limit instead of --steps, evaluations included; such a run cannot be repeated bit by bit"
    add("--minutes", type=positive, help=minutes)
    add("--learning-rate", type=positive, default=6e-4, help="highest learning rate, after the warm-up")
    add("--warmup-steps", type=count_or_zero, default=400, help="steps of linear warm-up, before the cosine")
    add("--rows", type=count, default=4, help="documents per step, shared among the processes")
    add("--max-length", type=count, default=1024, help="largest number of tokens of a document; longer ones are cut")
    add("--anchors", type=count, default=64, help="blocks per document")
    gamma = "slots over which a slot's weight in the loss falls to 37 %% (default: DFlash's, 7 for blocks of 16)"
    add("--gamma", type=positive, help=gamma)
    add(
        "--scored",
        type=count_or_zero,
        default=0,
        help="score only this many of the most frequent tokens in a step, and 1,024 random ones; 0: the whole "
        "vocabulary",
    )
    add("--seed", **SEED)
    add("--cache", type=Path, help="folder to keep the target's features in (default: the target reads every epoch)")
    add("--device", help=DEVICE_HELP)
    add(
        "--dtype",
        choices=DTYPES,
        default="bf16",
        help="dtype of saved draft, cached features and the forward; a CPU without bf16 instructions computes in fp32",
    )


def _add_watch(add: Add) -> None:
    add("--save-every", type=count, default=200, help="steps between checkpoints; each also saves the draft")
    add("--save-seconds", type=positive, help="a checkpoint is also due this long after the last one")
    add("--report-every", type=count, default=100, help="steps between evaluations")
    drawn = "picture of loss and acceptance, drawn anew with each checkpoint; .png, .svg or .pdf (needs matplotlib)"
    add("--plot", type=Path, metavar="FILE", help=drawn)
    add("--eval-prompts", type=count_or_zero, default=8, help="held-out prompts to answer in an evaluation; 0: none")
    add("--eval-tokens", type=count, default=64, help="largest number of tokens in each of these answers")


def _add_prompts(asks: Parser) -> None:
    asks.add_argument("--target", required=True, help="folder or hub name of the target")
    asks.add_argument("--out", type=Path, required=True, help=".jsonl to write")
    asks.add_argument("--turns", type=count_or_zero, default=2000, help="user turns that the target writes")
    asks.add_argument("--tasks", type=count_or_zero, default=2000, help="tasks about code and documentation")
    asks.add_argument(
        "--folders", type=Path, nargs="*", help="Python packages for the tasks (default: Python's standard library)"
    )
    _add_source(asks.add_argument)


def _add_answers(answers: Parser) -> None:
    add = answers.add_argument
    lines = ".jsonl of {\"messages\"} whose last turn is the user's or a tool's"
    add("--prompts", type=Path, required=True, help=lines)
    add("--out", type=Path, required=True, help=".jsonl to append to; prompts answered there are not sent again")
    warmth = "temperature of every second answer; the others are greedy"
    add("--temperature", type=positive_or_zero, default=0.7, help=warmth)
    add("--max-tokens", type=count, default=256, help="largest number of tokens in an answer")
    add("--target", help="folder or hub name of the target; needed without --server")
    _add_source(add)


def _add_source(add: Add) -> None:
    add(
        "--server",
        help="OpenAI-compatible server of the target, such as http://127.0.0.1:30000/v1 "
        "(default: Transformers runs the target in this process)",
    )
    key = os.environ.get("OPENAI_API_KEY") or "none"
    add("--api-key", default=key, metavar="KEY", help="key sent to --server (default: the variable OPENAI_API_KEY)")
    at_once = "requests in flight; without --server, prompts of a batch, of which a GPU needs more, such as 512"
    add("--at-once", type=count, default=32, help=at_once)
    add("--device", help=DEVICE_HELP)
    add("--seed", **SEED)


def _add_chats(chats: Parser) -> None:
    chats.add_argument("--out", type=Path, required=True, help=".jsonl to write")
    chats.add_argument("--lines", type=count, default=2000, help="conversations to write")
    chats.add_argument("--seed", **SEED)


def _add_tiny(tiny: Parser) -> None:
    tiny.add_argument("--out", type=Path, default=Path("tiny"), help="folder for target/ and draft/")
    tiny.add_argument("--kind", choices=("hybrid", "dense"), default="hybrid", help="layers of the target")
    tiny.add_argument("--dflash2", action="store_true", help="train draft2/, a DFlash 2 draft, for the target in --out")
    tiny.add_argument("--target-steps", type=count, help="training steps of the target (default: the shipped pair's)")
    tiny.add_argument("--draft-steps", type=count, help="training steps of the draft (default: the shipped pair's)")
    tiny.add_argument("--threads", type=count, default=1, help="torch threads; more than free cores is much slower")
    tiny.add_argument("--seed", **SEED)
