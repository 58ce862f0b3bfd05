"""The whole tiny pair from nothing: tokenizer, corpus, target, draft, and how well the draft guesses.

A real target and a real draft in a few megabytes, for tests and demonstrations that need real acceptance.
"""

from pathlib import Path
from random import Random
from typing import NamedTuple

import torch
from transformers import AutoModelForCausalLM, PreTrainedModel, PreTrainedTokenizerFast

from sglang_dflash.model import DraftModel
from sglang_dflash.model.generate import Options, spec_steps
from sglang_dflash.tiny import corpus
from sglang_dflash.train.draft import Data, Second, Settings, draft_config_for, train_draft
from sglang_dflash.train.loop import Recipe
from sglang_dflash.train.tiny_target import END, MASK, RECIPES, Kind, chat_rows, make_tokenizer, rows_at, train_target

DRAFT_RECIPES: dict[Kind, Recipe] = {
    "hybrid": Recipe(steps=1500, learning_rate=4e-3, warmup_steps=100, more_cycles=((800, 3e-3),)),
    "dense": Recipe(steps=800, learning_rate=4e-3, warmup_steps=100),
}
BLOCK_SIZE = 16
TARGET_LAYER_IDS = (0, 1, 2)  # all but the last of four
N_DRAFT_LAYERS = 2
SECOND = Second(selector_rank=32, selector_top_k=8)


class Acceptance(NamedTuple):
    """Committed tokens per verify step, of one task or of all."""

    task: str
    mean_committed: float
    n_steps: int


def make_pair(
    out: Path,
    kind: Kind,
    *,
    seed: int = 0,
    target_recipe: Recipe | None = None,
    draft_recipe: Recipe | None = None,
) -> None:
    """Train `out`/target and `out`/draft, resuming what is there.

    Recipes: None takes those of the shipped pair of this kind.
    """
    train_target(kind, out / "target", target_recipe or RECIPES[kind], seed)
    make_draft(out, kind, seed=seed, recipe=draft_recipe)


def make_draft(out: Path, kind: Kind, *, seed: int = 0, recipe: Recipe | None = None, second: bool = False) -> None:
    """Train a draft for `out`/target: `out`/draft, or with `second` the DFlash 2 draft `out`/draft2. Both read the same
    text, and by default for as many steps."""
    # The draft learns from the weights as they are shipped, in fp32 so that it meets the target's exact choices.
    target = AutoModelForCausalLM.from_pretrained(out / "target", dtype=torch.float32)
    tokenizer = make_tokenizer()
    config = draft_config_for(
        target,
        n_layers=N_DRAFT_LAYERS,
        block_size=BLOCK_SIZE,
        mask_token_id=MASK,
        target_layer_ids=TARGET_LAYER_IDS,
        second=SECOND if second else None,
    )
    folder = out / draft_folder(second=second)
    data = Data(
        rows_at=lambda step: rows_at(tokenizer, seed + 1, step),
        held_out=[chat_rows(tokenizer, "held out", (8, 256), held_out=True)],
        prompts=[prompt for _, prompt in held_out_prompts(tokenizer, 1)[::3]],
        facts={},
    )
    recipe = recipe or DRAFT_RECIPES[kind]
    draft = train_draft(target, config, data, recipe, out=folder, settings=Settings(seed=seed, eval_tokens=32))
    draft.to(torch.bfloat16).save_pretrained(folder)


def draft_folder(*, second: bool) -> str:
    """Of a pair's two drafts, which share the target."""
    return "draft2" if second else "draft"


def load_pair(folder: Path, *, second: bool = False) -> tuple[DraftModel, PreTrainedModel]:
    """Draft and target of `folder`, in fp32."""
    target = AutoModelForCausalLM.from_pretrained(folder / "target", dtype=torch.float32)
    return DraftModel.from_pretrained(folder / draft_folder(second=second), dtype=torch.float32), target


def held_out_prompts(tokenizer: PreTrainedTokenizerFast, n_per_task: int) -> list[tuple[str, torch.Tensor]]:
    """(task, prompt as int64 [1, tokens]) for every task in turn; the same prompts every time."""
    random, prompts = Random("prompts"), []
    for task in list(corpus.TASKS) * n_per_task:
        messages = [{"role": "user", "content": corpus.draw(random, held_out=True, task=task).prompt}]
        text = tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=True)
        prompts.append((task, torch.tensor([tokenizer.encode(text)])))
    return prompts


def measure(
    draft: DraftModel,
    target: PreTrainedModel,
    tokenizer: PreTrainedTokenizerFast,
    *,
    n_per_task: int = 4,
    max_new_tokens: int = 160,
    block_size: int | None = None,
) -> list[Acceptance]:
    """Greedy acceptance on held-out prompts, per task and last over all; the prompt's own step is not counted."""
    options = Options(max_new_tokens=max_new_tokens, stop_token_ids=(END,), block_size=block_size)
    committed: dict[str, list[int]] = {task: [] for task in corpus.TASKS}
    for task, input_ids in held_out_prompts(tokenizer, n_per_task):
        _, *steps = spec_steps(draft, target, input_ids, options)
        committed[task] += [len(step.committed) for step in steps]
    committed["all"] = [n for counts in committed.values() for n in counts]
    return [Acceptance(task, sum(counts) / len(counts), len(counts)) for task, counts in committed.items()]
