"""Token rows to train on: which tokens, and which of them are the response.

Knows nothing of models, and of files only through its callers.
"""

from collections.abc import Iterable, Iterator
from typing import NamedTuple

import torch


class Tokens(NamedTuple):
    """One document: its tokens, and for each token whether the model is to say it (a response) or only reads it."""

    ids: list[int]
    is_response: list[bool]


class Rows(NamedTuple):
    """R rows of L tokens, the shape of a training batch."""

    ids_RL: torch.Tensor  # int64
    is_response_RL: torch.Tensor  # bool

    def to(self, device: torch.device) -> "Rows":
        return Rows(self.ids_RL.to(device), self.is_response_RL.to(device))


def packed(documents: Iterable[Tokens], length: int) -> Iterator[Tokens]:
    """Rows of `length` tokens, each of whole documents end to end; what the last one has too much is dropped.

    No row starts inside a document: an answer without its question teaches nothing.
    """
    ids: list[int] = []
    is_response: list[bool] = []
    for document in documents:
        ids += document.ids
        is_response += document.is_response
        if len(ids) >= length:
            yield Tokens(ids[:length], is_response[:length])
            ids, is_response = [], []


def stacked(rows: list[Tokens]) -> Rows:
    """Rows of one length as tensors."""
    return Rows(torch.tensor([row.ids for row in rows]), torch.tensor([row.is_response for row in rows]))
