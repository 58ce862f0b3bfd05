"""Server configurations of `test_rehearsal.py`, under GPU emulation: attention backends, captured graphs, streams.

Answers, and steps if `knows_steps`, are compared with the PyTorch reference at concurrency 1, 3 and 8. A graph captured
for 4 requests also runs batches of 3, padded.
"""

from __future__ import annotations

from typing import NamedTuple

from sglang_dflash.engine.draft.record import FULL, SLIDING
from sglang_dflash.pairs.tiny.pairs import Arm
from sglang_dflash.tools import recipe
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


FA3, FA4, TRTLLM, TRITON = map(attention, ("fa3", "fa4", "trtllm_mha", "triton"))
FLASHINFER = attention("flashinfer", draft="flashinfer")  # a draft with sliding layers would get another backend
TRTLLM_BOTH = attention("trtllm_mha", draft="trtllm_mha")
SM90_WIDTHS, SM100_WIDTHS = SM90 + RANDOM_WIDTHS, SM100 + RANDOM_WIDTHS


OF_THE_PAIR = ("--model-path", "--speculative-draft-model-path", "--speculative-num-draft-tokens", "--tp-size")


def on_card(name: str, card: str) -> tuple[tuple[str, ...], tuple[tuple[str, str], ...]]:
    """Return the flags of a recipe for a card, except those of its models, and the variable that emulates the card."""
    flags = recipe.flags_on(recipe.RECIPES[name], card)
    words = [word for flag in flags if flag.name not in OF_THE_PAIR for word in flag.words]
    return (*words, *GRAPHS), (("SGLANG_DFLASH_REHEARSE", recipe.CARDS[card].device),)


