"""Commands of the trainer, by name. Each is a function of its parsed options."""

import argparse
import json
import sysconfig
from dataclasses import fields, replace
from pathlib import Path
from random import Random
from typing import TypeVar

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer, PreTrainedModel

from sglang_dflash import plot
from sglang_dflash.pairs.smollm2.processor import fastest_dtype
from sglang_dflash.pairs.tiny import corpus
from sglang_dflash.plot import Curve, Panel
from sglang_dflash.train import answers, prompts
from sglang_dflash.train.draft import Data, Settings, draft_config_for, train_draft
from sglang_dflash.train.features import FeatureCache, Read
from sglang_dflash.train.from_model import ModelSource
from sglang_dflash.train.loop import LOG, TrainRecipe
from sglang_dflash.train.options import DOMINO, DTYPES, STEPS, option
from sglang_dflash.train.ranks import Ranks, joined
from sglang_dflash.train.rollouts import Rollouts, read_rollouts
from sglang_dflash.train.sizes import Rollout, Second
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
from sglang_dflash.train.tokens import Tokens, text_digest

Sizes = TypeVar("Sizes", Second, Rollout)
TORCH_DTYPES = dict(zip(DTYPES, (torch.bfloat16, torch.float32), strict=True))


def run_draft(args: argparse.Namespace) -> None:
    recipe = recipe_of(args)
    if args.plot:
        plot.require(args.plot)
    tokenizer = AutoTokenizer.from_pretrained(args.target)
    mask_token_id = tokenizer.mask_token_id if args.mask_token_id is None else args.mask_token_id
    if mask_token_id is None:
        raise ValueError(f"the tokenizer of {args.target} has no mask token; give --mask-token-id an unused token id")
    pad_id = mask_token_id if tokenizer.pad_token_id is None else tokenizer.pad_token_id
    rollouts = rollouts_of(args)
    documents = rollouts.documents if rollouts else read_documents(args.data, tokenizer, args.max_length)
    batches = Batches(documents, n_rows=args.rows, pad_id=pad_id, seed=args.seed)
    with joined(default_device(args.device)) as (ranks, device):
        if args.rows % ranks.n:
            raise ValueError(
                f"--rows {args.rows} cannot be shared evenly by {ranks.n} processes; give a multiple of {ranks.n}"
            )
        target = load_target(args.target, TORCH_DTYPES[args.dtype], device)
        config = draft_config_for(
            target,
            n_layers=args.layers,
            block_size=args.block_size,
            mask_token_id=mask_token_id,
            target_layer_ids=args.target_layer_ids,
            second=sizes_of(args, Second, "--dflash2", chosen=args.dflash2),
            rollout=sizes_of(args, Rollout, f"--projector {DOMINO}", chosen=args.projector == DOMINO),
            draft_vocab_size=args.draft_vocab_size,
        )
        if rollouts:
            rollouts.require_size(config.feature_size)
        if ranks.is_first:
            print(plan(recipe, args.rows, batches))
        train_draft(
            target,
            config,
            data_of(args, batches, rollouts),
            recipe,
            out=args.out,
            settings=Settings(args.anchors, args.gamma, args.seed, args.start, args.eval_tokens),
            dtype=TORCH_DTYPES[args.dtype],
            read=rollouts.read if rollouts else cached(args, documents, target, config.target_layer_ids, ranks),
            saved=lambda: plot_log(args),
            ranks=ranks,
        )
        if ranks.is_first:
            plot_log(args)  # a run that had ended saves nothing
            print(f"saved {args.out}")


def rollouts_of(args: argparse.Namespace) -> Rollouts | None:
    """Return the rollouts of --rollouts, None without it.

    Raises:
        ValueError: options contradict --rollouts, or the file cannot be used.
    """
    if not args.rollouts:
        return None
    if not args.target_layer_ids:
        raise ValueError("--rollouts needs --target-layer-ids; give those of the draft that was served")
    if args.cache:
        raise ValueError("--rollouts has the features, so --cache has no use; drop one of them")
    return read_rollouts(args.rollouts, args.max_length, TORCH_DTYPES[args.dtype])


