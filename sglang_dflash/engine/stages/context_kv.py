"""Append: turn the target's features into the draft's context K/V.

The draft never runs over the prompt, because its context K/V depend only on the target's features. `memory/slots.py`
computes the KV slots of the context.

Context K/V are not read before the next block is drafted. So a step without drafts only keeps its features ("waiting
rows"). One projection later computes the K/V of several steps, and reads the draft's weights only once. With a
hierarchical cache or disaggregation, K/V are written in every step, because SGLang copies KV slots. For example, the
cache copies a request's KV slots to the host when the request ends.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
from sglang.srt.managers.schedule_batch import ScheduleBatch
from sglang.srt.model_executor.model_runner import ModelRunner
from sglang.srt.utils import async_h2d
from sglang_dflash_kernels.append_context import ContextCaches, KeyTransform, append_context

from sglang_dflash.engine import saver
from sglang_dflash.engine.draft.lilicorr import Last
from sglang_dflash.engine.draft.sglang_model import DFlashDraftModel
from sglang_dflash.engine.memory.slots import DraftSlots
from sglang_dflash.engine.step import Plan

LATE_ROWS = 64  # smallest capacity for waiting rows; a matrix product takes about equal time for 1 to 64 rows


class LateRows:
    """Token rows whose context K/V are written later: one per request and step, for consecutive steps of one batch.

    Invariant: no two rows share a KV slot, and no such slot has been written since its row was added. When a request
    leaves the batch, another request may get its KV slots. So the owner, `ContextKV`, writes waiting rows before it
    adds rows of a batch of other requests, and before it writes a prompt's rows.
    """

    def __init__(self, n_rows: int, n_steps: int, like_TC: torch.Tensor) -> None:
        """Allocate `n_rows` rows of C values, with the dtype and device of `like_TC`.

        `n_steps`: largest number of rows per request.
        """
        with saver.kv_cache():  # a release drops all rows, see `forget`
            self.features_TC = like_TC.new_empty(n_rows, like_TC.shape[1])
        self.n_steps = n_steps
        self.rids: Sequence[str] = ()
        # Positions and KV slots of the waiting rows: for each step an int64 tensor [B].
        self.positions: list[torch.Tensor] = []
        self.slots: list[torch.Tensor] = []

    @property
    def n_rows(self) -> int:
        return len(self.rids) * len(self.slots)

    def fits(self, rids: Sequence[str]) -> bool:
        """Return whether a step of these requests can be added to the waiting rows."""
        if not self.slots:
            return True
        room = len(self.slots) < self.n_steps and self.n_rows + len(rids) <= len(self.features_TC)
        return room and self.rids == rids

    def add(
        self,
        rids: Sequence[str],
        rows_B: torch.Tensor,
        features_BC: torch.Tensor,
        positions_B: torch.Tensor,
        slots_B: torch.Tensor,
    ) -> None:
        """Add a step's rows, [B, C] and int64 [B]. The features are copied, because they may be a graph's buffer.

        Args:
            rids: ids of the step's requests.
            rows_B: int64, row of each request in the request table.
        """
        n_rows = self.n_rows
        self.features_TC[n_rows : n_rows + len(features_BC)] = features_BC
        self.rids, self.rows_B = rids, rows_B
        self.positions.append(positions_B)
        self.slots.append(slots_B)

    def take(self) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """Remove all rows and return their features [T, C], positions and KV slots, int64 [T]."""
        rows = self.features_TC[: self.n_rows], torch.cat(self.positions), torch.cat(self.slots)
        self.forget()
        return rows

    def forget(self) -> None:
        """Drop the rows without writing them."""
        self.positions, self.slots = [], []


class ContextKV:
    """Writer of context K/V. Invariant: a kept row's context K/V have been written, or its features are in `late`."""

    def __init__(
        self,
        model: DFlashDraftModel,
        runner: ModelRunner,
        slots: DraftSlots,
        *,
        n_requests: int,
        block_size: int,
        may_wait: bool = True,
    ) -> None:
        """Store the draft's caches and key transform.

        Args:
            n_requests: largest number of requests in a batch.
            may_wait: rows of a step without drafts may wait until the next draft.
        """
        attention = model.attentions[0]
        pool = runner.token_to_kv_pool
        layers = range(len(model.layers))
        self.model = model
        self.slots = slots
        self.may_wait = may_wait
        self.caches = ContextCaches.build(
            [pool.get_key_buffer(i) for i in layers], [pool.get_value_buffer(i) for i in layers]
        )
        self.key = KeyTransform(
            k_norm_LE=model.k_norm_LE,
            eps=attention.k_norm.variance_epsilon,
            cos_sin_PR=attention.rotary_emb.cos_sin_cache,
        )
        self.keeps_last = model.lilicorr is not None
        # A ring has more than `block_size` KV slots, so rows of `block_size` steps of one token never share a KV slot.
        self.late = LateRows(max(LATE_ROWS, n_requests), block_size, like_TC=model.fc.weight)

    @torch.inference_mode()
    def append(self, rids: Sequence[str], plan: Plan, features_TC: torch.Tensor, n_kept_B: torch.Tensor) -> None:
        """Write the context K/V of the first `n_kept` rows of every block: the anchor and the accepted drafts.

        If only anchors were verified and rows may wait, the rows are written later, at the latest before the next
        draft.

        Args:
            features_TC: the target's features of all B * N rows.
            n_kept_B: int32 [B].
        """
        positions_T = plan.verified.positions_BN.view(-1)
        slots_T = self.slots.of_block(plan, plan.verified)
        if plan.drafted is not None or not self.may_wait:
            last = Last(plan.rows_B, _first_rows(plan) + n_kept_B - 1) if self.keeps_last else None
            self._write(features_TC, positions_T, slots_T, n_kept_B, last)
            return
        if not self.late.fits(rids):
            self._catch_up()
        self.late.add(rids, plan.rows_B, features_TC, positions_T, slots_T)

    @torch.inference_mode()
    def append_prompt(self, batch: ScheduleBatch, features_TC: torch.Tensor) -> None:
        """Write the context K/V of prompts that the target has just read; `features_TC`: features of all T rows.

        Ring buffers get only the last rows of a long prompt.
        """
        self._catch_up()
        rows = self.slots.of_prompt(batch, features_TC.device)
        if rows.rows_T is not None:
            features_TC = features_TC.index_select(0, rows.rows_T)
        last = None
        if self.keeps_last:
            at_B = async_h2d((np.cumsum(rows.n_rows_B) - 1).tolist(), dtype=torch.int64, device=features_TC.device)
            last = Last(batch.req_pool_indices, at_B)
        self._write(features_TC, rows.positions_T, rows.slots_T, None, last)

    @torch.inference_mode()
    def write_all(self, plan: Plan, features_TC: torch.Tensor) -> None:
        """Write the context K/V of every row, to compile the kernel variant that prompts and waiting rows use.

        Args:
            features_TC: the target's features of all B * N rows.
        """
        positions_T = plan.verified.positions_BN.view(-1)
        self._write(features_TC, positions_T, self.slots.of_block(plan, plan.verified), None)

    @torch.inference_mode()
    def before_draft(self, plan: Plan) -> None:
        """Write the waiting rows, if this step drafts."""
        if plan.drafted is not None:
            self._catch_up()

    def _catch_up(self) -> None:
        if not self.late.n_rows:
            return
        features_TC, positions_T, slots_T = self.late.take()
        last = None
        if self.keeps_last:
            n_rows, rows_B = len(positions_T), self.late.rows_B
            last = Last(rows_B, torch.arange(n_rows - len(rows_B), n_rows, device=positions_T.device))
        self._write(features_TC, positions_T, slots_T, None, last)

    def _write(
        self,
        features_TC: torch.Tensor,
        positions_T: torch.Tensor,
        slots_T: torch.Tensor,
        n_kept_B: torch.Tensor | None,
        last: Last | None = None,
    ) -> None:
        k_TLGE, v_TLGE = self.model.context_kv(features_TC, last)
        append_context(k_TLGE, v_TLGE, positions_T, slots_T, caches=self.caches, key=self.key, n_kept_B=n_kept_B)


def _first_rows(plan: Plan) -> torch.Tensor:
    """Return the index of each block's first token row, int64 [B]."""
    B, N = plan.verified.tokens_BN.shape
    return torch.arange(0, B * N, N, device=plan.rows_B.device)
