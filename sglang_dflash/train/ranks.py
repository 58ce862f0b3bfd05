"""Several processes on one run, as `torchrun` starts them: who am I, which rows are mine, what do we add up to.

The batch of a step is the same whatever the number of processes; each takes its share of the rows. So a run on two
processes is the run on one, up to the order in which floats are added, and may be resumed on any number of them.

Knows tensors and processes, not what is trained.
"""

import os
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import timedelta

import torch
import torch.distributed as dist


@dataclass(frozen=True)
class Ranks:
    """This process among `n`."""

    rank: int
    n: int

    @property
    def is_first(self) -> bool:
        """The first one writes files and prints."""
        return self.rank == 0

    def total(self, tensor: torch.Tensor) -> torch.Tensor:
        """The sum over all processes, on each of them; a new tensor that gradients do not flow through."""
        summed = tensor.detach().clone()
        if self.n > 1:
            dist.all_reduce(summed)
        return summed

    def wait(self) -> None:
        """Go on when all have come here."""
        if self.n > 1:
            dist.barrier()


ALONE = Ranks(rank=0, n=1)


@contextmanager
def joined(device: str) -> Iterator[tuple[Ranks, torch.device]]:
    """Who this process is and where it computes: `device`, or under torchrun its own GPU if `device` is cuda.

    Raises ValueError when there are fewer GPUs than processes.
    """
    if "RANK" not in os.environ:
        yield ALONE, torch.device(device)
        return
    local_rank, n_local = int(os.environ["LOCAL_RANK"]), int(os.environ["LOCAL_WORLD_SIZE"])
    if device == "cuda":
        if n_local > torch.cuda.device_count():
            raise ValueError(
                f"{n_local} processes share {torch.cuda.device_count()} GPUs; start one each: "
                f"torchrun --nproc-per-node {torch.cuda.device_count()}"
            )
        torch.cuda.set_device(local_rank)
        device = f"cuda:{local_rank}"
    # A day: filling a cache, some processes finish long before others, and waiting for them is no error.
    dist.init_process_group("nccl" if device.startswith("cuda") else "gloo", timeout=timedelta(days=1))
    try:
        yield Ranks(dist.get_rank(), dist.get_world_size()), torch.device(device)
    finally:
        dist.destroy_process_group()
