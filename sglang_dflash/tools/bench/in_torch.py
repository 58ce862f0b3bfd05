"""Arms without a server: a Transformers model alone, and the same model with a draft; one request at a time."""

import threading
import time
from collections.abc import Callable, Sequence
from typing import Any

import psutil
import torch

from sglang_dflash.pairs.servers.arms import OFF, OURS
from sglang_dflash.pairs.servers.errors import ServerError
from sglang_dflash.reference.torch.generate import Options, spec_steps
from sglang_dflash.reference.torch.plain import Models, plain_steps
from sglang_dflash.tools.bench.engine import Engine, Processes, Prompt, Sampling, TokenIds
from sglang_dflash.tools.bench.measure import NAN, Completion, Steps


class TorchEngine(Engine):
    """Arm `off` or `ours`, computed in this process."""

    kind = "transformers"

    def __init__(self, name: str, models: Models) -> None:
        assert name in (OFF, OURS), name
        self.name, self.models = name, models
        self.one_at_a_time = threading.Lock()

    @property
    def processes(self) -> Processes:
        return list[psutil.Process]  # a function that returns []: this process is counted without it

    def flush(self) -> bool:
        return True  # nothing is kept between requests

    def ask(self, prompt: Prompt, sampling: Sampling, *, stream: bool) -> Callable[[], Completion]:
        with self.one_at_a_time:
            answer = self.answer(self.token_ids(prompt, sampling), sampling)
        return lambda: answer

    def token_ids(self, prompt: Prompt, sampling: Sampling) -> Sequence[int]:
        if isinstance(prompt, TokenIds):
            return prompt
        tokenizer: Any = self.models.tokenizer
        if tokenizer.chat_template is None:
            raise ServerError('--model has no chat template; give a chat model, or --data with "input_ids"')
        return tokenizer.apply_chat_template(
            list(prompt), add_generation_prompt=True, enable_thinking=sampling.thinking, return_dict=False
        )

    def answer(self, ids: Sequence[int], sampling: Sampling) -> Completion:
        models = self.models
        options = Options(
            max_new_tokens=sampling.max_new_tokens,
            temperature=sampling.temperature,
            stop_token_ids=() if sampling.ignore_eos else models.stop_token_ids,
        )
        asked, input_ids = time.perf_counter(), torch.tensor([list(ids)], device=models.target.device)
        speculate = spec_steps(models.draft, models.target, input_ids, options)
        steps = speculate if self.name == OURS else plain_steps(models.target, input_ids, options)
        timed = [(step, time.perf_counter()) for step in steps]
        token_ids = tuple(token for step, _ in timed for token in step.committed)
        accepted = [step.n_accepted for step, _ in timed[1:]]  # the first step reads the prompt and has no drafts
        reached_D = tuple(sum(n >= place for n in accepted) for place in range(1, max(accepted, default=0) + 1))
        first, last = timed[0][1], timed[-1][1]
        return Completion(
            n_tokens=len(token_ids),
            token_ids=token_ids,
            text=str(models.tokenizer.decode(list(token_ids), skip_special_tokens=True)),
            steps=Steps(len(accepted), sum(accepted), reached_D),
            n_prompt_tokens=len(ids),
            ttft_s=first - asked,
            tpot_s=(last - first) / (len(token_ids) - 1) if len(token_ids) > 1 else NAN,
        )

    def describe(self) -> dict[str, Any]:
        target = self.models.target
        about = {"kind": self.kind, "device": str(target.device), "dtype": str(target.dtype).removeprefix("torch.")}
        return about | ({"block_size": self.models.draft.config.block_size} if self.name == OURS else {})
