"""Mapping from a draft checkpoint's tensors to the draft model's fused parameters."""

from __future__ import annotations

import logging
from collections.abc import Callable, Container, Iterable, Sequence

import torch
from sglang.srt.layers.parameter import BasevLLMParameter
from sglang.srt.model_loader.weight_utils import default_weight_loader
from torch import nn

from sglang_dflash.engine import saver
from sglang_dflash.engine.draft.files import BORROWED, ROTARY, own_name
from sglang_dflash.engine.draft.lilicorr_fields import HEAD
from sglang_dflash.engine.draft.pair import unused

logger = logging.getLogger(__name__)

# Errors that SGLang's models and this draft raise for a tensor with an unknown name or a wrong shape.
NOT_LOADED = (ValueError, KeyError, IndexError, RuntimeError, AssertionError)
QUANTIZED = "a quantized draft takes no new weights; restart the server with the new draft"

# A checkpoint stores some projections separately that the model fuses into one parameter. For each such projection:
# name of the fused parameter, and the projection's shard in it.
FUSED: dict[str, tuple[str, str | int]] = {
    "q_proj": ("qkv_proj", "q"),
    "k_proj": ("qkv_proj", "k"),
    "v_proj": ("qkv_proj", "v"),
    "gate_proj": ("gate_up_proj", 0),
    "up_proj": ("gate_up_proj", 1),
}


def fused_name(name: str) -> tuple[str, tuple[str | int, ...]]:
    """Return the name of the parameter for a checkpoint's tensor, and the tensor's shard if that parameter is fused.

    Example: `a.q_proj.weight` -> `a.qkv_proj.weight`, (`q`,).
    """
    for part, (fused, shard) in FUSED.items():
        if f".{part}." in name and not name.startswith(HEAD):
            return name.replace(part, fused), (shard,)
    return name, ()


def require_known(name: str, parameters: Container[str]) -> tuple[str, tuple[str | int, ...]]:
    """Return the same as `fused_name`, after checking that the draft has the parameter or ignores the tensor.

    Raises:
        ValueError: the draft has no such tensor.
    """
    fused, shard = fused_name(own_name(name))
    if fused not in parameters and not is_unused(name, parameters):
        raise ValueError(f"a DFlash draft has no tensor {name!r}")
    return fused, shard


def require_all_known(names: Iterable[str], parameters: Container[str]) -> None:
    """Check that the draft has or ignores each named tensor, and log the ignored ones.

    Call this before a tensor changes.

    Raises:
        ValueError: see `require_known`.
    """
    left_out = []
    for name in names:
        require_known(name, parameters)
        left_out += [name] * is_unused(name, parameters)
    if left_out:
        logger.info(unused(left_out))


def is_unused(name: str, parameters: Container[str]) -> bool:
    """Return whether a tensor is not loaded: the draft never uses it (`BORROWED`), or computes it (`ROTARY`)."""
    name = own_name(name)
    return name not in parameters and (name in BORROWED or name.endswith(ROTARY))


def checkpoint_names(parameters: Iterable[str]) -> set[str]:
    """Return the names of the checkpoint's tensors for all these parameters: the inverse of `fused_name`."""
    parts: dict[str, list[str]] = {}
    for part, (fused, _) in FUSED.items():
        parts.setdefault(fused, []).append(part)
    names = set()
    for name in parameters:
        head, _, leaf = name.rpartition(".")
        stem, _, fused = head.rpartition(".")
        names |= {f"{stem}.{part}.{leaf}" for part in parts[fused]} if fused in parts else {name}
    return names


def loader_of(parameter: nn.Parameter) -> Callable[..., None]:
    """Return the function that copies a tensor, or a shard, into `parameter`.

    SGLang stores this function in a property or in an attribute, depending on the parameter's class.
    """
    if isinstance(parameter, BasevLLMParameter):
        return parameter.weight_loader
    return parameter.__dict__.get("weight_loader", default_weight_loader)


def lay_side_by_side(parameters: Sequence[nn.Parameter]) -> torch.Tensor:
    """Stack parameters into one tensor [L, ...]. Its L slices become the parameters' storage.

    The weights exist only once, so an update of a parameter also updates the stack.
    """
    with saver.weights():
        stack = torch.stack([p.data for p in parameters])
    for parameter, row in zip(parameters, stack, strict=True):
        parameter.data = row
    return stack