def cached(
    args: argparse.Namespace, documents: list[Tokens], target: PreTrainedModel, ids: tuple[int, ...], ranks: Ranks
) -> Read | None:
    """Fill the cache of --cache, and return its `read`; None without it."""
    if not args.cache:
        return None
    cache = FeatureCache(args.cache, documents, target, ids, dtype=TORCH_DTYPES[args.dtype])
    if ranks.is_first:
        cache.prepare(say=print)
    ranks.wait()
    cache.fill(ranks)
    return cache.read


def plot_log(args: argparse.Namespace) -> None:
    """Draw the log of a run into the file of `--plot`, if given: losses, acceptance length, and acceptance by slot."""
    reports = [json.loads(line) for line in (args.out / LOG).read_text().splitlines()]
    if not (args.plot and reports):
        return

    def curves(*names: str) -> dict[str, Curve]:
        points = {name: [(one["step"], one[name]) for one in reports if name in one] for name in names}
        return {name: Curve(*zip(*found, strict=True)) for name, found in points.items() if found}

    at_slot = {f"step {one['step']}": one["accepted_at_slot"] for one in reports[-1:] if "accepted_at_slot" in one}
    by_slot = {name: Curve(range(1, len(shares) + 1), shares) for name, shares in at_slot.items()}
    panels = [
        Panel("Loss", "step", "loss", curves("loss", "held_out_loss")),
        Panel("Acceptance length, held-out prompts", "step", "acceptance length", curves("tokens_per_step")),
        Panel("Acceptance by slot, held-out prompts", "slot", "share of steps", by_slot),
    ]
    plot.draw([[panel for panel in panels if panel.curves]], args.plot, f"{args.out.name}, a draft for {args.target}")


def data_of(args: argparse.Namespace, batches: Batches, rollouts: Rollouts | None) -> Data:
    return Data(
        batches.at,
        batches.held_out,
        batches.prompts(args.eval_prompts),
        facts={"text": text_digest(batches.documents), "rows": args.rows}
        | ({"features": rollouts.digest} if rollouts else {}),
        frequent=batches.most_frequent(args.scored) if args.scored else None,
        listed=batches.most_frequent(args.draft_vocab_size) if args.draft_vocab_size else None,
    )


def load_target(path: str, dtype: torch.dtype, device: torch.device) -> PreTrainedModel:
    """Load a target in `dtype`, or in fp32 if the device is a CPU without bf16 instructions."""
    dtype = torch.float32 if device.type == "cpu" and fastest_dtype() == torch.float32 else dtype
    target = AutoModelForCausalLM.from_pretrained(path, dtype=dtype)
    torch.nn.Module.to(target, device)
    return target


def plan(recipe: TrainRecipe, n_rows: int, batches: Batches) -> str:
    """Return a line with the sizes of the text, and the time limit or the number of epochs."""
    n_tokens = sum(len(document.ids) for document in batches.documents)
    n_trained = len(batches.trained_documents)
    n_epochs = recipe.steps * n_rows / n_trained
    epochs = f"{n_epochs:.{1 if n_epochs >= 1 else 2}f} epochs of the other {n_trained:,}"
    steps = f"{recipe.steps:,} steps of {n_rows} documents are {epochs}"
    course = f"{recipe.minutes:g} minutes of steps of {n_rows} documents" if recipe.minutes else steps
    return (
        f"{len(batches.documents):,} documents with {n_tokens:,} tokens in all, {len(batches.held_out_documents)} held "
        f"out; {course}"
    )


def sizes_of(args: argparse.Namespace, kind: type[Sizes], flag: str, *, chosen: bool) -> Sizes | None:
    """Return the sizes of a kind of draft; None if it is not chosen.

    Raises:
        ValueError: the kind is not chosen with `flag`, but one of its sizes is given.
    """
    names = [field.name for field in fields(kind)]
    given = {name: vars(args)[name] for name in names if vars(args)[name] is not None}
    if given and not chosen:
        raise ValueError(f"{option(next(iter(given)))} has an effect only with {flag}; add {flag}, or drop it")
    return kind(**given) if chosen else None


