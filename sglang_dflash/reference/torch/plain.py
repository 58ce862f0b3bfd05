"""Target and draft in PyTorch, and generation with the target alone: the baseline for speculation."""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer, DynamicCache, PreTrainedModel, PreTrainedTokenizerBase

from sglang_dflash.reference.torch import DecodedStep, DraftModel
from sglang_dflash.reference.torch.generate import Options, choose
from sglang_dflash.reference.torch.target import check_pair, stop_token_ids


@dataclass(frozen=True)
class Models:
    """Target, draft and tokenizer in Transformers and PyTorch."""

    target: PreTrainedModel
    draft: DraftModel
    tokenizer: PreTrainedTokenizerBase

    @property
    def stop_token_ids(self) -> tuple[int, ...]:
        return stop_token_ids(self.target) or (self.tokenizer.eos_token_id,)


def load(target: str, draft: str) -> Models:
    """Load target, draft and tokenizer. Both models have the target checkpoint's dtype on a GPU, and fp32 on CPU.

    Raises:
        OSError: a checkpoint cannot be read.
        ValueError: the draft is invalid, or does not match the target.
    """
    on_gpu = torch.cuda.is_available()
    model: Any = AutoModelForCausalLM.from_pretrained(target, dtype="auto" if on_gpu else torch.float32)
    model = model.to("cuda" if on_gpu else "cpu").eval()
    drafter = DraftModel.from_pretrained(draft, dtype=model.dtype, device=model.device)
    check_pair(drafter.config, model)
    return Models(model, drafter, AutoTokenizer.from_pretrained(target))


@torch.inference_mode()
def plain_steps(target: PreTrainedModel, input_ids: torch.Tensor, options: Options) -> Iterator[DecodedStep]:
    """Generate with the target alone, one token per step: the baseline for `spec_steps`."""
    cache, unread = DynamicCache(config=target.config), input_ids
    for _ in range(options.max_new_tokens):
        logits_1SV = target(input_ids=unread, past_key_values=cache, use_cache=True, logits_to_keep=1).logits
        token = choose(logits_1SV[0, -1:], options)
        step = DecodedStep(token.tolist(), 0)
        yield step
        if step.committed[0] in options.stop_token_ids:
            return
        unread = token[None]
