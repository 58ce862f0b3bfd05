"""Custom logit processors at every slot of the block.

A processor gets the logits of the requests that use it, and their parameters. These may include the request itself, and
so its output. At a slot, the output must be the committed tokens and the drafts up to the slot. They may be only on the
device, so they are copied when a processor reads them, and only this read waits for the device.

This is exact for functions of logits, parameters and output. A processor with state between calls is also called for
slots that are rejected later, which SGLang's contract does not exclude.
"""

from __future__ import annotations

from array import array
from collections.abc import Callable
from functools import cache, partial

import torch
from sglang.srt.layers.sampler import apply_custom_logit_processor
from sglang.srt.managers.schedule_batch import Req, ScheduleBatch

from sglang_dflash.stages.sampling import over_slots
from sglang_dflash.step import Plan

REQUEST = "__req__"  # key of the request among a processor's parameters in SGLang


class Processors:
    """Custom logit processors of a server's requests."""

    def __init__(self) -> None:
        # Tokens of the last step, which the scheduler may not have added to the requests yet.
        self.last_reqs: list[Req] = []
        self.last_committed_BN = self.last_n_committed_B = torch.empty(0)

    def keep_tokens(self, batch: ScheduleBatch, committed_BN: torch.Tensor, n_committed_B: torch.Tensor) -> None:
        """Keep a step's tokens, int64 [B, N], the first `n_committed_B` committed, until the scheduler has them."""
        if batch.sampling_info.has_custom_logit_processor:
            self.last_reqs = list(batch.reqs)
            self.last_committed_BN, self.last_n_committed_B = committed_BN, n_committed_B

    def apply(self, batch: ScheduleBatch, plan: Plan, tokens_BN: torch.Tensor, logits_TV: torch.Tensor) -> None:
        """Run every request's processor over its slots, in place."""
        info = over_slots(batch.sampling_info, plan.width)
        read_texts = cache(partial(self._texts, batch, plan, tokens_BN))
        info.custom_params = [
            self._at_slot(params, batch.reqs[row // plan.width], row, read_texts)
            for row, params in enumerate(info.custom_params)
        ]
        apply_custom_logit_processor(logits_TV, info)

    def _at_slot(self, params: dict | None, req: Req, row: int, read_texts: Callable[[], list[array]]) -> dict | None:
        if params is None or REQUEST not in params:
            return params
        return params | {REQUEST: ReqAtSlot.of(req, lambda: read_texts()[row])}

    def _texts(self, batch: ScheduleBatch, plan: Plan, tokens_BN: torch.Tensor) -> list[array]:
        """Return the output at every slot of every request. Waits for the device."""
        last = dict(zip(self.last_reqs, committed(self.last_committed_BN, self.last_n_committed_B), strict=True))
        texts = []
        for req, prefix_len, tokens in zip(batch.reqs, plan.prefix_len_B.tolist(), tokens_BN.tolist(), strict=True):
            text = req.output_ids[:]
            n_missing = prefix_len + 1 - len(req.origin_input_ids) - len(text)
            newest = last.get(req, [])
            assert 0 <= n_missing <= len(newest), "the scheduler is at most one step behind"
            text.extend(newest[len(newest) - n_missing :])
            texts.append(text)
            for draft in tokens[1:]:
                text = text + array(text.typecode, [draft])
                texts.append(text)
        return texts


def committed(committed_BN: torch.Tensor, n_committed_B: torch.Tensor) -> list[list[int]]:
    """Return the committed tokens of each request."""
    return [row[:n] for row, n in zip(committed_BN.tolist(), n_committed_B.tolist(), strict=True)]


class ReqAtSlot(Req):
    """Copy of a request, with the output as if the block were committed up to a slot."""

    _read_text: Callable[[], array]

    @classmethod
    def of(cls, req: Req, read_text: Callable[[], array]) -> ReqAtSlot:
        """Return a copy of `req` with the output that `read_text` returns."""
        view = cls.__new__(cls)
        view.__dict__.update(req.__dict__)
        view._read_text = read_text
        return view

    @property
    def output_ids(self) -> array:
        """Return the output up to the slot."""
        return self._read_text()
