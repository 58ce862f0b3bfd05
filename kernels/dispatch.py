"""Decide, in one place, which form of an op runs: its definition on CPU tensors, its kernel on an accelerator's.

The tensors decide, never an exception: a kernel that fails is a bug to see, not a reason to go on more slowly.
"""

from collections.abc import Callable
from typing import TypeVar

import torch

Op = TypeVar("Op", bound=Callable)


def choose(tensor: torch.Tensor, *, definition: Op, kernel: Op) -> Op:
    """The form of an op to run where `tensor` lives."""
    return definition if tensor.is_cpu else kernel
