"""Training text from a target that Transformers runs in this process, without a server."""

from collections.abc import Callable, Iterator, Sequence
from itertools import groupby
from random import Random
from typing import NamedTuple

import torch
from torch.nn.utils.rnn import pad_sequence
from transformers import AutoModelForCausalLM, AutoTokenizer, PreTrainedModel, PreTrainedTokenizerBase

from sglang_dflash.model.target import stop_token_ids
from sglang_dflash.train.answers import Line, Sampling, Write
from sglang_dflash.train.chat import rendered_prompt


class Continuation(NamedTuple):
    """Continuation of a prompt."""

    prompt: int  # index of the prompt
    ids: list[int]  # without the stop token
    stopped: bool  # whether a stop token ended it, rather than the limit


class ModelSource:
    """Target in this process, with batches of at most `at_once` prompts. See `answers.Source`."""

    def __init__(self, target: PreTrainedModel, tokenizer: PreTrainedTokenizerBase, at_once: int) -> None:
        self.target = target
        self.tokenizer = tokenizer
        self.at_once = at_once
        self.stop_ids = {*stop_token_ids(target), tokenizer.eos_token_id} - {None}

    @classmethod
    def load(cls, path: str, at_once: int, device: str) -> "ModelSource":
        """Load a target and its tokenizer from a folder or by hub name, in the dtype of its files."""
        target = AutoModelForCausalLM.from_pretrained(path, dtype="auto")
        torch.nn.Module.to(target, device)
        return cls(target.eval(), AutoTokenizer.from_pretrained(path), at_once)

    def answer(self, prompts: Sequence[tuple[int, Line]], sampling: Sampling, write: Write) -> None:
        ids = []
        for number, line in prompts:
            try:
                ids.append(self.ids_of(line))
            except ValueError as error:
                raise ValueError(f"prompt {number + 1}: {error}") from error
        temperatures = [sampling.temperature_of(number) for number, _ in prompts]
        for row in self.generate(ids, temperatures, sampling.max_tokens, self.stop_ids, sampling.seed):
            line, text = prompts[row.prompt][1], str(self.tokenizer.decode(row.ids, skip_special_tokens=True))
            answer = {"role": "assistant", "content": text}
            write(line | {"messages": [*line["messages"], answer]} if text.strip() else None)

    def user_turns(self, starts: Sequence[tuple[str, str]], stop: str, seed: int, write: Callable[[str], None]) -> None:
        stop_id, *more = self.tokenizer.encode(stop, add_special_tokens=False)
        if more:
            raise ValueError(
                f"a user turn ends with {stop!r}, which is no single token; serve the target and give --server"
            )
        ids = [self.tokenizer.encode(before + opening, add_special_tokens=False) for before, opening in starts]
        rows = self.generate(ids, [0.9] * len(ids), 120, self.stop_ids | {stop_id}, seed)
        for row in rows:
            if row.stopped:
                write(starts[row.prompt][1] + str(self.tokenizer.decode(row.ids)))

    def ids_of(self, line: Line) -> list[int]:
        """Return the token ids of a conversation and of the header of its answer.

        Raises:
            ValueError: the chat template rejects the line, or the answer needs a server's parsers, because the line has
                tools or the template contains "think".
        """
        if line.get("tools") or "think" in str(self.tokenizer.chat_template):
            what = (
                "tool calls (the line has tools)" if line.get("tools") else "reasoning (the chat template has 'think')"
            )
            raise ValueError(
                f"the answer may have {what}, which a server's parsers split off; serve the target with "
                "--reasoning-parser or --tool-call-parser, and give --server"
            )
        return self.tokenizer.encode(rendered_prompt(line, self.tokenizer), add_special_tokens=False)

    @torch.inference_mode()
    def generate(
        self, prompts: Sequence[list[int]], temperatures: Sequence[float], limit: int, stop_ids: set[int], seed: int
    ) -> Iterator[Continuation]:
        """Yield a continuation of at most `limit` tokens for each prompt. Batches are in random order.

        A batch has prompts of one temperature and of similar length, padded on the left.
        """
        order = sorted(range(len(prompts)), key=lambda i: (temperatures[i], len(prompts[i])))
        batches: list[list[int]] = []
        for _, same in groupby(order, key=lambda i: temperatures[i]):
            rows = list(same)
            batches += [rows[first : first + self.at_once] for first in range(0, len(rows), self.at_once)]
        Random(seed).shuffle(batches)
        torch.manual_seed(seed)
        pad_id = min(stop_ids, default=0)
        for batch in batches:
            temperature, tokens = temperatures[batch[0]], [torch.tensor(prompts[i]) for i in batch]
            ids_BL = pad_sequence(tokens, batch_first=True, padding_value=pad_id, padding_side="left")
            mask_BL = pad_sequence([torch.ones_like(one) for one in tokens], batch_first=True, padding_side="left")
            sampled = {"temperature": temperature, "top_k": 0, "top_p": 1.0} if temperature else {}
            found = self.target.generate(  # type: ignore[operator]  # a method that transformers mixes in
                ids_BL.to(self.target.device),
                attention_mask=mask_BL.to(self.target.device),
                max_new_tokens=limit,
                eos_token_id=sorted(stop_ids) or None,
                pad_token_id=pad_id,
                do_sample=temperature > 0,
                **sampled,
            )
            for i, ids in zip(batch, found[:, ids_BL.shape[1] :].tolist(), strict=True):
                n = next((n for n, token in enumerate(ids) if token in stop_ids), None)
                yield Continuation(i, ids[:n], n is not None)
