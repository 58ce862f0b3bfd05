"""Training text from files: formats, response parts, and batches.

A `.txt` file is one long text, all of it a response. Every line of a `.jsonl` file is one of
    {"text": "..."}                           the whole text is a response
    {"prompt": "...", "response": "..."}      used verbatim
    {"messages": [{"role", "content"}, ...]}  rendered with the tokenizer's chat template; assistant turns are responses
A line with messages may also have "tools" and "chat_template_kwargs", as in a request to the server. Drafts are trained
on responses only.
"""

from collections import Counter
from collections.abc import Iterator
from functools import lru_cache
from itertools import compress
from pathlib import Path
from random import Random
from typing import Any

import torch
from transformers import PreTrainedTokenizerBase

from sglang_dflash.cli import read_text
from sglang_dflash.train import chat
from sglang_dflash.train.chat import Part, parsed, require_keys
from sglang_dflash.train.tokens import Rows, Tokens, stacked


def read_documents(path: Path, tokenizer: PreTrainedTokenizerBase, max_length: int) -> list[Tokens]:
    """Return the documents of a .txt or .jsonl file, split into pieces of at most `max_length` tokens.

    Pieces without two consecutive response tokens are left out, because they have nothing to predict.

    Raises:
        ValueError: the file has another suffix, a line cannot be used, or fewer than two pieces remain.
    """
    if path.suffix == ".txt":
        documents = [tokens_of([(read_text(path), True)], tokenizer)]
    elif path.suffix == ".jsonl":
        documents = [tokens_of(parts, tokenizer) for parts in _jsonl_parts(path, tokenizer)]
    else:
        raise ValueError(f"{path} is neither .txt nor .jsonl; convert it to one of them")
    pieces = [piece for document in documents for piece in _cut(document, max_length)]
    usable = list(filter(has_labels, pieces))
    cure = "give more text" if path.suffix == ".txt" else "add answers (`train answers` writes them)"
    require_usable(usable, path, max_length, cure)
    return usable


def has_labels(piece: Tokens) -> bool:
    """Return whether two response tokens follow each other, so that a draft can learn from the piece."""
    return any(a and b for a, b in zip(piece.is_response, piece.is_response[1:], strict=False))


def require_usable(usable: list[Tokens], path: Path, max_length: int, cure: str) -> None:
    """Check that at least two documents remain, one of them to hold out, or raise ValueError."""
    if not usable:
        raise ValueError(f"{path} has no response of two tokens within {max_length} tokens; {cure}")
    if len(usable) == 1:
        raise ValueError(
            f"{path} has one usable document (up to {max_length} tokens, with two response tokens in a row); give two "
            "or more, or lower --max-length"
        )


class Batches:
    """Batches of documents in an order that depends only on the seed. Some documents are held out for evaluation."""

    def __init__(self, documents: list[Tokens], *, n_rows: int, pad_id: int, seed: int) -> None:
        shuffled = Random(seed).sample(range(len(documents)), len(documents))
        n_held_out = max(1, min(32, len(documents) // 16))
        self.documents = documents
        self.held_out_documents, self.trained_documents = shuffled[:n_held_out], shuffled[n_held_out:]
        self.n_rows = n_rows
        self.pad_id = pad_id
        self.seed = seed
        self.order_of = lru_cache(maxsize=2)(self._order_of)  # a batch may have documents of two successive epochs

    def at(self, step: int) -> Rows:
        """Return the batch of a step. Each epoch has each training document once, in a new order."""
        first, n = step * self.n_rows, len(self.trained_documents)
        return self._rows([self.order_of(i // n)[i % n] for i in range(first, first + self.n_rows)])

    @property
    def held_out(self) -> list[Rows]:
        """Return the held-out documents, one per batch, so that any number of processes can share the batches."""
        return [self._rows([i]) for i in self.held_out_documents]

    def prompts(self, n: int) -> list[torch.Tensor]:
        """Return the prompts of at most `n` held-out documents, int64 [1, tokens] each."""
        return [torch.tensor([self.documents[i].prompt]) for i in self.held_out_documents[:n]]

    def most_frequent(self, n: int) -> torch.Tensor:
        """Return the `n` most frequent tokens of training responses, int64; all of them if fewer than `n` occur."""
        documents = (self.documents[i] for i in self.trained_documents)
        counts = Counter(token for document in documents for token in compress(*document))
        return torch.tensor([token for token, _ in counts.most_common(n)])

    def _order_of(self, epoch: int) -> list[int]:
        order = list(self.trained_documents)
        Random(f"{self.seed}/{epoch}").shuffle(order)
        return order

    def _rows(self, chosen: list[int]) -> Rows:
        rows = padded([self.documents[i] for i in chosen], self.pad_id)
        return rows._replace(document_R=torch.tensor(chosen))


def padded(documents: list[Tokens], pad_id: int) -> Rows:
    """Return rows as long as the longest document. Padding is at the end, where a causal target ignores it."""
    length = max(len(document.ids) for document in documents)
    return stacked(
        [
            Tokens(ids + [pad_id] * (length - len(ids)), is_response + [False] * (length - len(ids)))
            for ids, is_response in documents
        ]
    )


def _jsonl_parts(path: Path, tokenizer: PreTrainedTokenizerBase) -> Iterator[list[Part]]:
    for number, line in enumerate(read_text(path).split("\n"), start=1):
        if not line.strip():
            continue
        try:
            yield _parts(parsed(line), tokenizer)
        except ValueError as error:
            raise ValueError(f"{path}, line {number}: {error}") from error


def _parts(row: dict[str, Any], tokenizer: PreTrainedTokenizerBase) -> list[Part]:
    if not isinstance(row, dict) or not row.keys() & {"text", "response", "messages"}:
        raise ValueError(f'found {str(row)[:60]!r}; give {{"text"}}, {{"prompt", "response"}} or {{"messages"}}')
    if "text" in row:
        require_keys(row, ("text",), "a line with text")
        return [(_string(row, "text"), True)]
    if "response" in row:
        require_keys(row, ("prompt", "response"), "a line with a response")
        return [(_string(row, "prompt"), False), (_string(row, "response"), True)]
    return chat.parts(row, tokenizer)


def _string(row: dict[str, Any], name: str) -> str:
    if not isinstance(row.get(name), str):
        found = f"is {row[name]!r:.60}" if name in row else "is missing"
        raise ValueError(f"{name!r} {found}; it must be a string")
    return row[name]


def tokens_of(parts: list[Part], tokenizer: PreTrainedTokenizerBase) -> Tokens:
    """Tokenize parts one by one, and mark the tokens of responses."""
    ids: list[int] = []
    is_response: list[bool] = []
    for text, is_answer in parts:
        part = tokenizer.encode(text, add_special_tokens=False)
        ids += part
        is_response += [is_answer] * len(part)
    return Tokens(ids, is_response)


def _cut(document: Tokens, length: int) -> Iterator[Tokens]:
    for first in range(0, len(document.ids), length):
        yield Tokens(document.ids[first : first + length], document.is_response[first : first + length])
