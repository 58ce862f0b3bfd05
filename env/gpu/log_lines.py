"""Parser of SGLang's log: lines of decode batches, and lines about memory."""

import re
from collections.abc import Sequence
from typing import NamedTuple

DECODE = re.compile(
    r"Decode batch.*?#running-req: (?P<requests>\d+), #(?:full )?token: (?P<tokens>\d+),.*?"
    r"(?:accept len: (?P<length>[\d.]+),.*?)?"
    r"gen throughput \(token/s\): (?P<speed>[\d.]+), #queue-req: (?P<waiting>\d+)"
)
MEMORY = re.compile(
    r"Load weight (?:begin|end)|(?:KV|Mamba) Cache is allocated|Memory pool end|(?:CUDA|CPU) graph (?:begin|end)|"
    r"recurrent state: |GiB more for graphs|KV size|max_total_num_tokens="
)
STAMP = re.compile(r"^\[[^\]]*\] ")
LONGEST = 300  # characters of a line about memory


class Interval(NamedTuple):
    """One line of a decode batch: averages over the steps since the line before."""

    requests: int
    acceptance: float  # tokens per step and request
    tokens_per_s: float

    @property
    def step_ms(self) -> float:
        """Return the milliseconds per step."""
        return 1000 * self.requests * self.acceptance / self.tokens_per_s


def intervals(log: str, requests: int) -> list[Interval]:
    """Return the intervals in which `requests` ran and none waited, without the first and any after the answers' end.

    The first interval includes the prefill and the idle time before it. After the end of all answers the pools hold no
    token.
    """
    parsed = [one for line in log.splitlines() if (one := DECODE.search(line)) and int(one["requests"]) == requests]
    return [
        Interval(requests, float(one["length"] or 1), float(one["speed"]))
        for one in parsed[1:]
        if one["waiting"] == "0" and one["tokens"] != "0" and float(one["speed"]) > 0
    ]


def about_memory(log: str) -> list[str]:
    """Return the log's lines about memory, without their time."""
    return [STAMP.sub("", line)[:LONGEST] for line in log.splitlines() if STAMP.match(line) and MEMORY.search(line)]


def shared_layers(log: str, mark: str) -> int:
    """Return how many layers print `mark`."""
    return log.count(mark)


def mean_acceptance(found: Sequence[Interval]) -> float | None:
    return sum(one.acceptance for one in found) / len(found) if found else None
