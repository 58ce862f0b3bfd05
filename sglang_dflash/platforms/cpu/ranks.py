"""Exchange of token rows between ranks of attention data parallelism, without Triton and NCCL."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

if TYPE_CHECKING:
    from sglang.srt.distributed.parallel_state import GroupCoordinator


def memcpy(
    dst: torch.Tensor, src: torch.Tensor, dim: int, offset: torch.Tensor, sz: torch.Tensor, offset_src: bool
) -> None:
    """Copy `sz` rows of `src` to `dst`. The values of `offset` and `sz` are not read on the host.

    SGLang's own CPU version reads these values on the host, which a captured graph must not do.

    With `offset_src` the rows begin at row `offset` of `src`, and go to row 0 of `dst`. Without it they begin at row 0
    of `src`, and go to row `offset` of `dst`.
    """
    assert dim == 0, "rows are copied"
    row = torch.arange(dst.shape[0], device=dst.device)
    from_row = row + offset if offset_src else row - offset
    nth = row if offset_src else from_row
    copied = (nth >= 0) & (nth < sz) & (from_row < src.shape[0])
    rows = src[from_row.clamp(0, src.shape[0] - 1)]
    dst.copy_(torch.where(copied.view(-1, *[1] * (dst.dim() - 1)), rows, dst))


def reduce_scatter_tensor(self: GroupCoordinator, output: torch.Tensor, input: torch.Tensor) -> torch.Tensor:
    """Write this rank's rows of the sum of all inputs to `output` [n, ...], and return it. `input`: [n * ranks, ...].

    Gloo's own reduce-scatter also sums all rows, but copies this rank's rows on the host. Graph capture forbids this.
    """
    summed = self.all_reduce(input.clone())
    return output.copy_(summed.narrow(0, self.rank_in_group * len(output), len(output)))
