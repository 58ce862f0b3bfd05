"""Penalties and min_new_tokens, from counts of each request's output tokens on the device.

SGLang's penalizers count one token per step, from the host. With speculation a step commits several tokens, and the
last step's tokens are only on the device. Invariant after every step: counts_RV[row, v] is the number of occurrences of
token v in the output of the row's request, next anchor included. A request with a penalty (here also min_new_tokens)
gets a row of counts in its prefill. Other requests cost nothing. No counts are allocated before the first request with
a penalty.

When a retracted request is prefilled again, its output so far is part of the prefill, and is counted anew. A decode
server counts a request's output when the request joins a batch, because another server has prefilled it.
"""

from __future__ import annotations

import logging
from collections.abc import Iterable
from typing import NamedTuple
from weakref import WeakKeyDictionary

import torch
from sglang.srt.managers.schedule_batch import Req, ScheduleBatch
from sglang.srt.utils import async_h2d
from sglang_dflash_kernels.accept import Accepted
from sglang_dflash_kernels.penalise import Asked, additive, penalise_, scaling

from sglang_dflash.engine import saver
from sglang_dflash.engine.step import Plan

logger = logging.getLogger(__name__)

FEWEST_ROWS = 8  # number of rows in the first allocation of `counts_RV`


class Asking(NamedTuple):
    """Parameters and prompt lengths of the P requests in a batch that have a penalty."""

    asked: Asked
    prompt_len_P: torch.Tensor  # int64
    reqs: list[Req]
    n_retractions: list[int]  # number of retractions of each request in `reqs` when this object was made


class Penalties:
    """Token counts and penalties of the requests with a penalty."""

    def __init__(self, vocab_size: int, device: torch.device) -> None:
        self.counts_RV = torch.zeros(0, vocab_size, dtype=torch.int32, device=device)
        self.row_of: WeakKeyDictionary[Req, int] = WeakKeyDictionary()  # weak: a deleted request frees its row
        # Retractions of each request when its row was last seeded.
        self.seeded_after: WeakKeyDictionary[Req, int] = WeakKeyDictionary()
        self.last: tuple[list[Req], Asking | None] = [], None  # last argument and result of `_asking`

    # -- prefill ------------------------------------------------------------------------------------------------------

    def begin(self, batch: ScheduleBatch) -> None:
        """Count the output so far, and set the penalties with which SGLang samples each prompt's first output token.

        SGLang's penalizers do not count output from before a retraction, so their results are replaced in
        `batch.sampling_info`, which is a copy for this step.
        """
        reqs = [req for req in batch.reqs if asks(req)]
        for req in reqs:
            self._seed(req)
        asking, info = self._asking(batch.reqs), batch.sampling_info
        if asking is None:
            return
        asked = asking.asked
        n_output_P1 = async_h2d([[len(req.output_ids)] for req in reqs], dtype=torch.int64, device=batch.device)
        counts_P1V = self.counts_RV[asked.row_P, None]
        shape = len(batch.reqs), self.counts_RV.shape[1]
        info.acc_additive_penalties = torch.zeros(shape, device=batch.device)
        info.acc_additive_penalties[asked.index_P] = additive(counts_P1V, n_output_P1, asked)[:, 0]
        if info.acc_scaling_penalties is not None:  # a request has a repetition penalty
            info.acc_scaling_penalties = torch.ones(shape, device=batch.device)
            info.acc_scaling_penalties[asked.index_P] = scaling(counts_P1V, asked)[:, 0]

    def count_anchors(self, reqs: list[Req], anchor_B: torch.Tensor) -> None:
        """Count the first output token of each prompt, int64 [B].

        SGLang samples a token after every chunk of a prompt, and keeps only that of the last chunk. The others are
        counted too, until `begin` for the next chunk clears the count.
        """
        if (asking := self._asking(reqs)) is not None:
            anchor_P1 = anchor_B[asking.asked.index_P, None].to(torch.int64)
            self._count(asking.asked, anchor_P1, torch.ones_like(anchor_P1))

    # -- decode -------------------------------------------------------------------------------------------------------

    def are_asked_for(self, reqs: list[Req]) -> bool:
        """Return whether a request of the batch has a penalty."""
        return self._asking(reqs) is not None

    def apply(self, batch: ScheduleBatch, plan: Plan, tokens_BN: torch.Tensor, logits_TV: torch.Tensor) -> None:
        """Penalise the logits of every slot, in place, by the output and the drafts up to the slot.

        Args:
            tokens_BN: int64, verified tokens: anchor and drafts.
            logits_TV: fp32, T = B * N.
        """
        if (asking := self._asking(batch.reqs)) is None:
            return
        # + 1, because the anchor is part of the output, but not of the prefix.
        n_output_P = plan.prefix_len_B[asking.asked.index_P] + 1 - asking.prompt_len_P
        logits_BNV = logits_TV.view(*tokens_BN.shape, -1)
        penalise_(logits_BNV, tokens_BN, n_output_P, self.counts_RV, asking.asked)

    def count(self, reqs: list[Req], accepted: Accepted) -> None:
        """Count the tokens that a step of these requests committed."""
        if (asking := self._asking(reqs)) is not None:
            index_P = asking.asked.index_P
            committed_PN = accepted.committed_BN[index_P]
            slot_N = torch.arange(committed_PN.shape[1], device=committed_PN.device)
            self._count(asking.asked, committed_PN, slot_N < accepted.n_committed_B[index_P, None])

    def dry_run(self, tokens_BN: torch.Tensor, logits_TV: torch.Tensor) -> None:
        """Run the `penalise` kernel on the first request of the batch, with parameters that do not change logits."""
        zero_1 = torch.zeros(1, dtype=torch.int64, device=logits_TV.device)
        none_1 = torch.zeros(1, device=logits_TV.device)
        asked = Asked(
            index_P=zero_1,
            row_P=zero_1,
            frequency_P=none_1,
            presence_P=none_1,
            repetition_P=none_1 + 1,
            min_new_P=zero_1,
            stop_PE=zero_1[None] - 1,
        )
        counts_1V = self.counts_RV.new_zeros(1, self.counts_RV.shape[1])
        penalise_(logits_TV.view(*tokens_BN.shape, -1), tokens_BN, zero_1, counts_1V, asked)

    # -- the counts ---------------------------------------------------------------------------------------------------

    def _count(self, asked: Asked, tokens_PN: torch.Tensor, is_output_PN: torch.Tensor) -> None:
        cell_PN = asked.row_P[:, None] * self.counts_RV.shape[1] + tokens_PN
        self.counts_RV.view(-1).scatter_add_(0, cell_PN.view(-1), is_output_PN.view(-1).to(torch.int32))

    def _seed(self, req: Req) -> None:
        """Assign a row to the request if it has none, clear the row, and count the request's output so far.

        All steps that read the row for its previous request have been launched earlier, on the same stream.
        """
        row = self.row_of.get(req)
        if row is None:
            row = self._free_row()
            self.row_of[req] = row
        self.seeded_after[req] = req.retraction_count
        counts_V = self.counts_RV[row].zero_()
        if req.output_ids:
            output_T = async_h2d(list(req.output_ids), dtype=torch.int64, device=counts_V.device)
            counts_V.scatter_add_(0, output_T, torch.ones_like(output_T, dtype=torch.int32))

    def _free_row(self) -> int:
        held = {row for req, row in self.row_of.items() if not req.finished()}
        free = next((row for row in range(len(self.counts_RV)) if row not in held), None)
        if free is None:
            free = len(self.counts_RV)
            n_new = max(FEWEST_ROWS, free)
            with saver.kv_cache():  # a release leaves no running request, and `_seed` counts again
                self.counts_RV = torch.cat([self.counts_RV, self.counts_RV.new_zeros(n_new, self.counts_RV.shape[1])])
            logger.info(
                "penalties: counting the output of up to %d requests, %d bytes",
                len(self.counts_RV),
                self.counts_RV.nbytes,
            )
        return free

    # -- the parameters -----------------------------------------------------------------------------------------------

    def _asking(self, reqs: list[Req]) -> Asking | None:
        """Return the parameters of the requests with a penalty among `reqs`; None if there are none.

        The result is cached, because most batches have the same requests as the previous one.
        """
        last_reqs, asking = self.last
        if reqs != last_reqs or (asking and asking.n_retractions != retractions(asking.reqs)):
            self.last = list(reqs), self._read(reqs)
        return self.last[1]

    def _read(self, reqs: list[Req]) -> Asking | None:
        index = [i for i, req in enumerate(reqs) if asks(req)]
        if not index:
            return None
        asking = [reqs[i] for i in index]
        for req in asking:
            # On a decode server `begin` does not run: another server has prefilled the request, or it was retracted and
            # its K/V restored.
            if self.seeded_after.get(req) != req.retraction_count:
                self._seed(req)
        device = self.counts_RV.device
        prompt_lens = [len(req.origin_input_ids) for req in asking]
        return Asking(
            asked_by(asking, index, [self.row_of[req] for req in asking], device),
            async_h2d(prompt_lens, dtype=torch.int64, device=device),
            asking,
            retractions(asking),
        )


