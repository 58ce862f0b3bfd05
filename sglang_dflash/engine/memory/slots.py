"""KV slots of the draft's context, and the context that a block attends to. There are two kinds:

SharedSlots   A KV slot for every target KV slot, with the same id. So a prefix in SGLang's prefix cache is also
              in the draft's pool.
RingSlots     For a draft with a sliding window: a ring buffer of KV slots per request (`sizes.ring_slots`).
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple, Protocol

import numpy as np
import torch
from sglang.srt.managers.schedule_batch import ScheduleBatch
from sglang.srt.mem_cache.kv_loc_plan import KVLocPlan
from sglang.srt.model_executor.forward_batch_info import compute_position
from sglang.srt.model_executor.model_runner import ModelRunner
from sglang.srt.utils import async_h2d, async_h2d_stack

from sglang_dflash.engine.step import Block, Plan


class Seen(NamedTuple):
    """Context that a block attends to: the last `len_B` tokens before each request's anchor, and the block itself."""

    len_B: torch.Tensor  # int64
    bound_B_cpu: torch.Tensor  # upper bound of len + N on the host, for planning; some backends need it exact
    bound_sum: int  # sum of `bound_B_cpu`
    kv: KVLocPlan  # the KV slots of the context and of the block


class PromptRows(NamedTuple):
    """Token rows of a prefill whose context K/V are kept, with their positions and KV slots."""

    rows_T: torch.Tensor | None  # int64, indices of the kept rows in the prefill; None: all rows
    positions_T: torch.Tensor  # int64, position of each kept row
    slots_T: torch.Tensor  # int64, KV slot of each kept row
    n_rows_B: Sequence[int]  # number of kept rows of each request


class DraftSlots(Protocol):
    """Finder of the KV slots of the draft's context."""

    def seen(self, plan: Plan, block: Block) -> Seen:
        """Return the context that the draft attends to when it fills `block`."""

    def of_block(self, plan: Plan, block: Block) -> torch.Tensor:
        """Return the KV slots of a block's tokens, int64 [B * N]."""

    def of_prompt(self, batch: ScheduleBatch, device: torch.device) -> PromptRows:
        """Return rows, positions and KV slots of the prompt tokens that the target has just read."""

    def is_cut(self, row: int, prefix_len: int) -> bool:
        """Return whether a block gets less context than its window holds. The block follows `prefix_len` tokens.

        In a ring buffer this happens after a hit in the prefix cache: the ring lacks the tokens of the cached prefix.
        The cut ends when the window no longer reaches back to these tokens. Call this only for a request in decode.
        `row` is the request's row in the request table. The check runs on the host.
        """


class SharedSlots:
    """The target's KV slots: a block attends to all tokens before the anchor, through the target's request table."""

    def seen(self, plan: Plan, block: Block) -> Seen:
        return Seen(plan.prefix_len_B, block.bound_B_cpu, block.bound_sum, block.kv)

    def of_block(self, plan: Plan, block: Block) -> torch.Tensor:
        return block.slots_BN.view(-1)

    def of_prompt(self, batch: ScheduleBatch, device: torch.device) -> PromptRows:
        prefix_B = async_h2d(batch.prefix_lens, dtype=torch.int32, device=device)
        new_B = async_h2d(batch.extend_lens, dtype=torch.int32, device=device)
        # "triton" selects the device kernel. On the CPU SGLang uses the torch form for any other name.
        form = "torch" if device.type == "cpu" else "triton"
        positions_T, _ = compute_position(form, prefix_B, new_B, sum(batch.extend_lens))
        return PromptRows(None, positions_T, batch.out_cache_loc, batch.extend_lens)

    def is_cut(self, row: int, prefix_len: int) -> bool:
        """Return False, because a cached prefix of the target is also in the draft's pool."""
        return False


