"""Choice of an op's form by the device of its tensors: one form for CPU tensors, the kernel for a GPU.

An exception never selects the slower form: a failing kernel is a bug.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, ClassVar, Generic, TypeVar

import torch

Op = TypeVar("Op", bound=Callable)


@dataclass(frozen=True)
class Forms(Generic[Op]):
    """Two forms of an op. Both compute its readable definition, `*_ref`."""

    on_cpu: Op
    on_gpu: Op

    _override: ClassVar[Callable[["Forms"], Any] | None] = None

    def form_for(self, tensor: torch.Tensor) -> Op:
        """Return the form for the tensor's device."""
        if Forms._override is not None:
            return Forms._override(self)
        return self.on_cpu if tensor.is_cpu else self.on_gpu


def override(choose: Callable[[Forms], Any]) -> None:
    """Use `choose` to select the form of every op in this process, on any device.

    The GPU emulation uses this to run kernels in Triton's interpreter, and to count launches.
    """
    Forms._override = staticmethod(choose)
