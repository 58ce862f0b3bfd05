"""A weight loader as trainers write one for `--custom-weight-loader`: it adds differences to the served weights."""

from collections.abc import Iterable

import torch

NAME = f"{__name__}.add"


def add(model: torch.nn.Module, differences: Iterable[tuple[str, torch.Tensor]]) -> None:
    """Add each named difference to the parameter of that name, in place."""
    parameters = dict(model.named_parameters())
    for name, difference in differences:
        parameters[name].data += difference.to(parameters[name])
