"""Training of the tiny pairs from random weights: a tokenizer, a target and its draft.

The target is a hybrid like Qwen3.5 or dense like Qwen3. A pair trains on one CPU core in about an hour and takes a few
megabytes in the package. Tests and the demo use the pairs, because targets accept their drafts, as in real pairs.
"""

import json
import math
from pathlib import Path
from random import Random
from typing import Any, Literal, NamedTuple

import torch
import torch.nn.functional as F
from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers, trainers
from torch import nn
from transformers import (
    AutoModelForCausalLM,
    PreTrainedModel,
    PreTrainedTokenizerFast,
    Qwen3_5ForCausalLM,
    Qwen3_5TextConfig,
    Qwen3Config,
    Qwen3ForCausalLM,
)

from sglang_dflash.pairs.tiny import corpus
from sglang_dflash.reference.torch import DraftModel
from sglang_dflash.reference.torch.generate import Options, spec_steps
from sglang_dflash.train.draft import Data, Second, Settings, draft_config_for, train_draft
from sglang_dflash.train.loop import Report, TrainRecipe, train
from sglang_dflash.train.text import tokens_of
from sglang_dflash.train.tokens import Rows, Tokens, packed, stacked

Kind = Literal["hybrid", "dense"]

VOCAB_SIZE = 1024
PAD, START, END, MASK = range(4)  # ids of SPECIAL_TOKENS
SPECIAL_TOKENS = ["<|endoftext|>", "<|im_start|>", "<|im_end|>", "<|MASK|>"]  # only the draft uses the last
CHAT_TEMPLATE = (
    "{% for message in messages %}<|im_start|>{{ message['role'] }}\n{{ message['content'] }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
# Pre-tokenizer: words with the space before them, single digits, punctuation, line ends, spaces.
PIECES = r" ?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+|\n+|\s+(?!\S)|\s+"

CONTEXT_LENGTH = 4096
PROMPT_WEIGHT = 0.1  # weight of a prompt token's loss; a response token's loss has weight 1
SHORT, LONG = (4, 256), (1, 1024)  # rows of a batch, and predicted tokens per row; a row has one token more
LONG_EVERY = 4  # every 4th batch is one long row

RECIPES: dict[Kind, TrainRecipe] = {
    "hybrid": TrainRecipe(steps=3000, learning_rate=3e-3, warmup_steps=100, more_cycles=((1200, 2e-3),)),
    "dense": TrainRecipe(steps=1500, learning_rate=3e-3, warmup_steps=100),
}


def make_tokenizer() -> PreTrainedTokenizerFast:
    """Train byte-level BPE on the corpus, deterministically."""
    tokenizer = Tokenizer(models.BPE())
    split = pre_tokenizers.Split(Regex(PIECES), behavior="isolated")
    to_bytes = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence([split, to_bytes])
    tokenizer.decoder = decoders.ByteLevel()
    random = Random(0)
    exchanges = (corpus.draw(random) for _ in range(20_000))
    texts = (text for _, prompt, answer in exchanges for text in (f"user\n{prompt}", f"assistant\n{answer}"))
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(
        vocab_size=VOCAB_SIZE, special_tokens=SPECIAL_TOKENS, initial_alphabet=alphabet, show_progress=False
    )
    tokenizer.train_from_iterator(texts, trainer)
    pad, _, end, mask = SPECIAL_TOKENS
    fast = PreTrainedTokenizerFast(tokenizer_object=tokenizer, pad_token=pad, eos_token=end, mask_token=mask)
    fast.chat_template = CHAT_TEMPLATE
    return fast


def chat_tokens(exchange: corpus.Exchange, tokenizer: PreTrainedTokenizerFast) -> Tokens:
    """Tokenize one exchange as the chat template renders it; the response ends with `<|im_end|>`."""
    asked = f"<|im_start|>user\n{exchange.prompt}<|im_end|>\n<|im_start|>assistant\n"
    return tokens_of([(asked, False), (f"{exchange.answer}<|im_end|>", True), ("\n", False)], tokenizer)


def chat_rows(tokenizer: PreTrainedTokenizerFast, seed: str, shape: tuple[int, int], *, held_out: bool = False) -> Rows:
    """Return packed exchanges; `shape`: number of rows, and tokens per row. Equal arguments give equal rows."""
    random = Random(seed)
    n_rows, length = shape
    endless = (chat_tokens(corpus.draw(random, held_out=held_out), tokenizer) for _ in iter(int, 1))
    rows = packed(endless, length)
    return stacked([next(rows) for _ in range(n_rows)])


def rows_at(tokenizer: PreTrainedTokenizerFast, seed: int, step: int) -> Rows:
    """Return the training batch of a step. Every `LONG_EVERY`-th batch has a long row, to train long contexts."""
    n_rows, length = LONG if step % LONG_EVERY == LONG_EVERY - 1 else SHORT
    return chat_rows(tokenizer, f"{seed}/{step}", (n_rows, length + 1))


def make_target(kind: Kind) -> PreTrainedModel:
    """Return an initialised fp32 target of 1.4 million (hybrid) or 1.2 million (dense) parameters."""
    common: dict[str, Any] = {
        "vocab_size": VOCAB_SIZE, "hidden_size": 128, "intermediate_size": 384, "num_hidden_layers": 4,
        "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 64, "max_position_embeddings": CONTEXT_LENGTH,
        "tie_word_embeddings": False, "eos_token_id": END, "pad_token_id": PAD, "bos_token_id": None,
    }  # fmt: skip
    rope = {"rope_type": "default", "rope_theta": 10_000.0}
    if kind == "dense":
        return Qwen3ForCausalLM(Qwen3Config(**common, rope_parameters=rope))
    mrope = {"partial_rotary_factor": 0.25, "mrope_section": [3, 3, 2], "mrope_interleaved": True}
    config = Qwen3_5TextConfig(
        **common, rope_parameters=rope | mrope,
        linear_key_head_dim=64, linear_value_head_dim=64, linear_num_key_heads=2, linear_num_value_heads=4,
    )  # fmt: skip
    target = Qwen3_5ForCausalLM(config)
    for layer in target.model.layers:
        if layer.block_type == "linear_attention":
            give_memory(layer.linear_attn)
    return target


def give_memory(gated_delta_net: nn.Module) -> None:
    """Initialise the gates so that recurrent states decay over 10 to 1,000 tokens.

    With Transformers' initial values the states decay within a token.
    """
    parameters = dict(gated_delta_net.named_parameters())
    time_step = torch.exp(torch.empty_like(parameters["dt_bias"]).uniform_(math.log(1e-3), math.log(1e-1)))
    inverse_softplus = time_step + torch.log(-torch.expm1(-time_step))
    parameters["dt_bias"].data.copy_(inverse_softplus)
    parameters["A_log"].data.zero_()


def token_losses(target: PreTrainedModel, rows: Rows) -> tuple[torch.Tensor, torch.Tensor]:
    """Return, for every token but the first, its cross entropy and whether it is the target's argmax: [R, L-1] each."""
    logits_RLV = target(input_ids=rows.ids_RL[:, :-1]).logits
    next_RL = rows.ids_RL[:, 1:]
    return F.cross_entropy(logits_RLV.mT, next_RL, reduction="none"), logits_RLV.argmax(-1) == next_RL


def train_target(kind: Kind, out: Path, recipe: TrainRecipe, seed: int = 0) -> None:
    """Train a target, resuming from a checkpoint in `out`, and save it there in bf16 with its tokenizer."""
    torch.manual_seed(seed)
    out.mkdir(parents=True, exist_ok=True)
    tokenizer, target = make_tokenizer(), make_target(kind)

    def loss_at(step: int) -> torch.Tensor:
        rows = rows_at(tokenizer, seed, step)
        loss_RL, _ = token_losses(target, rows)
        weight_RL = torch.where(rows.is_response_RL[:, 1:], 1.0, PROMPT_WEIGHT)
        return (loss_RL * weight_RL).sum() / weight_RL.sum()

    held_out = {
        length: chat_rows(tokenizer, "held out", (2 * n, length + 1), held_out=True) for n, length in (SHORT, LONG)
    }

    @torch.no_grad()
    def report() -> Report:
        target.eval()
        numbers: Report = {}
        for length, rows in held_out.items():
            loss_RL, right_RL = token_losses(target, rows)
            scored_RL = rows.is_response_RL[:, 1:]
            numbers[f"held_out_loss_{length}"] = loss_RL[scored_RL].mean().item()
            numbers[f"top_1_{length}"] = right_RL[scored_RL].float().mean().item()
        return numbers

    train(target, loss_at, recipe, folder=out, name=f"{kind} target", report=report, facts={"seed": seed})
    save_target(target, tokenizer, out)


def save_target(target: PreTrainedModel, tokenizer: PreTrainedTokenizerFast, out: Path) -> None:
    nn.Module.to(target, torch.bfloat16)
    target.save_pretrained(out)
    tokenizer.save_pretrained(out)
    config_path = out / "config.json"
    config = json.loads(config_path.read_text())
    if config["model_type"] == "qwen3_5_text":
        # SGLang reads the layer pattern from this field, which Transformers does not write.
        config["full_attention_interval"] = config["layer_types"].index("full_attention") + 1
    config_path.write_text(json.dumps(config, indent=2) + "\n")


DRAFT_RECIPES: dict[Kind, TrainRecipe] = {
    "hybrid": TrainRecipe(steps=1500, learning_rate=4e-3, warmup_steps=100, more_cycles=((800, 3e-3),)),
    "dense": TrainRecipe(steps=800, learning_rate=4e-3, warmup_steps=100),
}
BLOCK_SIZE = 16
TARGET_LAYER_IDS = (0, 1, 2)  # all but the last of four
N_DRAFT_LAYERS = 2
SECOND = Second(selector_rank=32, selector_top_k=8)


class TaskAcceptance(NamedTuple):
    """Acceptance length of one task, or of all tasks together."""

    task: str
    mean_committed: float
    n_steps: int


def make_pair(
    out: Path,
    kind: Kind,
    *,
    seed: int = 0,
    target_recipe: TrainRecipe | None = None,
    draft_recipe: TrainRecipe | None = None,
) -> None:
    """Train `out`/target and `out`/draft, resuming from checkpoints there.

    If a recipe is None, the recipe of the shipped pair of this kind is used.
    """
    train_target(kind, out / "target", target_recipe or RECIPES[kind], seed)
    make_draft(out, kind, seed=seed, recipe=draft_recipe)


def make_draft(
    out: Path, kind: Kind, *, seed: int = 0, recipe: TrainRecipe | None = None, second: bool = False
) -> None:
    """Train a draft for `out`/target: `out`/draft, or with `second` the DFlash 2 draft `out`/draft2.

    Both drafts of a target are trained on the same text, and by default for the same number of steps.
    """
    # The draft learns from the saved weights. They are loaded in fp32, so that labels are exactly the target's choices.
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
    settings = Settings(seed=seed, eval_tokens=32)
    train_draft(target, config, data, recipe, out=folder, dtype=torch.bfloat16, settings=settings)


def draft_folder(*, second: bool) -> str:
    """Return the folder name of the target's DFlash draft; `second`: that of its DFlash 2 draft."""
    return "draft2" if second else "draft"


def load_pair(folder: Path, *, second: bool = False) -> tuple[DraftModel, PreTrainedModel]:
    """Load the draft and the target in `folder`, in fp32; `second`: the DFlash 2 draft."""
    target = AutoModelForCausalLM.from_pretrained(folder / "target", dtype=torch.float32)
    return DraftModel.from_pretrained(folder / draft_folder(second=second), dtype=torch.float32), target


def held_out_prompts(tokenizer: PreTrainedTokenizerFast, n_per_task: int) -> list[tuple[str, torch.Tensor]]:
    """Return fixed (task, prompt) pairs, `n_per_task` for every task; a prompt is int64 [1, tokens]."""
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
) -> list[TaskAcceptance]:
    """Measure greedy acceptance on held-out prompts, per task and then over all tasks.

    The step that reads the prompt has no drafts and is not counted. Without any other step, the mean is nan.
    """
    options = Options(max_new_tokens=max_new_tokens, stop_token_ids=(END,), block_size=block_size)
    committed: dict[str, list[int]] = {task: [] for task in corpus.TASKS}
    for task, input_ids in held_out_prompts(tokenizer, n_per_task):
        _, *steps = spec_steps(draft, target, input_ids, options)
        committed[task] += [len(step.committed) for step in steps]
    committed["all"] = [n for counts in committed.values() for n in counts]
    means = {task: sum(counts) / len(counts) if counts else math.nan for task, counts in committed.items()}
    return [TaskAcceptance(task, means[task], len(counts)) for task, counts in committed.items()]
