"""Servers of the GPU emulation battery: ways in which a GPU's server runs and a CPU's does not.

Answers and steps of each are compared with plain torch, at one request at a time, three (a captured batch of four is
padded) and eight.
"""

from __future__ import annotations

from typing import NamedTuple

from sglang_dflash.draft.record import FULL, SLIDING
from sglang_dflash.tiny.pairs import Arm
from tests.server.lib.variants import CHUNKED, PAGES, RANDOM_WIDTHS, TRACK, TWO_NODES, window
from tests.tools.parameters import REQUEST_FLAGS

SM90 = (("SGLANG_DFLASH_REHEARSE", "sm90"),)
INTERPRETED = (("SGLANG_DFLASH_REHEARSE", "sm90,kernels"),)
TWO_RANKS = SM90 + TWO_NODES
STREAMS = (("SGLANG_DFLASH_REHEARSE", "sm90,streams"),)
SM100 = (("SGLANG_DFLASH_REHEARSE", "sm100"),)
SNAPSHOT = (("SGLANG_DFLASH_GDN_STATE", "snapshot"),)

PAGES_64 = ("--page-size", "64")
EAGER = ("--disable-cuda-graph",)
NO_PREFILL_GRAPHS = ("--cuda-graph-backend-prefill", "disabled")
GRAPHS = ("--cuda-graph-bs-decode", "1", "2", "4", "8", *NO_PREFILL_GRAPHS)
SMALL_GRAPHS = ("--cuda-graph-bs-decode", "1", "2", *NO_PREFILL_GRAPHS)
PREFILL_SIZES = ("--cuda-graph-bs-prefill", "16", "32", "64", "128")
BREAKABLE = ("--cuda-graph-bs-decode", "1", "2", "4", "8", "--cuda-graph-backend-prefill", "breakable", *PREFILL_SIZES)
FULL_PREFILL = ("--cuda-graph-bs-decode", "1", "2", "4", "8", "--cuda-graph-backend-prefill", "full", *PREFILL_SIZES)


def attention(backend: str, draft: str | None = None) -> tuple[str, ...]:
    return "--attention-backend", backend, *(() if draft is None else ("--speculative-draft-attention-backend", draft))


class Rehearsal(NamedTuple):
    flags: tuple[str, ...]
    env: tuple[tuple[str, str], ...] = SM90
    target: str = "hybrid"
    arm: Arm = Arm.PLUGIN
    full: bool = True  # only in `make test-full`
    draft_window: int | None = None
    draft_layers: tuple[str, ...] = ()
    both_ways: bool = False  # sliding layers see their whole block
    second: bool = False  # the DFlash 2 draft
    knows_steps: bool = True  # False: widths change, so steps are not predicted
    n_prompts: int = 12
    max_new_tokens: int = 64

    @property
    def page_size(self) -> int:
        return int(self.flags[self.flags.index("--page-size") + 1]) if "--page-size" in self.flags else 1

    @property
    def captures(self) -> bool:
        return EAGER[0] not in self.flags

    @property
    def watches_streams(self) -> bool:
        return "streams" in dict(self.env)["SGLANG_DFLASH_REHEARSE"]

    @property
    def verifies_one_token(self) -> bool:
        return dict(self.env).get("SGLANG_DFLASH_WIDTHS", "fixed") != "fixed"


