"""Saying no: a stand-in asked for what it does not define names the argument, and never guesses."""

from collections.abc import Mapping

import torch


def refuse(op: str, arguments: Mapping[str, object]) -> None:
    """Raise for the first argument that asks for something, that is, is neither None nor False."""
    for name, value in arguments.items():
        if value is not None and value is not False:
            raise NotImplementedError(f"{op}: {name} is not defined on the CPU platform; run this model on a GPU")


def refuse_padding(op: str, argument: str, slot_B: torch.Tensor) -> None:
    """Padding rows (negative slots) belong to captured graphs, which a CPU does not have."""
    if slot_B.numel() and int(slot_B.min()) < 0:
        refuse(op, {f"a negative slot in {argument} (a padding row)": True})
