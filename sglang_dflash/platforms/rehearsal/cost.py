"""Cost rules of captured forwards: no weight is read twice, and a draft's launches stay within a budget.

An expanded dimension counts as one read per repetition, because a GPU's batched matrix product reads a weight again for
every batch entry. Look-ups read only some rows and do not count. So if the embedding is also the head, only the head's
read counts.
"""

from __future__ import annotations

import weakref
from collections import defaultdict
from collections.abc import Iterable, Iterator
from typing import NamedTuple, cast

import torch
from torch import nn
from torch._ops import OpOverload

from sglang_dflash.engine.draft.record import Checkpoint
from sglang_dflash.engine.stages import budget
from sglang_dflash.platforms.rehearsal.pool import extent
from sglang_dflash.platforms.rehearsal.tape import CaptureError, Node, storage_of, tensors

LOOKS_UP = {f"aten::{name}" for name in ("embedding", "index", "index_select", "gather", "take")}
ROUNDING = 1e-6  # tolerance of the number of reads, a sum of fractions

_models: list[weakref.ref[nn.Module]] = []


class Span(NamedTuple):
    """Range of bytes of a parameter in its storage."""

    name: str
    begin: int
    end: int
    most: int  # largest allowed number of reads in one forward


def watch_parameters(model: nn.Module) -> None:
    """Check reads of this model's parameters in captured forwards from now on."""
    _models.append(weakref.ref(model))


def watched() -> Iterator[nn.Module]:
    """Yield the models of `watch_parameters` that still exist."""
    yield from filter(None, (reference() for reference in _models))


def require_cheap(nodes: list[Node]) -> None:
    """Check the three rules of a captured forward: reads of weights, number of launches, and use of a head's copy.

    Raises:
        CaptureError: the forward breaks a rule.
    """
    require_one_read(nodes)
    require_launches(nodes)
    require_copied_rows(nodes)


def require_launches(nodes: list[Node]) -> None:
    """Check a captured draft forward's launches against its budget.

    The target's forwards are SGLang's own and have no budget. Quantized drafts are not checked.

    Raises:
        CaptureError: the forward exceeds the budget.
    """
    # Imported here and not at the top, because these modules import SGLang's layers, whose kernels are replaced first.
    from sglang.srt.runtime_context import get_parallel

    from sglang_dflash.engine.draft.sglang_model import DFlashDraftModel

    read = {storage_of(operand) for node in nodes for operand in tensors((node.args, node.kwargs))}
    for model in watched():
        if not isinstance(model, DFlashDraftModel) or not any(storage_of(p) in read for p in model.parameters()):
            continue
        if model.is_quantized:  # a quantized draft, whose matrix products take several operations on a CPU
            continue
        most = budget.draft_forward(
            len(model.layers),
            second=model.candidate_selector is not None,
            ranks=get_parallel().tp_size > 1,
            fp8_head=model.ends.copy is not None,
            extra=(budget.GATE if model.fields.gating else 0)
            + (budget.SWIGLU if model.fields.hidden_act != "silu" else 0),
            n_corrected=model.fields.n_drafts - 1 if model.domino else 0,
            outside=budget.lilicorr(len(model.lilicorr.layers), model.fields.n_drafts) if model.lilicorr else 0,
        )
        if len(nodes) > most:
            raise CaptureError(
                f"a captured draft forward of {len(model.layers)} layers launches {len(nodes)} times, at most {most} "
                "are allowed; see stages/budget.py"
            )


def require_copied_rows(nodes: list[Node]) -> None:
    """Check that a draft with a copy of the head reads the copy and not the head.

    A copy has the rows of a reduced vocabulary, or is in fp8, or both.

    Raises:
        CaptureError: the forward reads the target's head.
    """
    from sglang_dflash.engine.draft.sglang_model import DFlashDraftModel

    read = {storage_of(operand) for node in products(nodes) for operand in tensors((node.args, node.kwargs))}
    for model in watched():
        ends = vars(model).get("ends") if isinstance(model, DFlashDraftModel) else None
        if ends is None or ends.copy is None or storage_of(ends.copy.rows_DH) not in read:
            continue
        if any(storage_of(weight) in read for weight in ends.head.parameters()):
            raise CaptureError(
                f"a captured draft forward reads the target's whole head beside its copy of {len(ends.copy.rows_DH)} "
                "rows; read the copy only"
            )


def products(nodes: Iterable[Node]) -> Iterator[Node]:
    """Yield the nodes that read their operands whole, unlike look-ups."""
    return (node for node in nodes if not (isinstance(node.run, OpOverload) and node.run._schema.name in LOOKS_UP))


def require_one_read(nodes: Iterable[Node]) -> None:
    """Check that a captured forward reads no parameter more often than allowed, or raise CaptureError.

    The weights of Domino's rollout may be read once per slot of the block, all others once.
    """
    by_storage = spans()
    most = {span.name: span.most for found in by_storage.values() for span in found}
    read: defaultdict[str, float] = defaultdict(float)
    for node in products(nodes):
        for operand in tensors((node.args, node.kwargs)):
            for name, times in reads_of(operand, by_storage.get(storage_of(operand), [])):
                read[name] += times
    if again := {name: times for name, times in read.items() if times > most[name] + ROUNDING}:
        many = ", ".join(f"{name} {times:.3g} times" for name, times in again.items())
        raise CaptureError(
            f"a captured forward reads weights more than once: {many}; read each weight once for all rows"
        )


def spans() -> dict[int, list[Span]]:
    """Return the parameters of the checked models, by storage.

    The result is not cached, because a draft stacks its layers' parameters after loading.
    """
    found: dict[int, list[Span]] = {}
    for model in watched():
        for name, parameter in model.named_parameters():
            most = cast(Checkpoint, model.fields).block_size if name.startswith("domino.") else 1
            span = Span(f"{type(model).__name__}.{name}", *ends(parameter), most)
            found.setdefault(storage_of(parameter), []).append(span)
    return found


def reads_of(operand: torch.Tensor, candidates: Iterable[Span]) -> Iterator[tuple[str, float]]:
    """Yield each parameter that `operand` overlaps, and the number of times (or fraction) that `operand` reads it."""
    begin, end = ends(operand)
    for span in candidates:
        common = min(end, span.end) - max(begin, span.begin)
        if common > 0:
            yield span.name, operand.numel() * operand.element_size() / (end - begin) * common / (span.end - span.begin)


def ends(tensor: torch.Tensor) -> tuple[int, int]:
    """Return the index in the storage of a tensor's first byte, and of the byte after its last."""
    size = tensor.element_size()
    begin = int(tensor.storage_offset()) * size
    return begin, begin + (extent(tensor) * size if tensor.numel() else 0)
