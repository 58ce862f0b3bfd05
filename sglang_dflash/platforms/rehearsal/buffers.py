"""Memory rule of captured graphs: buffers for the longest context exist once, not per verify width.

The rule compares addresses of all tensors in the attention backends, and knows no names of buffers.
"""

from __future__ import annotations

import functools
from collections.abc import Iterator, Mapping
from typing import Any

import torch


class NotShared(RuntimeError):
    """Error for a verify width whose attention backend has a large buffer of its own."""


@functools.cache  # called after each of two models is loaded
def install() -> None:
    """Check the engines of all widths from now on. Call this before stages are created."""
    from sglang_dflash.engine.stages.verifier import Verifier

    init = Verifier.__init__

    @functools.wraps(init)
    def init_and_check(self: Verifier, *args: Any, **kwargs: Any) -> None:
        init(self, *args, **kwargs)
        runner = self.worker.model_runner
        n_pages = -(-runner.model_config.context_len // runner.page_size)
        captured = {width: engine.graphs for width, engine in self.engines.items() if engine.graphs is not None}
        if captured:
            backends = {width: self.engines[width].backend for width in captured}
            max_bs = max(graphs.max_bs for graphs in captured.values())
            require_shared(backends, runner.attn_backend, max_bs * n_pages)

    Verifier.__init__ = init_and_check  # type: ignore[method-assign]


def require_shared(backends: Mapping[int, Any], widest: Any, n_large: int) -> None:
    """Check that each backend shares its tensors of `n_large` or more elements with `widest`.

    `backends` are the attention backends of the widths, by width. `widest` is the backend of the widest.

    Raises:
        NotShared: the backend of a width has such a tensor of its own.
    """
    shared = {tensor.data_ptr() for _, tensor in large(widest, n_large)}
    for width, backend in backends.items():
        own = [(name, tensor) for name, tensor in large(backend, n_large) if tensor.data_ptr() not in shared]
        if own:
            names = ", ".join(f"{name} {tuple(tensor.shape)}" for name, tensor in own)
            raise NotShared(f"width {width} has its own {names}; share it in stages/index_buffers.py")


def large(backend: Any, n_large: int) -> Iterator[tuple[str, torch.Tensor]]:
    """Yield the tensors with `n_large` or more elements in a backend's parts for full attention, with their names."""
    from sglang_dflash.engine.stages.index_buffers import parts

    for part in parts(backend):
        for name, held in part.items():
            yield from ((name, tensor) for tensor in flat(held) if tensor.numel() >= n_large)


def flat(held: Any) -> Iterator[torch.Tensor]:
    """Yield a tensor, or the tensors in a list, a dictionary, or a structure that has a buffer."""
    from sglang.srt.layers.attention.verify_mask import VerifyMask

    match held:
        case torch.Tensor():
            yield held
        case VerifyMask():
            yield held.buffer
        case list() | tuple():
            for item in held:
                yield from flat(item)
        case dict():
            yield from flat(list(held.values()))