def retractions(reqs: list[Req]) -> list[int]:
    return [req.retraction_count for req in reqs]


def asks(req: Req) -> bool:
    """Return whether a request has a penalty or min_new_tokens."""
    params = req.sampling_params
    return (
        params.frequency_penalty != 0.0
        or params.presence_penalty != 0.0
        or params.repetition_penalty != 1.0
        or params.min_new_tokens > 0
    )


def asked_by(reqs: list[Req], index: list[int], rows: list[int], device: torch.device) -> Asked:
    """Return the parameters of requests as tensors on the device.

    Args:
        reqs: requests with a penalty.
        index: index of each request in the batch.
        rows: row of each request in the counts.
    """
    params = [req.sampling_params for req in reqs]
    stops = [sorted(stop_tokens(req)) for req in reqs]
    longest = max(1, *map(len, stops)) if stops else 1

    def on_device(values: Iterable, dtype: torch.dtype) -> torch.Tensor:
        return async_h2d(list(values), dtype=dtype, device=device)

    return Asked(
        index_P=on_device(index, torch.int64),
        row_P=on_device(rows, torch.int64),
        frequency_P=on_device((p.frequency_penalty for p in params), torch.float32),
        presence_P=on_device((p.presence_penalty for p in params), torch.float32),
        repetition_P=on_device((p.repetition_penalty for p in params), torch.float32),
        min_new_P=on_device((p.min_new_tokens for p in params), torch.int64),
        stop_PE=on_device((stop + [-1] * (longest - len(stop)) for stop in stops), torch.int64),
    )


def stop_tokens(req: Req) -> set[int]:
    """Return the tokens that end the request, if `min_new_tokens` forbids them at first; else an empty set."""
    if req.sampling_params.min_new_tokens == 0:
        return set()
    stops = (req.sampling_params.stop_token_ids or set()) | (req.eos_token_ids or set())
    stops |= (req.tokenizer.additional_stop_token_ids or set()) | {req.tokenizer.eos_token_id}
    return stops - {None}