class RingSlots:
    """Ring buffers in the draft's own pool: the request in table row r has position p in KV slot r * size + p % size.

    A block attends to the last `window` tokens before the anchor, as far as their K/V were written. A prefix from the
    prefix cache is only in the target's pool, so the window begins at the earliest after this prefix. With pages larger
    than one token the window starts at a page boundary, because attention backends read whole pages. So the window may
    be up to `page` - 1 tokens longer.

    Invariant when a block is drafted: for the request in row r, the last `size` - `widest` positions before the anchor
    have their K/V in their KV slots. Positions below first_R[r] are excluded.
    """

    def __init__(
        self, target_runner: ModelRunner, draft_runner: ModelRunner, *, size: int, window: int, widest: int
    ) -> None:
        """Create empty rings.

        Args:
            size: number of KV slots of a ring, see `sizes.ring_slots`.
            window: number of context tokens that the draft keeps.
            widest: largest number of tokens per request whose K/V a step writes.
        """
        self.size, self.window, self.widest = size, window, widest
        self.page = target_runner.page_size
        self.requests = target_runner.req_to_token_pool
        self.table = draft_runner.req_to_token_pool.req_to_token
        self.translator = draft_runner.kv_index_translator
        n_rows, device = len(self.requests.req_to_token), self.table.device
        assert n_rows * size <= draft_runner.max_total_num_tokens, "a ring for every row"
        assert self.table.shape == (n_rows, size), "a row for every ring"
        self.first_R = torch.zeros(n_rows, dtype=torch.int64, device=device)  # first position in the ring of each row
        # On the host, by row: a copy of `first_R`, SGLang's count of requests that have had the row (`req_generation`),
        # and the number of prompt tokens read so far.
        self.first_R_cpu = np.zeros(n_rows, np.int64)
        self.generation_R, self.end_R = np.zeros(n_rows, np.int64), np.zeros(n_rows, np.int64)
        self.columns = torch.arange(window + self.page - 1 + widest, device=device)

    def slots(self, rows: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
        """Return the KV slots of `positions` in the rings of table rows `rows`; the two are broadcast together."""
        return rows * self.size + positions % self.size

    def seen(self, plan: Plan, block: Block) -> Seen:
        """Return the window and the block, after writing their KV slots into the draft's request table."""
        rows_B1 = plan.rows_B[:, None]
        start_B = torch.maximum(plan.prefix_len_B - self.window, self.first_R[plan.rows_B])
        if self.page > 1:
            start_B = start_B - start_B % self.page
        # A fixed number of columns is written, so the host does not need the lengths.
        self.table[rows_B1, self.columns] = self.slots(rows_B1, start_B[:, None] + self.columns).to(self.table.dtype)
        len_B = plan.prefix_len_B - start_B
        bound_B_cpu = self.host_lengths(plan, block)
        kv = self.translator.plan(
            req_pool_indices=plan.rows_B,
            seq_lens=len_B,
            seq_lens_cpu=bound_B_cpu,
            write_virtual=self.of_block(plan, block),
            read_extent=block.tokens_BN.shape[1],
        )
        return Seen(len_B, bound_B_cpu, int(bound_B_cpu.sum()), kv)

    def host_lengths(self, plan: Plan, block: Block) -> torch.Tensor:
        """Return an upper bound of len + N on the host, int64 [B]."""
        # The true length of window and block is at most len(self.columns), for any prefix length.
        return block.bound_B_cpu.clamp(max=len(self.columns))

    def of_block(self, plan: Plan, block: Block) -> torch.Tensor:
        """Return the KV slots of a block's tokens in their rings, int64 [B * N]."""
        return self.slots(plan.rows_B[:, None], block.positions_BN).view(-1)

    def of_prompt(self, batch: ScheduleBatch, device: torch.device) -> PromptRows:
        """Return the last token rows of each prompt, as many as the ring keeps, with positions and KV slots."""
        rows_B = batch.req_pool_indices_cpu.numpy()
        prefix_B, new_B = np.array(batch.prefix_lens), np.array(batch.extend_lens)
        n = n_prompts(batch)  # in a mixed step the rings of running requests are not reset
        self._begin(rows_B[:n], prefix_B[:n], (prefix_B + new_B)[:n])
        kept_B = np.minimum(new_B, self.size - self.widest)  # no block attends to more tokens
        last_B = np.cumsum(new_B)
        rows_T = np.concatenate([np.arange(last - kept, last) for last, kept in zip(last_B, kept_B, strict=True)])
        positions_T = rows_T + np.repeat(prefix_B + new_B - last_B, kept_B)
        slots_T = np.repeat(rows_B * self.size, kept_B) + positions_T % self.size
        where_3T = async_h2d_stack([torch.from_numpy(x_T) for x_T in (rows_T, positions_T, slots_T)], device=device)
        all_kept = len(rows_T) == last_B[-1]
        return PromptRows(None if all_kept else where_3T[0], where_3T[1], where_3T[2], kept_B.tolist())

    def is_cut(self, row: int, prefix_len: int) -> bool:
        """Return whether the request's ring lacks a context token within the window."""
        return bool(self.first_R_cpu[row] > max(prefix_len - self.window, 0))

    def _begin(self, rows_B: np.ndarray, prefix_B: np.ndarray, end_B: np.ndarray) -> None:
        """Reset the rings of requests that begin a prompt, so that a ring begins at the first token that is read.

        If a request reads the next chunk of the same prompt, its ring continues instead.

        Args:
            rows_B: row of each request in the request table.
            prefix_B: for each request, position of the first token that is read.
            end_B: for each request, position after the last token that is read.
        """
        generation_B = self.requests.req_generation[rows_B].numpy()
        new_B = (self.generation_R[rows_B] != generation_B) | (self.end_R[rows_B] != prefix_B)
        self.generation_R[rows_B], self.end_R[rows_B] = generation_B, end_B
        if new_B.any():
            begun_B, first_B = rows_B[new_B], prefix_B[new_B]
            self.first_R_cpu[begun_B] = first_B
            on_host = [torch.from_numpy(begun_B), torch.from_numpy(first_B)]
            row_B, values_B = async_h2d_stack(on_host, device=self.first_R.device)
            self.first_R[row_B] = values_B


class ExactRingSlots(RingSlots):
    """Ring slots for backends that need exact lengths on the host. SGLang's scheduler then provides these lengths.

    FlashInfer allocates partial results by the lengths planned on the host, but writes them by the lengths on the
    device. If these lengths differ, results of different requests are mixed.
    """

    def host_lengths(self, plan: Plan, block: Block) -> torch.Tensor:
        """Return len + N on the host, int64 [B], equal to the values on the device."""
        n_tokens = block.tokens_BN.shape[1]
        prefix_len_B = block.bound_B_cpu.numpy() - n_tokens
        start_B = np.maximum(prefix_len_B - self.window, self.first_R_cpu[plan.rows_B_cpu.numpy()])
        return torch.from_numpy(prefix_len_B - (start_B - start_B % self.page) + n_tokens)


def n_prompts(batch: ScheduleBatch) -> int:
    """Return the number of requests whose prompts a prefill reads. Running requests follow them in a mixed step."""
    return len(batch.reqs) - len(batch.decoding_reqs or ())


def rings_for(draft_runner: ModelRunner) -> type[RingSlots]:
    """Return the class of ring slots that the draft's attention backend needs."""
    return ExactRingSlots if draft_runner.attn_backend.needs_cpu_seq_lens else RingSlots
