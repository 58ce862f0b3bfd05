"""Training text from a target that Transformers runs in this process, without a server."""

from collections.abc import Sequence

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer, PreTrainedModel, PreTrainedTokenizerBase

from sglang_dflash.model.target import stop_token_ids
from sglang_dflash.train.answers import Line, Sampling, Write
from sglang_dflash.train.chat import rendered_prompt
from sglang_dflash.train.generation import Prompt, generate, require_attention_only


class ModelSource:
    """Target in this process, with batches of `at_once` prompts. See `answers.Source`."""

    def __init__(self, target: PreTrainedModel, tokenizer: PreTrainedTokenizerBase, at_once: int) -> None:
        """Take the target.

        Raises:
            ValueError: the target has layers other than full attention.
        """
        require_attention_only(target)
        self.target = target
        self.tokenizer = tokenizer
        self.at_once = at_once
        self.stop_ids = {*stop_token_ids(target), tokenizer.eos_token_id}

    @classmethod
    def load(cls, path: str, at_once: int, device: str) -> "ModelSource":
        """Load a target and its tokenizer from a folder or by hub name, in the dtype of its files."""
        target = AutoModelForCausalLM.from_pretrained(path, dtype="auto")
        torch.nn.Module.to(target, device)
        return cls(target.eval(), AutoTokenizer.from_pretrained(path), at_once)

    def answer(self, prompts: Sequence[tuple[int, Line]], sampling: Sampling, write: Write) -> None:
        lines = [line for _, line in prompts]
        found = [Prompt(self.ids_of(line), sampling.temperature_of(number)) for number, line in prompts]
        for row in generate(
            self.target,
            found,
            stop_ids=self.stop_ids,
            limit=sampling.max_tokens,
            at_once=self.at_once,
            seed=sampling.seed,
        ):
            line, text = lines[row.prompt], self.tokenizer.decode(row.ids, skip_special_tokens=True)
            answer = {"role": "assistant", "content": text}
            write(line | {"messages": [*line["messages"], answer]} if text.strip() else None)

    def user_turns(self, starts: Sequence[tuple[str, str]], stop: str, seed: int) -> list[str]:
        stop_token, *more = self.tokenizer.encode(stop, add_special_tokens=False)
        if more:
            raise ValueError(
                f"a user turn ends with {stop!r}, which is no single token; serve the target, and give --server"
            )
        stop_ids = {*self.stop_ids, stop_token}
        prompts = [Prompt(self.tokenizer.encode(before + opening), 0.9) for before, opening in starts]
        return [
            starts[row.prompt][1] + self.tokenizer.decode(row.ids)
            for row in generate(self.target, prompts, stop_ids=stop_ids, limit=120, at_once=self.at_once, seed=seed)
            if row.stopped
        ]

    def ids_of(self, line: Line) -> list[int]:
        """Return the token ids of a conversation with the header of the answer.

        Raises:
            ValueError: the answer needs a server's parsers, because the line has tools or the target thinks.
        """
        if line.get("tools") or "think" in str(self.tokenizer.chat_template):
            raise ValueError(
                "tool calls and reasoning are split off by a server's parsers; serve the target, and give --server"
            )
        return self.tokenizer.encode(rendered_prompt(line, self.tokenizer), add_special_tokens=False)
