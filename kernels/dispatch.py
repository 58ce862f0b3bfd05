"""Decide, in one place, which form of an op runs: the one for a CPU's tensors, or the kernel for an accelerator's.

The tensors decide, never an exception: a kernel that fails is a bug to see, not a reason to go on more slowly.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Generic, TypeVar

import torch

Op = TypeVar("Op", bound=Callable)


@dataclass(frozen=True)
class Forms(Generic[Op]):
    """An op's two forms. Both compute what its definition says, `*_ref`, which is written to be read."""

    on_cpu: Op
    on_gpu: Op

    def form_for(self, tensor: torch.Tensor) -> Op:
        """The form to run where `tensor` lives."""
        return self.on_cpu if tensor.is_cpu else self.on_gpu
