"""Choice of an op's form: the one for CPU tensors, or the kernel for a GPU.

The tensors' device decides, never an exception: a failing kernel is a bug, not a reason for a slower fallback.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, ClassVar, Generic, TypeVar

import torch

Op = TypeVar("Op", bound=Callable)


@dataclass(frozen=True)
class Forms(Generic[Op]):
    """The two forms of an op. Both compute the definition, `*_ref`, which is written to be readable."""

    on_cpu: Op
    on_gpu: Op

    _override: ClassVar[Callable[["Forms"], Any] | None] = None

    def form_for(self, tensor: torch.Tensor) -> Op:
        """Return the form for the tensor's device."""
        if Forms._override is not None:
            return Forms._override(self)
        return self.on_cpu if tensor.is_cpu else self.on_gpu


def override(choose: Callable[[Forms], Any]) -> None:
    """Let `choose` pick the form of every op from now on in this process, on any device.

    It is for CPUs that emulate a GPU: they run kernels in Triton's interpreter, or count launches.
    """
    Forms._override = staticmethod(choose)
