"""Commit: advance the recurrent states of hybrid targets after a partly accepted block.

Attention needs no commit, because K/V of rejected drafts are not read again. A recurrent state that has read a whole
block cannot be changed back to an earlier token. So a verify leaves the persistent state unchanged, and stores data
with which commit advances this state. These data are the state after every token (snapshot), or each token's
contribution (fold).

Tracking: if the number of tokens that a state has read is a multiple of the track interval, the state is copied to the
request's track slot, a second state slot. The prefix cache can resume from this copy.

In a block of one token nothing can be rejected. So the target decodes this token as without speculation, and updates
its states in place. `State.decodes` names the exceptions.
"""

from __future__ import annotations

import dataclasses
from functools import cache
from typing import Protocol

import torch
from sglang.kernels.ops.mamba.mamba_state_scatter_triton import (
    scatter_mamba_states_after_mtp_verify,
    track_mamba_states_all_layers,
)
from sglang.srt.layers.attention.base_attn_backend import AttentionBackend
from sglang.srt.layers.attention.hybrid_linear_attn_backend import HybridLinearAttnBackend
from sglang.srt.layers.attention.linear.gdn_backend import GDNAttnBackend
from sglang.srt.managers.schedule_batch import ScheduleBatch
from sglang.srt.managers.tp_worker import TpModelWorker
from sglang.srt.model_executor.model_runner import ModelRunner
from sglang.srt.runtime_context import mamba_track_grid
from sglang.srt.speculative.spec_utils import commit_mamba_states_after_verify
from sglang_dflash_kernels.accept import Accepted
from sglang_dflash_kernels.gdn_fold import GDN_FOLD, Kept
from sglang_dflash_kernels.gdn_verify import GDN_VERIFY, Inputs

from sglang_dflash.engine.memory.records import RecordPool
from sglang_dflash.engine.step import Plan
from sglang_dflash.errors import NotSupported
from sglang_dflash.flags import GdnState


class State(Protocol):
    """Interface of the objects that advance the target's recurrent states after blocks of one width.

    Attributes:
        decodes: the blocks have one token, and the target decodes this token instead of verifying it. With snapshots
            it is false, because SGLang's commit needs what a verify stores. See also `has_short_windows`.
    """

    decodes: bool

    def attach(self, backend: AttentionBackend) -> None:
        """Prepare `backend` before its first verify. Called once for each of the target's attention backends."""

    def commit(self, batch: ScheduleBatch, plan: Plan, accepted: Accepted) -> None:
        """Advance each request's states by its kept rows: the anchor and the accepted drafts.

        The target's runner must still have the attention backend of the verify. `accepted` has tracked slots if the
        batch has track slots, see `track_interval`.
        """


class NoState:
    """`State` of attention-only targets, and of servers that never verify."""

    def __init__(self, *, decodes: bool = False) -> None:
        self.decodes = decodes

    def attach(self, backend: AttentionBackend) -> None:
        """Do nothing."""
        return

    def commit(self, batch: ScheduleBatch, plan: Plan, accepted: Accepted) -> None:
        """Do nothing."""
        return


class SnapshotState:
    """`State` with snapshots: verify stores a state per token, commit keeps the state after the last kept row."""

    decodes = False

    def __init__(self, worker: TpModelWorker) -> None:
        self.worker = worker

    def attach(self, backend: AttentionBackend) -> None:
        """Do nothing, because SGLang's verify stores the states."""
        return

    def commit(self, batch: ScheduleBatch, plan: Plan, accepted: Accepted) -> None:
        """Copy the states after the last kept rows into the requests' slots, tracked states into track slots."""
        commit_mamba_states_after_verify(
            self.worker,
            batch,
            accept_lens=accepted.n_committed_B,
            accept_index=plan.verified.tokens_BN,  # only the shape is read, because `prepared_step_indices` is given
            draft_token_num=plan.width,
            prepared_step_indices=(accepted.last_B, accepted.tracked_B),
        )


