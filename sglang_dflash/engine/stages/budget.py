"""Launch budget: the largest number of launches that each stage of a decode step may have.

The GPU emulation checks the budget if SGLANG_DFLASH_REHEARSE contains `,streams`. It checks only steps that replay
graphs and have only plain greedy requests.

A launch is a kernel, a copy or a replayed graph. `LAUNCHES` lists the number on a GPU, counted in SGLang's CUDA
code and not measured, and the limit in the emulation. The limit is higher if SGLang's CPU form of a CUDA kernel has
several operations. Examples are filling a graph's inputs, norms, and the windows of a convolution.

    stage      GPU  launches on a GPU
    plan         1  tokens, positions, KV slots and end of the block, and of the verified part if its width differs
    catch_up     4  the launches of append, only after steps without drafts
    draft        4  the graph's inputs, attention metadata, the graph, a copy of its drafts
    copy         1  the search, the copy and the write to the history
    verify       8  track slots (two), positions, inputs, metadata, state slots, query starts, the graph
    choose       1  argmax
    count        0  token counts, only for requests with penalties
    weigh        1  counts of copies
    commit       2  recurrent states; convolution windows
    append       4  projection, norm, product for K and V, the write
    others       2  accept, and the published lengths
    result       0
"""

from __future__ import annotations

from typing import NamedTuple


class Budget(NamedTuple):
    """Largest number of launches of a stage in one step."""

    on_gpu: int
    emulated: int


LAUNCHES = {
    "plan": Budget(1, 1),
    "catch_up": Budget(4, 12),
    "draft": Budget(4, 13),
    "copy": Budget(1, 1),
    "verify": Budget(8, 22),
    "choose": Budget(1, 1),
    "count": Budget(0, 0),
    "weigh": Budget(1, 1),
    "commit": Budget(2, 4),
    "append": Budget(4, 12),
    "others": Budget(2, 2),
    "result": Budget(0, 0),
}
# Further emulated launches if the draft has a window: the KV slots of ring buffers are computed by small operations.
RING = {"catch_up": 20, "draft": 20, "append": 8}
# Further launches if the draft normalises each captured layer's features and each draft layer's context (Laguna): two
# norms without weights, and two products with weights. On a GPU these are 4 launches.
NORMS = {"catch_up": 6, "append": 6}
# Further launches with which LiLiCorr keeps the context of each request's last token, the same number on a GPU.
LAST = {"catch_up": 3, "append": 5}
# Further launches with which an attention backend plans the windows of sliding draft layers.
WINDOWS = {"flashinfer": 48, "triton": 4}
# Further launches with which an attention backend plans a forward, equal on a GPU and in the emulation.
PLANS = {"flashinfer": 19, "triton": 3}

GATE, SWIGLU = 6, 8  # launches of Laguna's gate, and of the activation "swigluoai"
DOMINO = 24  # emulated launches of one corrected draft: its candidates' corrections, and a step of the GRU


def draft_forward(
    n_layers: int, *, second: bool, ranks: bool, fp8_head: bool, extra: int = 0, n_corrected: int = 0, outside: int = 0
) -> int:
    """Return the limit of launches in a captured forward of an unquantized draft, in the emulation.

    On a GPU (computed, not measured) each layer has 10 launches. Outside the layers there are 7: embedding, norm,
    packing the drafts' rows, head, argmax (2) and joining anchors and drafts. A draft with a mask row of its own has 2
    more. The limit is higher, because in the emulation a norm has 7 launches, an activation 2, and a write of K and V
    2. It also leaves some room.

    Args:
        n_layers: number of draft layers.
        second: a DFlash 2 draft. It adds a selector, and to each sublayer two convolutions and a projection.
        ranks: several ranks. They add all-reduces and the exchange of their best tokens.
        extra: launches that the kind of draft adds to each layer: `GATE`, `SWIGLU`.
        n_corrected: drafts of a block that Domino corrects, each with about 12 launches on a GPU.
        outside: launches that the kind of draft adds outside the layers: `lilicorr`.
        fp8_head: an fp8 head. It rounds hidden states, in one launch on a GPU and in ten in the emulation.
    """
    per_layer = 28 + (8 if second else 0) + (4 if ranks else 0) + extra
    # On several ranks an embedding masks the tokens of other ranks, and is summed: about 12 emulated launches.
    rollout = 20 + (DOMINO + (12 if ranks else 0)) * n_corrected if n_corrected else 0
    rollout += outside
    return per_layer * n_layers + 15 + (14 if second else 0) + (14 if ranks else 0) + (10 if fp8_head else 0) + rollout


def lilicorr(n_layers: int, n_drafts: int) -> int:
    """Return the launches that a LiLiCorr head of `n_layers` adds to a draft's forward, in the emulation."""
    return 90 + 24 * n_layers + 2 * n_drafts
