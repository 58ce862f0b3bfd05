"""Arms without a server: a Transformers model alone, and with our `spec_generate`, one request at a time."""

import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import psutil
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer, DynamicCache, PreTrainedModel, PreTrainedTokenizerBase

from sglang_dflash.bench.arms import OFF, OURS
from sglang_dflash.bench.chat import Prompt, Sampling, TokenIds
from sglang_dflash.bench.engine import Processes
from sglang_dflash.bench.errors import ServerError
from sglang_dflash.bench.measure import NAN, Answer, Steps
from sglang_dflash.model import DraftModel, Step
from sglang_dflash.model.generate import Options, choose, spec_steps
from sglang_dflash.model.target import check_pair, stop_token_ids


@dataclass(frozen=True)
class Models:
    target: PreTrainedModel
    draft: DraftModel
    tokenizer: PreTrainedTokenizerBase

    @property
    def stop_token_ids(self) -> tuple[int, ...]:
        return stop_token_ids(self.target) or (self.tokenizer.eos_token_id,)


def load(target: str, draft: str) -> Models:
    """On the GPU in the checkpoint's dtype; without one in fp32, where answers can be compared exactly.

    Raises:
        ServerError: one of them cannot be loaded, or they do not belong together.
    """
    on_gpu = torch.cuda.is_available()
    try:
        model: Any = AutoModelForCausalLM.from_pretrained(target, dtype="auto" if on_gpu else torch.float32)
        model = model.to("cuda" if on_gpu else "cpu").eval()
        drafter = DraftModel.from_pretrained(draft, dtype=model.dtype, device=model.device)
        check_pair(drafter.config, model)
        return Models(model, drafter, AutoTokenizer.from_pretrained(target))
    except (OSError, ValueError) as error:
        raise ServerError(f"--model {target}, --draft-model {draft}: {error}") from error


@torch.inference_mode()
def plain_steps(target: PreTrainedModel, input_ids: torch.Tensor, options: Options) -> Iterator[Step]:
    """One token a step: what `spec_steps` is compared with."""
    cache, unread = DynamicCache(config=target.config), input_ids
    for _ in range(options.max_new_tokens):
        logits_1SV = target(input_ids=unread, past_key_values=cache, use_cache=True, logits_to_keep=1).logits
        token = choose(logits_1SV[0, -1:], options)
        step = Step(token.tolist(), 0)
        yield step
        if step.committed[0] in options.stop_token_ids:
            return
        unread = token[None]


class TorchEngine:
    """`off` or `ours`, in this process."""

    kind = "transformers"

    def __init__(self, name: str, models: Models) -> None:
        assert name in (OFF, OURS), name
        self.name, self.models = name, models
        self.one_at_a_time = threading.Lock()

    @property
    def processes(self) -> Processes:
        return list[psutil.Process]  # none but this one

    @contextmanager
    def running(self) -> Iterator[None]:
        yield

    def flush(self) -> bool:
        return True  # nothing is kept from one request to the next

    def ask(self, prompt: Prompt, sampling: Sampling, *, stream: bool) -> Callable[[], Answer]:
        with self.one_at_a_time:
            answer = self.answer(self.token_ids(prompt, sampling), sampling)
        return lambda: answer

    def likeliest(self, context: Sequence[int]) -> Sequence[tuple[float, int]]:
        return ()

    def token_ids(self, prompt: Prompt, sampling: Sampling) -> Sequence[int]:
        if isinstance(prompt, TokenIds):
            return prompt
        tokenizer: Any = self.models.tokenizer
        return tokenizer.apply_chat_template(
            list(prompt), add_generation_prompt=True, enable_thinking=sampling.thinking, return_dict=False
        )

    def answer(self, ids: Sequence[int], sampling: Sampling) -> Answer:
        models = self.models
        options = Options(
            max_new_tokens=sampling.max_new_tokens,
            temperature=sampling.temperature,
            stop_token_ids=() if sampling.ignore_eos else models.stop_token_ids,
        )
        asked, input_ids = time.perf_counter(), torch.tensor([list(ids)], device=models.target.device)
        if self.name == OURS:
            running = spec_steps(models.draft, models.target, input_ids, options)
        else:
            running = plain_steps(models.target, input_ids, options)
        timed = [(step, time.perf_counter()) for step in running]
        token_ids = tuple(token for step, _ in timed for token in step.committed)
        accepted = [step.n_accepted for step, _ in timed[1:]]  # the first step is the prompt's
        first, last = timed[0][1], timed[-1][1]
        return Answer(
            n_tokens=len(token_ids),
            token_ids=token_ids,
            text=str(models.tokenizer.decode(list(token_ids), skip_special_tokens=True)),
            steps=Steps(
                len(accepted),
                sum(accepted),
                tuple(sum(n >= position for n in accepted) for position in range(1, max(accepted, default=0) + 1)),
            ),
            n_prompt_tokens=len(ids),
            ttft_s=first - asked,
            tpot_s=(last - first) / (len(token_ids) - 1) if len(token_ids) > 1 else NAN,
        )

    def counted(self) -> Steps | None:
        return None

    def widths(self) -> dict[str, int] | None:
        return None

    def describe(self) -> dict[str, Any]:
        target = self.models.target
        about = {"kind": self.kind, "device": str(target.device), "dtype": str(target.dtype).removeprefix("torch.")}
        return about | ({"block_size": self.models.draft.config.block_size} if self.name == OURS else {})
