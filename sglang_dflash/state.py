"""Commit: the recurrent state of hybrid targets (Gated DeltaNet) after a partly accepted block.

Attention needs no commit: rows past the accepted prefix are simply not read again. A recurrent state cannot be cut
back, so the target's verify leaves the persistent state alone and keeps what is needed to advance it afterwards.
"""

from __future__ import annotations

from typing import Protocol

import torch
from sglang.srt.configs.hybrid_arch import mambaish_config
from sglang.srt.managers.schedule_batch import ScheduleBatch
from sglang.srt.managers.tp_worker import TpModelWorker
from sglang.srt.runtime_context import mamba_track_grid
from sglang.srt.speculative.spec_utils import commit_mamba_states_after_verify

from sglang_dflash.step import Plan


class State(Protocol):
    def commit(self, batch: ScheduleBatch, plan: Plan, n_committed_B: torch.Tensor) -> None: ...


class NoState:
    """Attention-only targets."""

    def commit(self, batch: ScheduleBatch, plan: Plan, n_committed_B: torch.Tensor) -> None:
        return


class SnapshotState:
    """SGLang's way: verify stores the state after every token, commit copies the right one back.

    A second copy goes to the request's tracking slot when the accepted prefix crosses a multiple of the track
    interval: that state is what the radix cache can resume from.
    """

    def __init__(self, worker: TpModelWorker) -> None:
        self.worker = worker

    def commit(self, batch: ScheduleBatch, plan: Plan, n_committed_B: torch.Tensor) -> None:
        track_B = None
        if batch.mamba_track_indices is not None:
            track_B = crossing_step(plan.prefix_len_B, n_committed_B, mamba_track_grid(batch.tree_cache.page_size))
        commit_mamba_states_after_verify(
            self.worker,
            batch,
            accept_lens=n_committed_B,
            accept_index=plan.tokens_BN,  # only its shape is read when the steps are given
            draft_token_num=plan.width,
            prepared_step_indices=(n_committed_B.long() - 1, track_B),
        )


def crossing_step(prefix_len_B: torch.Tensor, n_committed_B: torch.Tensor, interval: int) -> torch.Tensor:
    """The slot of the block after which the committed length is a multiple of `interval`, int64 [B]; -1 if none is.

    With prefix p and n new tokens that multiple is m = (p + n) // interval * interval, and slot m - p - 1 reaches it
    if m > p.
    """
    reached_B = (prefix_len_B + n_committed_B) // interval * interval
    return (reached_B - prefix_len_B - 1).clamp(min=-1)


def make_state(worker: TpModelWorker) -> State:
    return NoState() if mambaish_config(worker.model_runner.model_config) is None else SnapshotState(worker)