REHEARSALS = {
    "fa3-eager": Rehearsal((*attention("fa3"), *EAGER)),
    "fa3-graphs": Rehearsal((*attention("fa3"), *GRAPHS, *TRACK)),
    "fa3-prefill-graphs-pages-window": Rehearsal(
        (*attention("fa3"), *BREAKABLE, *PAGES, *TRACK, *window(64), *REQUEST_FLAGS), draft_window=64, full=False
    ),
    "fa3-graphs-beside-eager": Rehearsal((*attention("fa3"), *SMALL_GRAPHS, *CHUNKED)),
    "fa3-graphs-dense": Rehearsal((*attention("fa3"), *BREAKABLE), target="dense"),
    "fa3-graphs-pages": Rehearsal((*attention("fa3"), *GRAPHS, *PAGES, *TRACK)),
    "fa3-graphs-pages-64": Rehearsal((*attention("fa3"), *GRAPHS, *PAGES_64)),
    "fa3-graphs-window": Rehearsal((*attention("fa3"), *GRAPHS, *TRACK, *window(64)), draft_window=64),
    "fa3-graphs-sliding": Rehearsal((*attention("fa3"), *GRAPHS), target="dense", draft_layers=(SLIDING, FULL)),
    "fa3-graphs-all-sliding": Rehearsal(
        (*attention("fa3"), *GRAPHS, *TRACK), draft_layers=(SLIDING, SLIDING), draft_window=64
    ),
    "fa3-graphs-widths": Rehearsal(
        (*attention("fa3"), *BREAKABLE, *TRACK, *REQUEST_FLAGS), SM90 + RANDOM_WIDTHS, knows_steps=False
    ),
    "fa3-eager-widths": Rehearsal((*attention("fa3"), *EAGER, *TRACK), SM90 + RANDOM_WIDTHS, knows_steps=False),
    "fa3-full-prefill-graphs-widths": Rehearsal(
        (*attention("fa3"), *FULL_PREFILL, *REQUEST_FLAGS), SM90 + RANDOM_WIDTHS, target="dense", knows_steps=False
    ),
    "fa3-graphs-no-overlap": Rehearsal((*attention("fa3"), *GRAPHS, "--disable-overlap-schedule")),
    "fa3-graphs-two-ranks": Rehearsal((*attention("fa3"), *GRAPHS, *TRACK, "--tp-size", "2"), TWO_RANKS),
    "fa3-graphs-snapshot": Rehearsal((*attention("fa3"), *GRAPHS, *TRACK), SM90 + SNAPSHOT),
    "fa3-graphs-dflash2": Rehearsal((*attention("fa3"), *GRAPHS, *TRACK), second=True),
    "fa3-graphs-dflash2-as-published": Rehearsal(
        (*attention("fa3"), *BREAKABLE, *PAGES), target="dense", second=True, draft_layers=(SLIDING, SLIDING),
        both_ways=True, draft_window=64,
    ),
    "fa3-graphs-dflash2-two-ranks": Rehearsal(
        (*attention("fa3"), *GRAPHS, *TRACK, "--tp-size", "2"), TWO_RANKS, second=True
    ),
    "fa3-graphs-dflash2-kernels": Rehearsal(
        (*attention("fa3"), *GRAPHS), INTERPRETED, second=True, n_prompts=4, max_new_tokens=32
    ),
    "fa4-graphs-sliding-both-ways": Rehearsal(
        (*attention("fa4"), *GRAPHS, *PAGES_64), SM100, target="dense", draft_layers=(SLIDING, FULL), both_ways=True
    ),
    "flashinfer-graphs-dflash2": Rehearsal((*attention("flashinfer"), *GRAPHS, *TRACK), second=True),
    "trtllm-gen-graphs-dflash2": Rehearsal(
        (*attention("trtllm_mha", draft="trtllm_mha"), *GRAPHS, *PAGES, *TRACK), SM100, second=True
    ),
    "triton-graphs-sliding-both-ways": Rehearsal(
        (*attention("triton"), *GRAPHS), target="dense", draft_layers=(SLIDING, FULL), both_ways=True, n_prompts=4,
        max_new_tokens=32,
    ),
    "fa4-eager": Rehearsal((*attention("fa4"), *EAGER, *PAGES_64), SM100),
    "fa4-graphs": Rehearsal((*attention("fa4"), *BREAKABLE, *PAGES_64, *TRACK), SM100),
    "fa4-graphs-sm90-sliding": Rehearsal((*attention("fa4"), *GRAPHS), target="dense", draft_layers=(SLIDING, FULL)),
    "fa4-graphs-window-widths": Rehearsal(
        (*attention("fa4"), *GRAPHS, *PAGES_64, *window(64)), SM100 + RANDOM_WIDTHS, knows_steps=False
    ),
    "flashinfer-eager": Rehearsal((*attention("flashinfer"), *EAGER)),
    "flashinfer-graphs": Rehearsal((*attention("flashinfer"), *GRAPHS, *TRACK)),
    "flashinfer-graphs-dense": Rehearsal((*attention("flashinfer"), *BREAKABLE), target="dense"),
    "flashinfer-graphs-pages-window": Rehearsal(
        (*attention("flashinfer"), *GRAPHS, *PAGES, *TRACK, *window(64)), draft_window=64
    ),
    "flashinfer-graphs-window": Rehearsal((*attention("flashinfer"), *GRAPHS, *TRACK, *window(64)), draft_window=64),
    "flashinfer-graphs-widths": Rehearsal(
        (*attention("flashinfer"), *GRAPHS, *TRACK), SM90 + RANDOM_WIDTHS, knows_steps=False
    ),
    # FlashInfer's sliding layers see up to N - 1 tokens too many, so steps may differ from plain torch's.
    "flashinfer-graphs-sliding": Rehearsal(
        (*attention("flashinfer"), *GRAPHS), target="dense", draft_layers=(SLIDING, FULL), knows_steps=False
    ),
    "flashinfer-graphs-beside-eager": Rehearsal((*attention("flashinfer"), *SMALL_GRAPHS, *CHUNKED)),
    "trtllm-xqa-eager": Rehearsal((*attention("trtllm_mha"), *EAGER, *PAGES)),
    "trtllm-xqa-graphs": Rehearsal((*attention("trtllm_mha"), *GRAPHS, *PAGES, *TRACK)),
    "trtllm-gen-graphs": Rehearsal((*attention("trtllm_mha", draft="trtllm_mha"), *GRAPHS, *PAGES_64, *TRACK), SM100),
    "trtllm-gen-graphs-sliding": Rehearsal(
        (*attention("trtllm_mha", draft="trtllm_mha"), *GRAPHS, *PAGES), SM100, target="dense",
        draft_layers=(SLIDING, FULL),
    ),
    "trtllm-gen-graphs-window-widths": Rehearsal(
        (*attention("trtllm_mha", draft="trtllm_mha"), *GRAPHS, *PAGES, *TRACK, *window(64)), SM100 + RANDOM_WIDTHS,
        knows_steps=False,
    ),
    "trtllm-and-a-draft-on-fa4": Rehearsal((*attention("trtllm_mha"), *BREAKABLE, *PAGES_64, *TRACK), SM100),
    "fa3-and-a-draft-on-flashinfer": Rehearsal((*attention("fa3", draft="flashinfer"), *GRAPHS, *TRACK)),
    "triton-graphs": Rehearsal((*attention("triton"), *GRAPHS), n_prompts=4, max_new_tokens=32),
    "triton-eager-pages-window": Rehearsal(
        (*attention("triton"), *EAGER, *PAGES, *window(64)), draft_window=64, n_prompts=4, max_new_tokens=32
    ),
    "flashinfer-and-a-draft-on-trtllm": Rehearsal(
        (*attention("flashinfer", draft="trtllm_mha"), *GRAPHS, *PAGES, *TRACK, *window(64)), SM100, draft_window=64,
        n_prompts=8, max_new_tokens=48,
    ),
    "fa3-graphs-interpreted": Rehearsal((*attention("fa3"), *GRAPHS), INTERPRETED, n_prompts=2, max_new_tokens=24),
    "fa3-graphs-streams": Rehearsal((*attention("fa3"), *GRAPHS, *REQUEST_FLAGS), STREAMS),
    "flashinfer-prefill-graphs-pages-streams": Rehearsal(
        (*attention("flashinfer"), *BREAKABLE, *PAGES, *TRACK), STREAMS
    ),
    # Captured forwards of two streams; steps of one token, in the fused projection, mixed with whole blocks.
    "fa3-graphs-streams-1-and-16": Rehearsal(
        (*attention("fa3"), *SMALL_GRAPHS, *TRACK), (*STREAMS, ("SGLANG_DFLASH_WIDTHS", "1,16")), full=False,
        knows_steps=False, n_prompts=4, max_new_tokens=32,
    ),
    # Changes of verify width between steps, and the table of the draft's rings.
    "fa3-graphs-streams-widths": Rehearsal(
        (*attention("fa3"), *GRAPHS, *TRACK), STREAMS + RANDOM_WIDTHS, knows_steps=False, n_prompts=8
    ),
    "fa3-graphs-streams-window": Rehearsal(
        (*attention("fa3"), *GRAPHS, *TRACK, *window(64)), STREAMS, draft_window=64, n_prompts=8
    ),
    "fa3-graphs-stock": Rehearsal((*attention("fa3"), *BREAKABLE), arm=Arm.STOCK),
    "fa3-graphs-stock-dense": Rehearsal((*attention("fa3"), *GRAPHS), arm=Arm.STOCK, target="dense"),
}  # fmt: skip
