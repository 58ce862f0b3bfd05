"""Budget of launches per decode step, by stage, which the emulation checks in every step.

A launch is a kernel, a copy or a replayed graph. `LAUNCHES` has the number on a GPU (P, from SGLang's CUDA branches),
and the most that the emulation may count. The emulation counts more if SGLang's CPU form of a CUDA kernel has several
operations: filling a graph's inputs, norms, the windows of a convolution.

    stage      GPU  launches on a GPU
    plan         2  the block's tokens, positions and slots; the same for the verified width if it differs
    catch_up     4  the launches of append, after steps without drafts; else none
    draft        4  the graph's inputs, attention metadata, the graph, a copy of its drafts
    copy         2  the search for matches, and the n-gram copy
    verify       8  track slots (two), positions, inputs, metadata, state rows, query starts, the graph
    choose       1  argmax
    count        0  token counts, only for requests with penalties
    weigh        1  counts of copies
    commit       3  the slots to keep, states, convolution windows
    append       4  projection, norm, K and V, the write
    others       2  accept, and the published lengths
    result       0
"""

from __future__ import annotations

from typing import NamedTuple


class Budget(NamedTuple):
    """Most launches of a stage in one step."""

    on_gpu: int
    emulated: int


LAUNCHES = {
    "plan": Budget(2, 2),
    "catch_up": Budget(4, 12),
    "draft": Budget(4, 13),
    "copy": Budget(2, 2),
    "verify": Budget(8, 22),
    "choose": Budget(1, 1),
    "count": Budget(0, 0),
    "weigh": Budget(1, 1),
    "commit": Budget(3, 5),
    "append": Budget(4, 12),
    "others": Budget(2, 2),
    "result": Budget(0, 0),
}
# Further emulated launches with a windowed draft, which computes its ring buffer's slots by small operations.
RING = {"catch_up": 20, "draft": 20, "append": 8}
FLASHINFER_PLAN = 19  # launches with which FlashInfer plans a forward, on a GPU as well


def draft_forward(n_layers: int, *, second: bool, ranks: bool, fp8_head: bool) -> int:
    """Return the most launches of a captured forward of an unquantized draft that the emulation may count.

    On a GPU (P) a layer has 10 launches and the rest 7: embedding, norm, packed rows, head, argmax (2) and the tokens.
    The emulation counts 7 for a norm, and 2 for an activation and for a write of K and V. A DFlash 2 draft (`second`)
    has two convolutions and their projection around each of two sublayers, and a selector. Ranks add all-reduces and
    the exchange of their best tokens. An fp8 head rounds hidden states: one launch on a GPU, ten in the emulation.
    """
    per_layer = 28 + (8 if second else 0) + (4 if ranks else 0)
    return per_layer * n_layers + 12 + (14 if second else 0) + (14 if ranks else 0) + (10 if fp8_head else 0)