class Rehearsal(NamedTuple):
    flags: tuple[str, ...]
    env: tuple[tuple[str, str], ...] = SM90
    target: str = "hybrid"
    arm: Arm = Arm.PLUGIN
    full: bool = True  # only in `make test-full`
    draft_window: int | None = None
    draft_layers: tuple[str, ...] = ()
    both_ways: bool = False  # sliding layers are non-causal in the block
    second: bool = False  # the DFlash 2 draft
    # False: steps are not compared with the reference. The verify width varies, or the backend has another window.
    knows_steps: bool = True
    n_prompts: int = 8  # as many as the largest batch
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
    "fa3-graphs": Rehearsal((*FA3, *GRAPHS, *TRACK)),
    "fa3-prefill-graphs-pages-window": Rehearsal(
        (*FA3, *BREAKABLE, *PAGES, *TRACK, *window(64), *REQUEST_FLAGS), draft_window=64, full=False
    ),
    "fa3-graphs-beside-eager": Rehearsal((*FA3, *SMALL_GRAPHS, *CHUNKED)),
    "fa3-graphs-dense": Rehearsal((*FA3, *BREAKABLE), target="dense"),
    "fa3-graphs-pages-64": Rehearsal((*FA3, *GRAPHS, *PAGES_64)),
    "fa3-graphs-sliding": Rehearsal((*FA3, *GRAPHS), target="dense", draft_layers=(SLIDING, FULL)),
    "fa3-graphs-all-sliding": Rehearsal((*FA3, *GRAPHS, *TRACK), draft_layers=(SLIDING, SLIDING), draft_window=64),
    "fa3-graphs-widths": Rehearsal((*FA3, *BREAKABLE, *TRACK, *REQUEST_FLAGS), SM90_WIDTHS, knows_steps=False),
    "fa3-full-prefill-graphs-widths": Rehearsal(
        (*FA3, *FULL_PREFILL, *REQUEST_FLAGS), SM90_WIDTHS, target="dense", knows_steps=False
    ),
    "fa3-graphs-no-overlap": Rehearsal((*FA3, *GRAPHS, "--disable-overlap-schedule")),
    "fa3-graphs-two-ranks": Rehearsal((*FA3, *GRAPHS, *TRACK, "--tp-size", "2"), TWO_RANKS),
    "fa3-graphs-snapshot": Rehearsal((*FA3, *GRAPHS, *TRACK), SM90 + SNAPSHOT),
    "fa3-graphs-dflash2-as-published": Rehearsal(
        (*FA3, *BREAKABLE, *PAGES), target="dense", second=True, draft_layers=(SLIDING, SLIDING),
        both_ways=True, draft_window=64,
    ),
    "fa3-graphs-dflash2-two-ranks": Rehearsal((*FA3, *GRAPHS, *TRACK, "--tp-size", "2"), TWO_RANKS, second=True),
    "fa3-graphs-dflash2-kernels": Rehearsal((*FA3, *GRAPHS), INTERPRETED, second=True, n_prompts=4, max_new_tokens=32),
    "fa4-graphs-sliding-both-ways": Rehearsal(
        (*FA4, *GRAPHS, *PAGES_64), SM100, target="dense", draft_layers=(SLIDING, FULL), both_ways=True
    ),
    "flashinfer-graphs-dflash2": Rehearsal((*FLASHINFER, *GRAPHS, *TRACK), second=True),
    "trtllm-gen-graphs-dflash2": Rehearsal((*TRTLLM_BOTH, *GRAPHS, *PAGES, *TRACK), SM100, second=True),
    "triton-graphs-sliding-both-ways": Rehearsal(
        (*TRITON, *GRAPHS), target="dense", draft_layers=(SLIDING, FULL), both_ways=True, n_prompts=4, max_new_tokens=32
    ),
    "fa4-graphs": Rehearsal((*FA4, *BREAKABLE, *PAGES_64, *TRACK), SM100),
    "fa4-graphs-sliding-beside-eager": Rehearsal(
        (*FA4, *SMALL_GRAPHS), target="dense", draft_layers=(SLIDING, FULL)
    ),
    "fa4-graphs-window-widths": Rehearsal((*FA4, *GRAPHS, *PAGES_64, *window(64)), SM100_WIDTHS, knows_steps=False),
    "flashinfer-graphs-dense": Rehearsal((*FLASHINFER, *BREAKABLE), target="dense"),
    "flashinfer-graphs-pages-window": Rehearsal((*FLASHINFER, *GRAPHS, *PAGES, *TRACK, *window(64)), draft_window=64),
    "flashinfer-graphs-widths": Rehearsal((*FLASHINFER, *GRAPHS, *TRACK), SM90_WIDTHS, knows_steps=False),
    # FlashInfer's sliding layers attend to up to N - 1 tokens before the window, so steps may differ.
    "flashinfer-graphs-sliding": Rehearsal(
        (*FLASHINFER, *GRAPHS), target="dense", draft_layers=(SLIDING, FULL), knows_steps=False
    ),
    "flashinfer-graphs-beside-eager": Rehearsal((*FLASHINFER, *SMALL_GRAPHS, *CHUNKED)),
    "trtllm-xqa-graphs-beside-eager": Rehearsal((*TRTLLM, *SMALL_GRAPHS, *PAGES, *TRACK)),
    "trtllm-gen-graphs-sliding": Rehearsal(
        (*TRTLLM_BOTH, *GRAPHS, *PAGES), SM100, target="dense", draft_layers=(SLIDING, FULL)
    ),
    "trtllm-gen-graphs-window-widths": Rehearsal(
        (*TRTLLM_BOTH, *GRAPHS, *PAGES, *TRACK, *window(64)), SM100_WIDTHS, knows_steps=False
    ),
    "trtllm-and-a-draft-on-fa4": Rehearsal((*TRTLLM, *BREAKABLE, *PAGES_64, *TRACK), SM100),
    "fa3-and-a-draft-on-flashinfer": Rehearsal((*attention("fa3", draft="flashinfer"), *GRAPHS, *TRACK)),
    "triton-graphs": Rehearsal((*TRITON, *GRAPHS), n_prompts=4, max_new_tokens=32),
    "triton-graphs-widths": Rehearsal(
        (*TRITON, *GRAPHS), SM90_WIDTHS, knows_steps=False, n_prompts=4, max_new_tokens=32
    ),
    "triton-eager-pages-window": Rehearsal(
        (*TRITON, *EAGER, *PAGES, *window(64)), draft_window=64, n_prompts=4, max_new_tokens=32
    ),
    "flashinfer-and-a-draft-on-trtllm": Rehearsal(
        (*attention("flashinfer", draft="trtllm_mha"), *GRAPHS, *PAGES, *TRACK, *window(64)), SM100, draft_window=64,
        n_prompts=8, max_new_tokens=48,
    ),
    "fa3-graphs-streams": Rehearsal((*FA3, *GRAPHS, *REQUEST_FLAGS), STREAMS),
    "flashinfer-prefill-graphs-pages-streams": Rehearsal((*FLASHINFER, *BREAKABLE, *PAGES, *TRACK), STREAMS),
    # Captured forwards use two streams. Steps of one token, with the fused projection, alternate with whole blocks.
    "fa3-graphs-streams-1-and-16": Rehearsal(
        (*FA3, *SMALL_GRAPHS, *TRACK), (*STREAMS, ("SGLANG_DFLASH_WIDTHS", "1,16")), full=False,
        knows_steps=False, n_prompts=4, max_new_tokens=32,
    ),
    # The next two check stream order: one when the verify width changes, the other for the table of the draft's rings.
    "fa3-graphs-streams-widths": Rehearsal(
        (*FA3, *GRAPHS, *TRACK), STREAMS + RANDOM_WIDTHS, knows_steps=False, n_prompts=8
    ),
    "fa3-graphs-streams-window": Rehearsal((*FA3, *GRAPHS, *TRACK, *window(64)), STREAMS, draft_window=64, n_prompts=8),
    # Commands that `sglang-dflash recipe` prints for cards that people own.
    "a100-80-hybrid": Rehearsal(*on_card("qwen3.6-27b", "a100-80")),
    "rtx3090-dense": Rehearsal(*on_card("qwen3-8b", "rtx3090"), target="dense"),
    "rtx4090-hybrid": Rehearsal(*on_card("qwen3.6-27b-fp8", "rtx4090"), full=False),
    "l40s-dense-sliding": Rehearsal(*on_card("qwen3-8b", "l40s"), target="dense", draft_layers=(SLIDING, FULL)),
    "rtx5090-hybrid": Rehearsal(*on_card("qwen3.6-27b-nvfp4", "rtx5090")),
    "rtx-pro-6000-dense-sliding": Rehearsal(
        *on_card("qwen3-8b", "rtx-pro-6000"), target="dense", draft_layers=(SLIDING, FULL)
    ),
    "fa3-graphs-stock": Rehearsal((*FA3, *BREAKABLE), arm=Arm.STOCK),
}  # fmt: skip
