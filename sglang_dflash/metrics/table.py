"""Table of all metrics: name, type, unit, labels, meaning, and the remedy for bad values.

`meter.py` exports them, `docs/metrics.md` shows the table, and `assets/dashboard.json` plots all of them.
"""

from enum import StrEnum
from typing import NamedTuple

from sglang_dflash.metrics.stage_times import SAMPLE_EVERY, STAGES

PREFIX = "sglang:dflash_"


class Kind(StrEnum):
    COUNTER = "counter"
    GAUGE = "gauge"
    HISTOGRAM = "histogram"


class Metric(NamedTuple):
    """One metric of this plugin.

    Attributes:
        name: without `PREFIX`; a counter's includes the `_total` that Prometheus adds.
        unit: of the value.
        labels: in addition to SGLang's.
        tells: its meaning.
        cure: signs of a bad value, and the remedy.
    """

    name: str
    kind: Kind
    unit: str
    labels: tuple[str, ...]
    tells: str
    cure: str

    def exported(self) -> set[str]:
        """Return the names that a query may use."""
        suffixes = ("_bucket", "_sum", "_count") if self.kind is Kind.HISTOGRAM else ("",)
        return {f"{PREFIX}{self.name}{suffix}" for suffix in suffixes}


METRICS = (
    Metric(
        "committed_tokens",
        Kind.HISTOGRAM,
        "tokens",
        (),
        "What a request commits in a step: its accepted drafts and the bonus. `_count` is requests times steps.",
        "A mean near 1: drafts fail from the first on. The draft is another target's or was trained on other text "
        "(another language, thinking off), or contexts begin cut, see `cut_blocks_total`.",
    ),
    Metric(
        "verified_drafts_total",
        Kind.COUNTER,
        "drafts",
        ("position",),
        "Drafts the target has checked, by slot of the block (1 is next to the anchor).",
        "Late positions at rest: the width is narrower than the block, see `steps_total`.",
    ),
    Metric(
        "accepted_drafts_total",
        Kind.COUNTER,
        "drafts",
        ("position",),
        "Drafts that were accepted, and all before them. Divided by `verified_drafts_total`: acceptance by position.",
        "Low from position 1 on: see `committed_tokens`. Low at the end only: normal; a shorter "
        "`--speculative-num-draft-tokens` drafts for less.",
    ),
    Metric(
        "steps_total",
        Kind.COUNTER,
        "steps",
        ("width",),
        "Decode steps by how many tokens of each block were verified; 1 is a step without drafts.",
        "Mostly 1 under load: verifying costs more than it commits, which is the width's answer to a full machine; "
        "at low load see `committed_tokens`, and `check --server` for what steps were timed at.",
    ),
    Metric(
        "copied_blocks_total",
        Kind.COUNTER,
        "blocks",
        ("match",),
        "Blocks that were continued by a copy of the request's own text, by how many tokens matched before it "
        "(`SGLANG_DFLASH_COPY`).",
        "At rest: texts do not repeat themselves, or copies are off.",
    ),
    Metric(
        "copied_drafts_total",
        Kind.COUNTER,
        "drafts",
        ("match",),
        "Copied drafts that were accepted. Divided by `copied_blocks_total`: what a copy is worth.",
        "Few for a block: copies are tried and fail; each request gives them up after some steps.",
    ),
    Metric(
        "stage_seconds",
        Kind.HISTOGRAM,
        "seconds",
        ("stage",),
        f"Time of a step's {', '.join(STAGES)}; one step in {SAMPLE_EVERY} is measured. On a GPU the device's, between "
        "events that are read later; on a CPU the host's.",
        "Draft above a third of verify: shorten the draft window or change `--speculative-draft-attention-backend`. "
        "Choose in milliseconds: grammars or penalties take it. All high while the GPU idles: the host is slow, or "
        "graphs were not captured (`--cuda-graph-max-bs-decode`).",
    ),
    Metric(
        "cut_blocks_total",
        Kind.COUNTER,
        "blocks",
        (),
        "Blocks drafted with less context than the draft's window, because a prefix found in the radix cache is not in "
        "the request's ring. Stays 0 without a window.",
        "A large share of `committed_tokens_count`, and few tokens in them: answers are shorter than the window takes "
        "to fill; serve without `--speculative-draft-window-size`.",
    ),
    Metric(
        "cut_committed_tokens_total",
        Kind.COUNTER,
        "tokens",
        (),
        "Tokens committed in those blocks. Divided by `cut_blocks_total`: what a step is worth while a ring warms up.",
        "See `cut_blocks_total`.",
    ),
    Metric(
        "pool_size",
        Kind.GAUGE,
        "rings, states",
        ("pool",),
        "What there is: `rings`, the draft's context K/V per request (with a window); `states`, recurrent states "
        "(hybrid targets).",
        "`sglang-dflash check` says what bounds it and which flag lifts it.",
    ),
    Metric(
        "pool_in_use",
        Kind.GAUGE,
        "rings, states",
        ("pool",),
        "How many of them requests hold; states that only the prefix cache holds are free for the asking.",
        "At `pool_size` while requests wait: `--max-running-requests` bounds rings, `--max-mamba-cache-size` states.",
    ),
)


def table() -> str:
    """Return the metrics as a Markdown table, for `docs/metrics.md`."""
    rows = [
        f"| metric, after `{PREFIX}` | type | unit | labels | what it tells | when it is bad |",
        "|---|---|---|---|---|---|",
    ]
    rows += [
        f"| `{m.name}` | {m.kind} | {m.unit} | {', '.join(f'`{label}`' for label in m.labels)} | {m.tells} | {m.cure} |"
        for m in METRICS
    ]
    return "\n".join(rows) + "\n"
