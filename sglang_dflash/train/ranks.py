"""Processes of one training run, as `torchrun` starts them: rank, sums over all processes, a barrier.

The batch of a step does not depend on the number of processes. Each process takes its share of the rows. So runs with
different numbers of processes differ only in the order of float additions, and a run may resume with another number of
processes.
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
    """Rank of this process, 0..n-1, and the number `n` of the run's processes."""

    rank: int
    n: int

    @property
    def is_first(self) -> bool:
        """Return whether this process writes files and prints."""
        return self.rank == 0

    def total(self, tensor: torch.Tensor) -> torch.Tensor:
        """Return the sum of `tensor` over all processes, as a new detached tensor."""
        summed = tensor.detach().clone()
        if self.n > 1:
            dist.all_reduce(summed)
        return summed

    def from_first(self, value: float, device: torch.device) -> float:
        """Return the first process's `value` in all processes. They exchange it through a tensor on `device`."""
        if self.n == 1:
            return value
        own = value if self.is_first else 0.0
        return self.total(torch.tensor(own, dtype=torch.float64, device=device)).item()

    def wait(self) -> None:
        """Wait until all processes have called `wait` (a barrier)."""
        if self.n > 1:
            dist.barrier()


ALONE = Ranks(rank=0, n=1)


@contextmanager
def joined(device: str) -> Iterator[tuple[Ranks, torch.device]]:
    """Join the process group if torchrun started this process, and yield the process's rank and device.

    Under torchrun, `device` "cuda" becomes the process's own GPU.

    Raises:
        ValueError: there are fewer GPUs than processes, `device` names one GPU, or RANK is set without torchrun's other
            variables.
    """
    if "RANK" not in os.environ:
        yield ALONE, torch.device(device)
        return
    if missing := [name for name in ("LOCAL_RANK", "LOCAL_WORLD_SIZE") if name not in os.environ]:
        raise ValueError(f"RANK is set and {missing[0]} is not; start the training with torchrun, or unset RANK")
    local_rank, n_local = int(os.environ["LOCAL_RANK"]), int(os.environ["LOCAL_WORLD_SIZE"])
    if device.startswith("cuda:"):
        raise ValueError(f"--device {device} is one GPU for {n_local} processes; give --device cuda")
    if device == "cuda":
        if n_local > torch.cuda.device_count():
            raise ValueError(
                f"{n_local} processes share {torch.cuda.device_count()} GPUs; start one per GPU: "
                f"torchrun --nproc-per-node {torch.cuda.device_count()}"
            )
        torch.cuda.set_device(local_rank)
        device = f"cuda:{local_rank}"
    # The timeout is a day, because some processes fill their part of a cache long before others.
    dist.init_process_group("nccl" if device.startswith("cuda") else "gloo", timeout=timedelta(days=1))
    try:
        yield Ranks(dist.get_rank(), dist.get_world_size()), torch.device(device)
    finally:
        dist.destroy_process_group()
