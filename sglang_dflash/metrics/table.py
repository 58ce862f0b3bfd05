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
        "Tokens that a request commits in a step: accepted drafts and the bonus. Its mean is the acceptance length.",
        "Mean near 1: the draft belongs to another target or was trained on other text, or see `cut_blocks_total`.",
    ),
    Metric(
        "verified_drafts_total",
        Kind.COUNTER,
        "drafts",
        ("position",),
        "Drafts that the target verified, by slot of the block (1 follows the anchor).",
        "No growth at late positions: small widths, see `steps_total`.",
    ),
    Metric(
        "accepted_drafts_total",
        Kind.COUNTER,
        "drafts",
        ("position",),
        "Accepted drafts. Divide by `verified_drafts_total` for acceptance by position.",
        "Low from position 1 on: see `committed_tokens`. Low at the end only: normal; a smaller "
        "`--speculative-num-draft-tokens` saves draft time.",
    ),
    Metric(
        "steps_total",
        Kind.COUNTER,
        "steps",
        ("width",),
        "Decode steps by verified tokens per block; 1 is a step without drafts.",
        "Mostly 1 under load: verification costs more than it gains, which is normal. Mostly 1 at low load: see "
        "`committed_tokens`, and step times in `check --server`.",
    ),
    Metric(
        "copied_blocks_total",
        Kind.COUNTER,
        "blocks",
        ("match",),
        "Blocks with an n-gram copy, by matched tokens (`SGLANG_DFLASH_COPY`).",
        "No growth: texts do not repeat, or copies are off.",
    ),
    Metric(
        "copied_drafts_total",
        Kind.COUNTER,
        "drafts",
        ("match",),
        "Accepted copied drafts. Divide by `copied_blocks_total` for the value of a copy.",
        "Few per block: copies fail; each request stops copying after some steps.",
    ),
    Metric(
        "stage_seconds",
        Kind.HISTOGRAM,
        "seconds",
        ("stage",),
        f"Time of {', '.join(STAGES)} in one step of {SAMPLE_EVERY}: device time on a GPU, host time on a CPU.",
        "Draft above a third of verify: set a draft window or change `--speculative-draft-attention-backend`. Choose "
        "in milliseconds: grammars or penalties. All high on an idle GPU: slow host, or missing graphs "
        "(`--cuda-graph-max-bs-decode`).",
    ),
    Metric(
        "cut_blocks_total",
        Kind.COUNTER,
        "blocks",
        (),
        "Blocks drafted with less context than the draft window, because a cached prefix is not in the ring buffer.",
        "A large share of `committed_tokens_count`, with few tokens: serve without `--speculative-draft-window-size`.",
    ),
    Metric(
        "cut_committed_tokens_total",
        Kind.COUNTER,
        "tokens",
        (),
        "Tokens committed in those blocks. Divide by `cut_blocks_total` for their acceptance length.",
        "See `cut_blocks_total`.",
    ),
    Metric(
        "pool_size",
        Kind.GAUGE,
        "rings, states",
        ("pool",),
        "Capacity: `rings`, ring buffers of the draft's context K/V; `states`, recurrent states.",
        "`sglang-dflash check` names the limit and the flag that raises it.",
    ),
    Metric(
        "pool_in_use",
        Kind.GAUGE,
        "rings, states",
        ("pool",),
        "Rings or states held by requests. States held only by the prefix cache are free.",
        "At `pool_size` while requests wait: `--max-running-requests` limits rings, `--max-mamba-cache-size` states.",
    ),
)


def table() -> str:
    """Return the metrics as a Markdown table, for `docs/metrics.md`."""
    rows = [
        f"| metric, after `{PREFIX}` | type | unit | labels | meaning | bad values |",
        "|---|---|---|---|---|---|",
    ]
    rows += [
        f"| `{m.name}` | {m.kind} | {m.unit} | {', '.join(f'`{label}`' for label in m.labels)} | {m.tells} | {m.cure} |"
        for m in METRICS
    ]
    return "\n".join(rows) + "\n"
