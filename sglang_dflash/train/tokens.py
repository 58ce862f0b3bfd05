"""Rows of tokens for training, with a flag per token: whether it is part of a response."""

from collections.abc import Iterable, Iterator, Sequence
from hashlib import sha256
from typing import NamedTuple

import torch


class Tokens(NamedTuple):
    """One document: token ids, and for each id whether it is part of a response. Drafts are trained on responses."""

    ids: list[int]
    is_response: list[bool]

    @property
    def prompt(self) -> list[int]:
        """Return the tokens before the first response, or the first half of a document that begins with a response."""
        return self.ids[: self.is_response.index(True) or (len(self.ids) + 1) // 2]


class Rows(NamedTuple):
    """Batch of R rows with L tokens each."""

    ids_RL: torch.Tensor  # int64
    is_response_RL: torch.Tensor  # bool
    document_R: torch.Tensor  # int64, index of the row's document; -1: the row is not one whole document

    def to(self, device: torch.device) -> "Rows":
        return Rows(*(tensor.to(device) for tensor in self))

    def share(self, rank: int, n_ranks: int) -> "Rows":
        """Return every `n_ranks`-th row, starting with row `rank`."""
        return Rows(*(tensor[rank::n_ranks] for tensor in self))


def packed(documents: Iterable[Tokens], length: int) -> Iterator[Tokens]:
    """Yield rows of `length` tokens, each of concatenated documents; a row's last document is cut to fit.

    No row starts inside a document, because an answer without its question is useless for training. Documents after the
    last full row are left out.
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
    """Return rows of equal length as tensors."""
    ids_RL, is_response_RL = (torch.tensor([row[field] for row in rows]) for field in (0, 1))
    return Rows(ids_RL, is_response_RL, torch.full((len(rows),), -1))


def text_digest(documents: Iterable[Tokens]) -> str:
    """Return a digest, 16 hex digits, of documents: tokens, response flags and order."""
    digest = sha256()
    for document in documents:
        digest.update(f"{len(document.ids)}:{document.ids}".encode())
        digest.update(bytes(document.is_response))
    return digest.hexdigest()[:16]
