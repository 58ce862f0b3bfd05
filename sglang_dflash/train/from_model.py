"""Training text from a target that Transformers runs in this process, without a server."""

from collections.abc import Callable, Iterator, Sequence
from random import Random

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer, PreTrainedModel, PreTrainedTokenizerBase

from sglang_dflash.reference.torch.target import stop_token_ids
from sglang_dflash.train.answers import Line, Sampling, Write
from sglang_dflash.train.chat import rendered_prompt
from sglang_dflash.train.writer import Asked, Continuation, writer_for


class ModelSource:
    """Target in this process, with batches of at most `at_once` prompts. See `answers.Source`."""

    def __init__(self, target: PreTrainedModel, tokenizer: PreTrainedTokenizerBase, at_once: int) -> None:
        self.target = target
        self.tokenizer = tokenizer
        self.writer = writer_for(target, at_once)
        self.stop_ids = {*stop_token_ids(target), tokenizer.eos_token_id} - {None}

    @classmethod
    def load(cls, path: str, at_once: int, device: str) -> "ModelSource":
        """Load a target and its tokenizer from a folder or by hub name, in the dtype of its files."""
        target = AutoModelForCausalLM.from_pretrained(path, dtype="auto")
        torch.nn.Module.to(target, device)
        source = cls(target.eval(), AutoTokenizer.from_pretrained(path), at_once)
        print(f"the target writes with {source.writer.name}")
        return source

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

    def generate(
        self, prompts: Sequence[list[int]], temperatures: Sequence[float], limit: int, stop_ids: set[int], seed: int
    ) -> Iterator[Continuation]:
        """Yield a continuation of at most `limit` tokens for each prompt. Batches are in random order."""
        torch.manual_seed(seed)
        yield from self.writer.write(Asked(prompts, temperatures, limit, tuple(sorted(stop_ids))), Random(seed))
