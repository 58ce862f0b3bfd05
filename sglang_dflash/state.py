"""Commit: the recurrent state of hybrid targets (Gated DeltaNet) after a partly accepted block.

Attention needs no commit: rows past the accepted prefix are simply not read again. A recurrent state cannot be cut
back, so the target's verify leaves the persistent state alone and keeps what is needed to advance it afterwards:
either the state after every token, or the block's inputs. A second copy goes to the request's tracking slot when the
accepted prefix crosses a multiple of the track interval: that state is what the radix cache can resume from.
"""

from __future__ import annotations

import dataclasses
import os
from typing import Protocol

import torch
from sglang.srt.configs.hybrid_arch import hybrid_gdn_config, mambaish_config
from sglang.srt.managers.schedule_batch import ScheduleBatch
from sglang.srt.managers.tp_worker import TpModelWorker
from sglang.srt.mem_cache.memory_pool import MambaPool
from sglang.srt.runtime_context import mamba_track_grid
from sglang.srt.speculative.spec_utils import commit_mamba_states_after_verify

from sglang_dflash import flags
from sglang_dflash.flags import GdnState
from sglang_dflash.step import Plan


class State(Protocol):
    def commit(self, batch: ScheduleBatch, plan: Plan, n_committed_B: torch.Tensor) -> None: ...


class NoState:
    """Attention-only targets."""

    def commit(self, batch: ScheduleBatch, plan: Plan, n_committed_B: torch.Tensor) -> None:
        return


class SnapshotState:
    """Verify stores the state after every token; commit copies the right one back."""

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


class FoldState(SnapshotState):
    """Verify stores the block's inputs; commit folds the accepted ones into the state, all layers in one launch.

    SGLang has the kernels and calls them where a pool has these rings, but allocates them for another recurrence
    (KDA) only. So the pool gets them here, before anything is captured, and gives up its states per token.
    """

    def __init__(self, worker: TpModelWorker) -> None:
        super().__init__(worker)
        runner = worker.model_runner
        pool = runner.req_to_token_pool.mamba_pool
        pool.mamba_cache = with_rings(pool.mamba_cache, runner.dtype)
        pool.replayssm_spec_fold = True


def with_rings(cache: MambaPool.SpeculativeState, dtype: torch.dtype) -> MambaPool.SpeculativeState:
    """The same states, with room for each slot's last block of inputs instead of a state per token.

    Dimensions: L layers, S slots, H value heads of width V, G key heads of width K, N tokens.
    """
    L, S, H, V, K = cache.temporal.shape
    N = cache.intermediate_ssm.shape[2]
    n_channels = cache.conv[0].shape[2]  # the convolution runs over q, k and v: 2 G K + H V
    G = (n_channels - H * V) // (2 * K)
    like = cache.temporal
    return dataclasses.replace(
        cache,
        intermediate_ssm=None,
        replayssm_rawv=like.new_zeros(L, S, H, N, V, dtype=dtype),
        replayssm_rawk=like.new_zeros(L, S, G, N, K, dtype=dtype),
        replayssm_g=like.new_zeros(L, S, H, N, dtype=torch.float32),
        replayssm_beta=like.new_zeros(L, S, H, N, dtype=torch.float32),
    )


def crossing_step(prefix_len_B: torch.Tensor, n_committed_B: torch.Tensor, interval: int) -> torch.Tensor:
    """The slot of the block after which the committed length is a multiple of `interval`, int64 [B]; -1 if none is.

    With prefix p and n new tokens that multiple is m = (p + n) // interval * interval, and slot m - p - 1 reaches it
    if m > p.
    """
    reached_B = (prefix_len_B + n_committed_B) // interval * interval
    return (reached_B - prefix_len_B - 1).clamp(min=-1)


def make_state(worker: TpModelWorker) -> State:
    """The target's memory pools exist, its graphs do not."""
    config = worker.model_runner.model_config
    if mambaish_config(config) is None:
        return NoState()
    if hybrid_gdn_config(config) is not None and flags.read(os.environ).gdn_state is GdnState.FOLD:
        return FoldState(worker)
    return SnapshotState(worker)
