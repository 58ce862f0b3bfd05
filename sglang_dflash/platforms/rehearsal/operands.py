"""Tensors that a PyTorch operation reads and writes, as its schema declares."""

from __future__ import annotations

import functools
from collections.abc import Iterator
from typing import Any

import torch

from sglang_dflash.platforms.rehearsal import host
from sglang_dflash.platforms.rehearsal.tape import INDEXES

Tensors = list[torch.Tensor]


def tensors(values: Any) -> Iterator[torch.Tensor]:
    """Yield the tensors among an operation's arguments or results, including those in lists."""
    for value in values:
        if isinstance(value, torch.Tensor):
            yield value
        elif isinstance(value, list | tuple):
            yield from tensors(value)


@functools.cache
def written_arguments(func: Any) -> tuple[tuple[int, str], ...]:
    arguments = func._schema.arguments
    return tuple((i, a.name) for i, a in enumerate(arguments) if a.alias_info is not None and a.alias_info.is_write)


def is_hosts(name: str, args: tuple, touched: tuple[torch.Tensor, ...]) -> bool:
    """Return whether an operation runs on the host: all its tensors are host tensors.

    For an indexing operation only the indexed tensor counts.
    """
    return all(map(host.is_marked, touched if name not in INDEXES else args[:1]))


def operands(func: Any, args: tuple, kwargs: dict) -> tuple[Tensors, Tensors]:
    marked = [args[i] if i < len(args) else kwargs.get(name) for i, name in written_arguments(func)]
    written = [tensor for tensor in tensors(marked) if tensor.numel()]
    ids = set(map(id, written))
    every = (*tensors(args), *tensors(kwargs.values()))
    return written, [tensor for tensor in every if id(tensor) not in ids and tensor.numel()]