def recipe_of(args: argparse.Namespace) -> TrainRecipe:
    """Return the training's settings, or raise ValueError if it has two limits."""
    if args.steps and args.minutes:
        raise ValueError(f"--steps {args.steps} and --minutes {args.minutes:g} both end the training; drop one of them")
    return TrainRecipe(
        steps=args.steps or STEPS,
        learning_rate=args.learning_rate,
        warmup_steps=args.warmup_steps,
        save_every=args.save_every,
        report_every=args.report_every,
        minutes=args.minutes,
        save_seconds=args.save_seconds,
    )


def run_prompts(args: argparse.Namespace) -> None:
    tokenizer = AutoTokenizer.from_pretrained(args.target)
    folders = args.folders or [Path(sysconfig.get_paths()["stdlib"])]
    if empty := [folder for folder in folders if not any(folder.rglob("*.py"))]:
        raise ValueError(f"--folders {empty[0]} holds no Python file; give the folder of a package")
    options = {"turns": args.turns, "n_tasks": args.tasks, "seed": args.seed}
    n = prompts.write_prompts(source_of(args), tokenizer, folders, args.out, **options)
    print(f"{n:,} prompts in {args.out}")


def run_answers(args: argparse.Namespace) -> None:
    sampling, asked = answers.Sampling(args.temperature, args.max_tokens, args.seed), answers.read_prompts(args.prompts)
    n = answers.write_answers(source_of(args), asked, args.out, sampling)
    print(f"{n:,} answers written to {args.out}")


def source_of(args: argparse.Namespace) -> answers.Source:
    """Return the source of answers: the server of --server, else the target of --target, loaded into this process.

    Raises:
        ValueError: neither is given, or torch has no such --device.
    """
    if args.server:
        from sglang_dflash.train.from_server import ServerSource  # needs openai

        return ServerSource(args.server, args.at_once, api_key=args.api_key)
    if not args.target:
        raise ValueError(
            "found neither --server nor --target; give --server URL, or --target PATH to run it in this process"
        )
    return ModelSource.load(args.target, args.at_once, default_device(args.device))


def default_device(asked: str | None) -> str:
    """Return the asked device, or by default a GPU if there is one. Raises ValueError if torch has no such device."""
    try:
        torch.device(asked or "cpu")
    except RuntimeError:
        raise ValueError(f"--device {asked} is no device of torch; give cpu, cuda or cuda:N") from None
    if asked and asked.startswith("cuda") and not torch.cuda.is_available():
        raise ValueError(f"--device {asked}: torch finds no GPU; drop --device to use the CPU")
    if asked and asked.startswith("cuda:") and torch.device(asked).index >= torch.cuda.device_count():
        raise ValueError(f"--device {asked}: torch finds {torch.cuda.device_count()} GPUs, counted from 0; give less")
    return asked or ("cuda" if torch.cuda.is_available() else "cpu")


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
        if args.target_steps:
            raise ValueError("--dflash2 trains no target; drop --target-steps")
        if not (args.out / "target").is_dir():
            raise ValueError(f"--out {args.out} has no target/; train it first, without --dflash2")
        make_draft(args.out, args.kind, seed=args.seed, recipe=draft_recipe, second=True)
    else:
        make_pair(args.out, args.kind, seed=args.seed, target_recipe=target_recipe, draft_recipe=draft_recipe)
    for row in measure(*load_pair(args.out, second=args.dflash2), make_tokenizer()):
        print(f"{row.task:16} acceptance length {row.mean_committed:6.2f} over {row.n_steps} steps")


RUNS = {
    "draft": run_draft,
    "prompts": run_prompts,
    "answers": run_answers,
    "chats": run_chats,
    "tiny": run_tiny,
}
