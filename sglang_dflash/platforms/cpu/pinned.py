"""Copy of `torch` for modules that pin memory unconditionally. Pinning fails without a device."""

from collections.abc import Callable
from types import ModuleType
from typing import Any

import torch

Made = Callable[[torch.Tensor], torch.Tensor]
MAKERS = (torch.tensor, torch.empty, torch.zeros, torch.arange)


def torch_with(pinned: Made, **names: Any) -> ModuleType:
    """Return a copy of the torch module with `names` set. With `pin_memory=True` its MAKERS return `pinned(tensor)`."""
    module = ModuleType("torch")
    vars(module).update(vars(torch) | {make.__name__: _making(make, pinned) for make in MAKERS} | names)
    return module


def _making(make: Callable[..., torch.Tensor], pinned: Made) -> Callable[..., torch.Tensor]:
    def made(*args: Any, pin_memory: bool = False, **kwargs: Any) -> torch.Tensor:
        tensor = make(*args, **kwargs)
        return pinned(tensor) if pin_memory else tensor

    return made
