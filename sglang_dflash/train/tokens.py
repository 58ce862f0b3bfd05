"""Token rows to train on: which tokens, and which of them are the response.

Knows nothing of models, and of files only through its callers.
"""

from collections.abc import Iterable, Iterator, Sequence
from hashlib import sha256
from typing import NamedTuple

import torch


class Tokens(NamedTuple):
    """One document: its tokens, and for each token whether the model is to say it (a response) or only reads it."""

    ids: list[int]
    is_response: list[bool]

    @property
    def prompt(self) -> list[int]:
        """What comes before the first response; of a document that is all response, the first half."""
        return self.ids[: self.is_response.index(True) or (len(self.ids) + 1) // 2]


class Rows(NamedTuple):
    """R rows of L tokens, the shape of a training batch."""

    ids_RL: torch.Tensor  # int64
    is_response_RL: torch.Tensor  # bool
    document_R: torch.Tensor  # int64, which document a row is; -1 for a row that is not one whole document

    def to(self, device: torch.device) -> "Rows":
        return Rows(*(tensor.to(device) for tensor in self))

    def share(self, rank: int, n_ranks: int) -> "Rows":
        """Every `n_ranks`-th row, beginning with row `rank`."""
        return Rows(*(tensor[rank::n_ranks] for tensor in self))


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


def stacked(rows: Sequence[Tokens]) -> Rows:
    """Rows of one length as tensors."""
    ids_RL, is_response_RL = (torch.tensor([row[field] for row in rows]) for field in (0, 1))
    return Rows(ids_RL, is_response_RL, torch.full((len(rows),), -1))


def text_digest(documents: Iterable[Tokens]) -> str:
    """16 hex digits that tell one list of documents from another: tokens, responses and order."""
    digest = sha256()
    for document in documents:
        digest.update(f"{len(document.ids)}:{document.ids}".encode())
        digest.update(bytes(document.is_response))
    return digest.hexdigest()[:16]
