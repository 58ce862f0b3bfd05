"""Choice of an op's form by the device of its tensors: a torch or numpy form for CPU tensors, the kernel for a GPU.

A kernel that fails raises its error. The op does not fall back to the slower CPU form, which would hide the bug.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, ClassVar, Generic, TypeVar

import torch

Op = TypeVar("Op", bound=Callable)


@dataclass(frozen=True)
class Forms(Generic[Op]):
    """CPU form and GPU form of an op. Both give the results of its readable definition, `<op>_ref`."""

    on_cpu: Op
    on_gpu: Op

    _override: ClassVar[Callable[["Forms"], Any] | None] = None

    def form_for(self, tensor: torch.Tensor) -> Op:
        """Return the form for the tensor's device."""
        if Forms._override is not None:
            return Forms._override(self)
        return self.on_cpu if tensor.is_cpu else self.on_gpu


def override(choose: Callable[[Forms], Any]) -> None:
    """Let `choose` select the form of every op in this process, on any device.

    Call this before stages and models are created, because they keep the forms that they have looked up.
    The GPU emulation calls this to run kernels in Triton's interpreter, and to count launches.
    """
    Forms._override = staticmethod(choose)
