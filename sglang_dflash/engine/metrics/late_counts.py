"""Counters on a device, copied to the host with a delay, so that no reader waits for the device."""

from __future__ import annotations

from typing import Any

import torch
from sglang.srt.utils import async_d2h


class LateCounts:
    """Reader of counters that only grow. Invariant: all results of `more` so far add up to `known`."""

    def __init__(self, counts: torch.Tensor) -> None:
        """`counts`: int32 counters, which wrap around modulo 2^32."""
        self.counts = counts
        self.known = torch.zeros(counts.shape, dtype=torch.int64)
        self.asked: tuple[torch.Tensor, Any] | None = None  # copy to the host in flight, and its event

    def more(self) -> torch.Tensor:
        """Return the increase since the last finished copy, int64, on the host; zeros while a copy is in flight."""
        if self.counts.is_cpu:
            return self._increase(self.counts)
        if self.asked is None:
            event = torch.get_device_module(self.counts.device).Event()
            self.asked = async_d2h(self.counts), event
            event.record()
        on_host, event = self.asked
        if not event.query():
            return torch.zeros_like(self.known)
        self.asked = None
        return self._increase(on_host)

    def now(self) -> torch.Tensor:
        """Return the increase up to now, int64, on the host. The host waits for the device."""
        self.asked = None  # what a copy in flight would add is part of the result
        return self._increase(self.counts.cpu())

    def _increase(self, counts: torch.Tensor) -> torch.Tensor:
        added = (counts - self.known) % 2**32
        self.known = self.known + added
        return added
