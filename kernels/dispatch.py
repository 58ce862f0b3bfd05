"""Decide, in one place, which form of an op runs: the one for a CPU's tensors, or the kernel for an accelerator's.

The tensors decide, never an exception: a kernel that fails is a bug to see, not a reason to go on more slowly.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, ClassVar, Generic, TypeVar

import torch

Op = TypeVar("Op", bound=Callable)


@dataclass(frozen=True)
class Forms(Generic[Op]):
    """An op's two forms. Both compute what its definition says, `*_ref`, which is written to be read."""

    on_cpu: Op
    on_gpu: Op

    _override: ClassVar[Callable[["Forms"], Any] | None] = None

    def form_for(self, tensor: torch.Tensor) -> Op:
        """Return the form to run where `tensor` lives."""
        if Forms._override is not None:
            return Forms._override(self)
        return self.on_cpu if tensor.is_cpu else self.on_gpu


def override(choose: Callable[[Forms], Any]) -> None:
    """Let `choose` pick the form of every op that is chosen from now on in this process, wherever tensors live.

    For CPUs that stand in for a GPU: they run kernels in Triton's interpreter, or count launches.
    """
    Forms._override = staticmethod(choose)