class FoldState:
    """`State` with records: verify records each token's contribution, commit adds the contributions of kept rows.

    The records replace the per-token states in SGLang's pool (`memory/records.py`), and `RecordingVerify` replaces
    SGLang's verify kernel. So SGLang's backend passes the records to the kernel, eagerly and in captured graphs. The
    windows of the causal convolution (its last inputs) are small, so SGLang's own code stores and copies them.

    On a GPU a commit has two launches for any number of layers. The first folds the records, and copies tracked states
    into track slots. The second is SGLang's copy of the windows. If they are not bf16, this copy has several launches.
    """

    decodes = False

    def __init__(self, worker: TpModelWorker) -> None:
        self.runner = worker.model_runner
        pool = self.runner.req_to_token_pool.mamba_pool
        if not isinstance(pool, RecordPool):
            raise NotSupported(
                "SGLANG_DFLASH_GDN_STATE=fold needs this plugin's pool of recurrent states, found "
                f"{type(pool).__name__}; set SGLANG_DFLASH_GDN_STATE=snapshot"
            )
        cache = pool.mamba_cache
        self.states_LSHVK, self.record_LRNX = cache.temporal, cache.intermediate_ssm
        self.n_key_heads = pool.n_key_heads
        self.windows = dataclasses.replace(cache, intermediate_ssm=None, temporal=cache.temporal.new_empty(0))
        # The op's form is selected once, because the device of the tensors never changes.
        self.fold = GDN_FOLD.form_for(self.states_LSHVK)

    def attach(self, backend: AttentionBackend) -> None:
        """Replace the backend's verify kernel by one that writes records."""
        gdn_backend(backend).kernel_dispatcher.verify_kernel = RecordingVerify(self.record_LRNX)

    def commit(self, batch: ScheduleBatch, plan: Plan, accepted: Accepted) -> None:
        """Add the records of the kept rows to the states of all layers, and copy tracked states into track slots."""
        backend = self.runner.attn_backend.linear_attn_backend
        slot_B = backend.forward_metadata.mamba_cache_indices[: plan.n_requests]
        last_B, tracked_B, track_slot_B = accepted.last_B, accepted.tracked_B, None
        if batch.mamba_track_indices is not None:
            track_slot_B = backend._translate_mamba_indices(batch.mamba_track_indices)
        kept = Kept(slot_B, accepted.n_committed_B, track_slot_B, tracked_B)
        self.fold(self.states_LSHVK, self.record_LRNX[:, :, : plan.width], kept, n_key_heads=self.n_key_heads)
        scatter_mamba_states_after_mtp_verify(self.windows, slot_B, last_B, track_slot_B, tracked_B)


class InPlaceState:
    """`State` for blocks of one token. Decoding has advanced the states. Commit only copies them to track slots.

    `FoldState` would be slower, because it writes records, and reads all states a second time.
    """

    decodes = True

    def __init__(self, worker: TpModelWorker) -> None:
        self.runner = worker.model_runner
        cache = self.runner.req_to_token_pool.mamba_pool.mamba_cache
        self.pools = cache.conv[0], cache.temporal

    def attach(self, backend: AttentionBackend) -> None:
        """Do nothing, because SGLang's decoding updates the states."""
        return

    def commit(self, batch: ScheduleBatch, plan: Plan, accepted: Accepted) -> None:
        """Copy a request's state to its track slot if the request's length is now a multiple of the track interval."""
        if batch.mamba_track_indices is None or accepted.tracked_B is None:
            return
        backend = self.runner.attn_backend.linear_attn_backend
        track_mamba_states_all_layers(
            *self.pools,
            backend.forward_metadata.mamba_cache_indices,
            accepted.tracked_B == 0,
            backend._translate_mamba_indices(batch.mamba_track_indices),
            plan.n_requests,
            check_freed_slots=True,  # the track slot of a request whose memory was freed is -1
        )


