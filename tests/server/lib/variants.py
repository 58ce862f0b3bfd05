"""Server configurations of `test_exact.py`: each is one way to run SGLang with this plugin's worker."""

from typing import NamedTuple

from sglang_dflash.engine.draft.record import FULL, SLIDING
from tests.tools.parameters import REQUEST_FLAGS


class Variant(NamedTuple):
    target: str
    flags: tuple[str, ...] = ()
    env: tuple[tuple[str, str], ...] = ()
    full: bool = False  # only in `make test-full`
    block_size: int | None = None  # tokens, as given by a flag; None: the draft's own
    draft_window: int | None = None  # tokens; with None the draft attends to its whole context
    draft_layers: tuple[str, ...] = ()  # layer types of the draft; (): as in training
    both_ways: bool = False  # sliding layers are non-causal in the block
    second: bool = False  # the DFlash 2 draft
    # False: steps are not compared with the reference. Retraction repeats steps, a window is rounded up to pages, or
    # the verify width varies.
    knows_steps: bool = True
    traces_widths: bool = False  # the server writes a trace: width and accepted drafts of each step

    @property
    def caches_inside_text(self) -> bool:
        """True if the prefix cache can end inside generated text.

        With a draft window and pages, an attention-only target prefills the last 64 tokens again, in whole pages. Then
        less of the generated text stays cached. A hybrid target caches it only with a track interval.
        """
        if self.target == "dense":
            return not ({*PAGES, *window(64)} <= {*self.flags})
        return "--mamba-track-interval" in self.flags


WINDOW = 64  # sliding window of draft layers, tokens
NO_OVERLAP = ("--disable-overlap-schedule",)
CHUNKED = ("--chunked-prefill-size", "64")
# SGLang binds each CPU rank to a NUMA node, and needs this variable if there are more ranks than nodes.
TWO_NODES = (("SGLANG_CPU_OMP_THREADS_BIND", "0|1"),)
TRACK = ("--mamba-track-interval", "64")
PAGES = ("--page-size", "16")
METRICS = ("--enable-metrics",)
RETRACT = (("SGLANG_TEST_RETRACT", "1"),)
RANDOM_WIDTHS = (("SGLANG_DFLASH_WIDTHS", "random"),)


def strategy(name: str) -> tuple[str, ...]:
    return "--mamba-radix-cache-strategy", name


def window(n_tokens: int, flag: str = "--speculative-draft-window-size") -> tuple[str, ...]:
    return flag, str(n_tokens)


# Rows without `full` are in `make test-ci`: an attention-only target, random widths without overlap, DFlash 2, and
# "hybrid". "hybrid" is the last of them, because other test modules go on to use its server.
VARIANTS = {
    "hybrid-no-buffer-sync-chunked": Variant("hybrid", (*strategy("no_buffer"), *NO_OVERLAP, *CHUNKED), full=True),
    "dense-pages-chunked-retract": Variant(
        "dense", (*PAGES, *CHUNKED, *REQUEST_FLAGS), RETRACT + RANDOM_WIDTHS, knows_steps=False
    ),
    "hybrid-random-widths": Variant(
        "hybrid", (*NO_OVERLAP, *TRACK), RANDOM_WIDTHS, knows_steps=False, traces_widths=True
    ),
    "hybrid-dflash2": Variant("hybrid", TRACK, second=True),
    "hybrid": Variant("hybrid", (*TRACK, *REQUEST_FLAGS, *METRICS)),
    "hybrid-pages-chunked": Variant("hybrid", (*PAGES, *CHUNKED, *TRACK), full=True),
    "hybrid-retract": Variant("hybrid", TRACK, RETRACT, full=True, knows_steps=False),
    "hybrid-window": Variant("hybrid", (*TRACK, *window(64)), full=True, draft_window=64),
    "hybrid-block-8": Variant("hybrid", ("--speculative-num-draft-tokens", "8"), full=True, block_size=8),
    "dense": Variant("dense", full=True),
    "dense-window": Variant("dense", window(64, "--speculative-dflash-draft-window-size"), full=True, draft_window=64),
    "dense-window-random-widths": Variant(
        "dense", (*window(64), *REQUEST_FLAGS), RANDOM_WIDTHS, full=True, draft_window=64, knows_steps=False,
        traces_widths=True,
    ),
    "dense-window-pages": Variant("dense", (*window(64), *PAGES), RANDOM_WIDTHS, full=True, knows_steps=False),
    "hybrid-all-sliding": Variant("hybrid", TRACK, full=True, draft_layers=(SLIDING, SLIDING), draft_window=WINDOW),
    "dense-all-sliding": Variant(
        "dense", (*NO_OVERLAP, *CHUNKED), full=True, draft_layers=(SLIDING, SLIDING), draft_window=WINDOW
    ),
    "dense-sliding-both-ways": Variant("dense", full=True, draft_layers=(SLIDING, FULL), both_ways=True),
    "hybrid-dflash2-random-widths": Variant(
        "hybrid", TRACK, RANDOM_WIDTHS, full=True, second=True, knows_steps=False, traces_widths=True
    ),
    "dense-dflash2-as-published": Variant(
        "dense", ("--speculative-num-draft-tokens", "8"), full=True, second=True, draft_layers=(SLIDING, SLIDING),
        both_ways=True, draft_window=WINDOW, block_size=8,
    ),
    "hybrid-chosen-widths": Variant(
        "hybrid", (*NO_OVERLAP, *TRACK), (("SGLANG_DFLASH_WIDTHS", "auto"),), full=True, knows_steps=False,
        traces_widths=True,
    ),
    "hybrid-lazy-random-widths": Variant(
        "hybrid", (*strategy("extra_buffer_lazy"), *PAGES, *TRACK), RANDOM_WIDTHS, full=True, knows_steps=False,
        traces_widths=True,
    ),
    "hybrid-snapshot-random-widths": Variant(
        "hybrid", TRACK, (*RANDOM_WIDTHS, ("SGLANG_DFLASH_GDN_STATE", "snapshot")), full=True, knows_steps=False,
        traces_widths=True,
    ),
    "hybrid-snapshot": Variant("hybrid", TRACK, (("SGLANG_DFLASH_GDN_STATE", "snapshot"),), full=True),
}  # fmt: skip
