"""Table of all metrics of this plugin, `METRICS`: name, type, unit, labels, meaning, and signs of bad values.

`meter.py` exports the metrics, `docs/metrics.md` shows the table, and `assets/dashboard.json` plots all metrics.
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
        name: without `PREFIX`; for a counter, with the `_total` that Prometheus adds.
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
        "Tokens that a request commits in a step: accepted drafts and the bonus. `_count` is requests times steps.",
        "A mean near 1: the first draft already fails. The draft belongs to another target or was trained on other "
        "text (another language, thinking off), or contexts are cut, see `cut_blocks_total`.",
    ),
    Metric(
        "verified_drafts_total",
        Kind.COUNTER,
        "drafts",
        ("position",),
        "Verified drafts, by slot of the block (1 is next to the anchor).",
        "Late positions constant: the width is narrower than the block, see `steps_total`.",
    ),
    Metric(
        "accepted_drafts_total",
        Kind.COUNTER,
        "drafts",
        ("position",),
        "Drafts accepted with all drafts before them. Divided by `verified_drafts_total`: acceptance by position.",
        "Low from position 1 on: see `committed_tokens`. Low at the end only: normal; a shorter "
        "`--speculative-num-draft-tokens` drafts for less.",
    ),
    Metric(
        "steps_total",
        Kind.COUNTER,
        "steps",
        ("width",),
        "Decode steps by how many tokens of each block were verified; 1 is a step without drafts.",
        "Mostly 1 under load: intended, since verification then costs more time than it saves. At low load see "
        "`committed_tokens`, and the step times of `sglang-dflash check --server`.",
    ),
    Metric(
        "copied_blocks_total",
        Kind.COUNTER,
        "blocks",
        ("match",),
        "Blocks continued by an n-gram copy (`SGLANG_DFLASH_COPY`), by the number of tokens that matched before it.",
        "Constant: texts do not repeat themselves, or copies are off.",
    ),
    Metric(
        "copied_drafts_total",
        Kind.COUNTER,
        "drafts",
        ("match",),
        "Copied drafts that were accepted. Divided by `copied_blocks_total`: accepted tokens per copy.",
        "Few per block: copies fail; each request stops copying after some steps.",
    ),
    Metric(
        "stage_seconds",
        Kind.HISTOGRAM,
        "seconds",
        ("stage",),
        f"Time of a step's {', '.join(STAGES)}; one step in {SAMPLE_EVERY} is measured. On a GPU device time, "
        "between CUDA events; on a CPU host time.",
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
        "the request's ring buffer. Stays 0 without a window.",
        "A large share of `committed_tokens_count`, and few tokens in them: answers are shorter than the window takes "
        "to fill; serve without `--speculative-draft-window-size`.",
    ),
    Metric(
        "cut_committed_tokens_total",
        Kind.COUNTER,
        "tokens",
        (),
        "Tokens committed in those blocks. Divided by `cut_blocks_total`: tokens per step while a ring buffer fills.",
        "See `cut_blocks_total`.",
    ),
    Metric(
        "pool_size",
        Kind.GAUGE,
        "rings, states",
        ("pool",),
        "Slots of a pool: `rings`, ring buffers of the draft's context K/V (with a window); `states`, recurrent states "
        "(hybrid targets).",
        "Too few: `sglang-dflash check --gpu-memory GIB` names the limit and the flag that raises it.",
    ),
    Metric(
        "pool_in_use",
        Kind.GAUGE,
        "rings, states",
        ("pool",),
        "Slots that requests hold. States that only the prefix cache holds are not counted.",
        "At `pool_size` while requests wait: `--max-running-requests` bounds rings, `--max-mamba-cache-size` states.",
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