class RecordingVerify:
    """Verify kernel for SGLang's GDN backend that writes records and only reads states."""

    supports_strided_target_verify_qkv = True

    def __init__(self, record_LRNX: torch.Tensor) -> None:
        self.verify = GDN_VERIFY.form_for(record_LRNX)

    def target_verify(
        self,
        *,
        A_log: torch.Tensor,
        dt_bias: torch.Tensor,
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
        a: torch.Tensor,
        b: torch.Tensor,
        ssm_states: torch.Tensor,
        cache_indices: torch.Tensor,
        query_start_loc: torch.Tensor,
        intermediate_states_buffer: torch.Tensor,
        **others: object,  # not needed: record rows are 0..B-1, blocks are chains, `cache_steps` is the block length
    ) -> torch.Tensor:
        """Verify a layer's blocks. Return the outputs, [1, T, H, V]; letters as in `kernels/gdn_verify.py`.

        Args:
            q, k: [1, T, G, K].
            v: [1, T, H, V].
            a, b: [T, H].
            ssm_states: the layer's states, [S, H, V, K].
            cache_indices: int [B], state slot of each request.
            intermediate_states_buffer: the layer's records, which this method writes.
        """
        slot_B = cache_indices[: len(query_start_loc) - 1]
        x = Inputs(q[0], k[0], v[0], a, b, A_log, dt_bias)
        out = self.verify(x, ssm_states, slot_B, intermediate_states_buffer)
        return out[None]


def gdn_backend(backend: AttentionBackend) -> GDNAttnBackend:
    """Return the Gated DeltaNet part of `backend`. If there is none, raise NotSupported."""
    if isinstance(backend, HybridLinearAttnBackend) and isinstance(backend.linear_attn_backend, GDNAttnBackend):
        return backend.linear_attn_backend
    raise NotSupported(
        f"SGLANG_DFLASH_GDN_STATE=fold needs SGLang's Gated DeltaNet attention backend, found "
        f"{type(backend).__name__}; set SGLANG_DFLASH_GDN_STATE=snapshot"
    )


def track_interval(batch: ScheduleBatch) -> int:
    """Return the track interval in tokens: at its multiples, states are saved for the prefix cache; 0: none are saved.

    Call this after the verify, which gives the batch its track slots.
    """
    return 0 if batch.mamba_track_indices is None else _track_interval(batch.tree_cache.page_size)


@cache
def _track_interval(page_size: int) -> int:
    return mamba_track_grid(page_size)


def make_state(worker: TpModelWorker, kind: GdnState | None, width: int) -> State:
    """Return the `State` that advances the target's recurrent states after blocks of `width` tokens.

    Call this after the target's memory pools and attention backends are created, and before its graphs.

    Args:
        worker: the target's worker.
        kind: method that advances the states; None: the target has no recurrent states, or this server never verifies.
        width: number of tokens of a block that are verified.
    Raises:
        NotSupported: `kind` is FOLD, and the target has states that a fold does not advance. Or `kind` is FOLD, `width`
            is above 1, and the target's pool is not a `RecordPool`.
    """
    decodes = width == 1 and not has_short_windows(worker.model_runner)
    if kind is None:
        return NoState(decodes=decodes)
    if kind is GdnState.SNAPSHOT:
        return SnapshotState(worker)
    pools = worker.model_runner.req_to_token_pool
    if pools.short_conv_pool.enabled or pools.ngram_pool.enabled:
        raise NotSupported(
            "SGLANG_DFLASH_GDN_STATE=fold does not advance the states of the target's per-layer embeddings; "
            "set SGLANG_DFLASH_GDN_STATE=snapshot"
        )
    return InPlaceState(worker) if decodes else FoldState(worker)


def has_short_windows(runner: ModelRunner) -> bool:
    """Return whether SGLang decodes with shorter sliding windows than it verifies.

    SGLang's Triton backend decodes with windows that are one token too short (`update_sliding_window_buffer`). If one
    width decoded, answers would depend on the widths of a request's steps.
    """
    return runner.decode_attention_backend_str == "triton" and runner.sliding_window_size is not None
