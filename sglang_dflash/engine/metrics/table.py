"""Table of all metrics of this plugin, `METRICS`: name, type, unit, labels, meaning, and signs of bad values.

`meter.py` exports the metrics, `docs/metrics.md` shows the table, and `assets/dashboard.json` plots all metrics.
"""

from enum import StrEnum
from typing import NamedTuple

from sglang_dflash.engine.metrics.stage_times import SAMPLE_EVERY, STAGES

PREFIX = "sglang:dflash_"


class Kind(StrEnum):
    COUNTER = "counter"
    GAUGE = "gauge"
    HISTOGRAM = "histogram"


class Metric(NamedTuple):
    """One metric of this plugin.

    Attributes:
        name: name without `PREFIX`; for a counter, with the `_total` that Prometheus adds.
        unit: unit of the value.
        labels: labels in addition to SGLang's.
        meaning: documentation in Prometheus.
        cure: signs of a bad value, and the remedy.
    """

    name: str
    kind: Kind
    unit: str
    labels: tuple[str, ...]
    meaning: str
    cure: str

    def exported(self) -> set[str]:
        """Return the names under which Prometheus stores the metric, for use in queries."""
        suffixes = ("_bucket", "_sum", "_count") if self.kind is Kind.HISTOGRAM else ("",)
        return {f"{PREFIX}{self.name}{suffix}" for suffix in suffixes}


METRICS = (
    Metric(
        "committed_tokens",
        Kind.HISTOGRAM,
        "tokens",
        (),
        "Tokens that a request commits in a step: accepted drafts and the bonus. `_count` counts a step once for "
        "each of its requests.",
        "Mean near 1: `steps_total` is mostly at width 1, or see "
        "[troubleshooting](troubleshooting.md#symptoms-without-a-message) and `cut_blocks_total`.",
    ),
    Metric(
        "verified_drafts_total",
        Kind.COUNTER,
        "drafts",
        ("position",),
        "Verified drafts, by position in the block. Position 1 is the first draft.",
        "Late positions do not grow: the verify width is below the block size, see `steps_total`.",
    ),
    Metric(
        "accepted_drafts_total",
        Kind.COUNTER,
        "drafts",
        ("position",),
        "Accepted drafts, by position. Divided by `verified_drafts_total`: acceptance rate by position.",
        "Low at position 1: see `committed_tokens`. Low only at late positions: normal. A smaller "
        "`--speculative-num-draft-tokens` makes drafting cheaper.",
    ),
    Metric(
        "steps_total",
        Kind.COUNTER,
        "steps",
        ("width",),
        "Decode steps by verify width, the number of verified tokens of a block. Width 1 is a step without drafts.",
        "Mostly 1 under load: intended, because drafts cost more time there than they save. Mostly 1 at low load: see "
        "`committed_tokens`, and the step times of `sglang-dflash check --server`.",
    ),
    Metric(
        "copied_blocks_total",
        Kind.COUNTER,
        "blocks",
        ("match",),
        "Blocks with an n-gram copy (`SGLANG_DFLASH_COPY`), by the number of matching tokens.",
        "Does not grow: answers do not repeat their context, drafts are as good as copies, or copies are off.",
    ),
    Metric(
        "copied_drafts_total",
        Kind.COUNTER,
        "drafts",
        ("match",),
        "Accepted tokens of n-gram copies. Divided by `copied_blocks_total`: accepted tokens per copy.",
        "Few per copy: copies are rejected. Requests then soon stop copying.",
    ),
    Metric(
        "stage_seconds",
        Kind.HISTOGRAM,
        "seconds",
        ("stage",),
        f"Time of a step's stages {', '.join(STAGES)}, measured in one step of {SAMPLE_EVERY}. On a GPU: device time "
        "between CUDA events. On a CPU: host time.",
        "`draft` above a third of `verify`, with a large target: use a smaller window or another "
        "`--speculative-draft-attention-backend`. `choose` in milliseconds: caused by grammars, custom logit "
        "processors, or sampling in large batches. All stages high while the GPU idles: the host is "
        "slow, or no graph was captured for this batch size (`--cuda-graph-max-bs-decode`).",
    ),
    Metric(
        "cut_blocks_total",
        Kind.COUNTER,
        "blocks",
        (),
        "Blocks drafted with less context than the draft window holds, because a cached prefix is not in the "
        "request's ring buffer. 0 without a draft window.",
        "Near `committed_tokens_count`, the number of all blocks: drop `--speculative-draft-window-size`.",
    ),
    Metric(
        "cut_committed_tokens_total",
        Kind.COUNTER,
        "tokens",
        (),
        "Tokens committed in the blocks of `cut_blocks_total`. Divided by `cut_blocks_total`: acceptance length in "
        "these blocks.",
        "See `cut_blocks_total`.",
    ),
    Metric(
        "pool_size",
        Kind.GAUGE,
        "rings, states",
        ("pool",),
        "Slots of a pool. `rings`: ring buffers of the draft's context K/V (with a draft window). `states`: recurrent "
        "states (hybrid targets).",
        "Too small: `sglang-dflash check --gpu-memory GIB` with the launch flags names the limit and the flag that "
        "raises it.",
    ),
    Metric(
        "pool_in_use",
        Kind.GAUGE,
        "rings, states",
        ("pool",),
        "Slots held by requests. States held only by the prefix cache are not counted.",
        "Rings equal to `pool_size` while requests wait: raise `--max-running-requests`. On hybrid targets SGLang also "
        "limits requests to a fifth of the states by default. Then raise `--max-mamba-cache-size`.",
    ),
)


def table() -> str:
    """Return the metrics as a Markdown table, for `docs/metrics.md`."""
    rows = [
        f"| metric, after `{PREFIX}` | type | unit | labels | meaning | when it is bad |",
        "|---|---|---|---|---|---|",
    ]
    for m in METRICS:
        labels = ", ".join(f"`{label}`" for label in m.labels)
        rows.append(f"| `{m.name}` | {m.kind} | {m.unit} | {labels} | {m.meaning} | {m.cure} |")
    return "\n".join(rows) + "\n"
