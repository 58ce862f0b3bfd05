"""Custom logit processors at every slot of the block.

A processor receives the logits and the parameters of the requests that use it. The parameters may include the request
object. At slot i the request's `output_ids` must be the committed output, anchor included, and drafts 1..i. Some of
these tokens may exist only on the device. They are copied to the host when a processor reads `output_ids`. Nothing else
in this module waits for the device.

This is exact for processors that are functions of logits, parameters and output. A processor is also called for slots
whose drafts are rejected later. This matters only if the processor keeps state between calls, which SGLang allows.
"""

from __future__ import annotations

from array import array
from collections.abc import Callable
from functools import cache, partial

import torch
from sglang.srt.layers.sampler import apply_custom_logit_processor
from sglang.srt.managers.schedule_batch import Req, ScheduleBatch

from sglang_dflash.engine.stages.sampling import over_slots
from sglang_dflash.engine.step import Plan

REQUEST = "__req__"  # SGLang's key of the request object in a processor's parameters


class Processors:
    """Custom logit processors of a server's requests."""

    def __init__(self) -> None:
        # Requests and tokens of the last step. The scheduler may not yet have added the tokens to the requests.
        self.last_reqs: list[Req] = []
        self.last_committed_BN = self.last_n_committed_B = torch.empty(0)

    def keep_tokens(self, batch: ScheduleBatch, committed_BN: torch.Tensor, n_committed_B: torch.Tensor) -> None:
        """Keep a step's tokens for the next step: the first `n_committed_B` of each row of `committed_BN`, int64.

        Batches without a custom logit processor are not kept.
        """
        if batch.sampling_info.has_custom_logit_processor:
            self.last_reqs = list(batch.reqs)
            self.last_committed_BN, self.last_n_committed_B = committed_BN, n_committed_B

    def apply(self, batch: ScheduleBatch, plan: Plan, tokens_BN: torch.Tensor, logits_TV: torch.Tensor) -> None:
        """Run each request's processor on the logits of its slots, in place.

        Args:
            tokens_BN: int64, verified tokens: anchor and drafts.
            logits_TV: T = B * N.
        """
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
        """Return, for every slot of every request, the request's output up to the slot. Waits for the device.

        Requests whose processors do not read the output have empty texts: their last tokens may not have been kept.
        """
        last = dict(zip(self.last_reqs, committed(self.last_committed_BN, self.last_n_committed_B), strict=True))
        texts: list[array] = []
        params = batch.sampling_info.custom_params
        for req, read, prefix_len, tokens in zip(
            batch.reqs, params, plan.prefix_len_B.tolist(), tokens_BN.tolist(), strict=True
        ):
            if REQUEST not in (read or {}):
                texts += [array("q")] * len(tokens)
                continue
            text = req.output_ids[:]
            n_missing = prefix_len + 1 - len(req.origin_input_ids) - len(text)
            newest = last.get(req, [])
            assert 0 <= n_missing <= len(newest), (
                f"{n_missing} tokens of {req.rid} are missing, of {len(newest)} new ones"
            )
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
    """Copy of a request whose output ends with the drafts up to a slot, as if they were committed."""

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
