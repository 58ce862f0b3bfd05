"""Factory of a hook for `--forward-hooks`, which a server imports."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import nn


def counting(config: dict[str, Any]) -> Callable[[nn.Module, Any, torch.Tensor], None]:
    """Return a hook that writes each forward's number of tokens to the file `config["path"]`.

    It also reads a value on the host, which no captured graph may do.
    """

    def hook(module: nn.Module, args: Any, output: torch.Tensor) -> None:
        assert bool(torch.isfinite(output).all())
        with Path(config["path"]).open("a") as file:
            file.write(f"{len(output)}\n")

    return hook
