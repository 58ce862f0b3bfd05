"""Commit: the recurrent state of hybrid targets (Gated DeltaNet) after a partly accepted block.

Attention needs no commit: rows past the accepted prefix are simply not read again. A recurrent state cannot be cut
back, so the target's verify leaves the persistent state alone and keeps what is needed to advance it afterwards:
either the state after every token, or what every token adds to it. A second copy goes to the request's tracking slot
when the accepted prefix crosses a multiple of the track interval: that state is what the radix cache can resume from.

A block of one token has nothing to reject: the target decodes it as without speculation, updating its state in place.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from functools import cache
from typing import Any, Protocol

import torch
from sglang.kernels.ops.mamba.mamba_state_scatter_triton import (
    fused_commit_track_indices,
    scatter_mamba_states_after_mtp_verify,
    track_mamba_states_all_layers,
)
from sglang.srt.layers.attention.base_attn_backend import AttentionBackend
from sglang.srt.layers.attention.hybrid_linear_attn_backend import HybridLinearAttnBackend
from sglang.srt.layers.attention.linear.gdn_backend import GDNAttnBackend
from sglang.srt.managers.schedule_batch import ScheduleBatch
from sglang.srt.managers.tp_worker import TpModelWorker
from sglang.srt.model_executor.forward_batch_info import ForwardBatch
from sglang.srt.runtime_context import mamba_track_grid
from sglang.srt.speculative.spec_utils import commit_mamba_states_after_verify
from sglang_dflash_kernels.gdn_fold import GDN_FOLD, Kept
from sglang_dflash_kernels.gdn_verify import GDN_VERIFY, Inputs

from sglang_dflash.errors import NotSupported
from sglang_dflash.flags import GdnState
from sglang_dflash.memory.records import RecordPool
from sglang_dflash.step import Plan


class State(Protocol):
    """Advances the target's recurrent states after blocks of one width."""

    def attach(self, backend: AttentionBackend) -> None:
        """Prepare `backend` before it first verifies; each of the target's attention backends is attached once."""

    def commit(self, batch: ScheduleBatch, plan: Plan, n_committed_B: torch.Tensor) -> None:
        """Advance the states by the committed tokens, int32 [B]; the backend that verified the step is in place."""


class NoState:
    """Attention-only targets, and servers that never verify."""

    def attach(self, backend: AttentionBackend) -> None:
        """Do nothing."""
        return

    def commit(self, batch: ScheduleBatch, plan: Plan, n_committed_B: torch.Tensor) -> None:
        """Do nothing."""
        return


class SnapshotState:
    """Verify stores the state after every token; commit copies the right one back."""

    def __init__(self, worker: TpModelWorker, width: int) -> None:
        self.worker = worker
        self.slots = BlockSlots(worker, width)

    def attach(self, backend: AttentionBackend) -> None:
        """Do nothing: SGLang's verify stores the states."""
        return

    def commit(self, batch: ScheduleBatch, plan: Plan, n_committed_B: torch.Tensor) -> None:
        """Copy back the state after the last committed token."""
        commit_mamba_states_after_verify(
            self.worker,
            batch,
            accept_lens=n_committed_B,
            accept_index=plan.verified.tokens_BN,  # only its shape is read when the steps are given
            draft_token_num=plan.width,
            prepared_step_indices=self.slots.last_and_tracked(batch, plan, n_committed_B),
        )


class FoldState:
    """Verify records what each token adds to the state; commit sums the accepted records into it, all layers at once.

    The records take the place of the states per token in SGLang's pool (`memory/records.py`), and our verify that of
    SGLang's in the attention backend, so the backend hands one to the other, eagerly and in captured graphs alike. The
    windows of the causal convolution are small and stay SGLang's.

    Launches of a commit on a GPU, whatever the number of layers: one of SGLang's finds the slots whose states are kept,
    one folds, tracked states included, and one of SGLang's copies the windows (one per copy where they are not bf16).
    """

    def __init__(self, worker: TpModelWorker, width: int) -> None:
        self.runner = worker.model_runner
        self.slots = BlockSlots(worker, width)
        pool = self.runner.req_to_token_pool.mamba_pool
        if not isinstance(pool, RecordPool):
            raise NotSupported(
                f"SGLANG_DFLASH_GDN_STATE=fold needs SGLang's pool of recurrent states, found {type(pool).__name__}; "
                "set SGLANG_DFLASH_GDN_STATE=snapshot"
            )
        cache = pool.mamba_cache
        self.states_LSHVK, self.record_LRNX = cache.temporal, cache.intermediate_ssm
        self.n_key_heads = pool.n_key_heads
        self.windows = dataclasses.replace(cache, intermediate_ssm=None, temporal=cache.temporal.new_empty(0))
        # The form is chosen here, and shapes that never change are not checked at every step.
        self.fold = GDN_FOLD.form_for(self.states_LSHVK)

    def attach(self, backend: AttentionBackend) -> None:
        """Replace the backend's verify kernel by one that records."""
        gdn_backend(backend).kernel_dispatcher.verify_kernel = RecordingVerify(self.record_LRNX)

    def commit(self, batch: ScheduleBatch, plan: Plan, n_committed_B: torch.Tensor) -> None:
        """Sum the records of the committed tokens into the states of all layers."""
        backend = self.runner.attn_backend.linear_attn_backend
        slot_B = backend.forward_metadata.mamba_cache_indices[: plan.n_requests]
        last_B, tracked_B = self.slots.last_and_tracked(batch, plan, n_committed_B)
        track_slot_B = None
        if batch.mamba_track_indices is not None:
            track_slot_B = backend._translate_mamba_indices(batch.mamba_track_indices)
        kept = Kept(slot_B, n_committed_B, track_slot_B, tracked_B)
        self.fold(self.states_LSHVK, self.record_LRNX[:, :, : plan.width], kept, n_key_heads=self.n_key_heads)
        scatter_mamba_states_after_mtp_verify(self.windows, slot_B, last_B, track_slot_B, tracked_B)


class InPlaceState:
    """For blocks of one token: the target's verify decodes, which advances the states; commit copies the tracked ones.

    To fold them would read all states once more, and write records.
    """

    def __init__(self, worker: TpModelWorker) -> None:
        self.runner = worker.model_runner
        cache = self.runner.req_to_token_pool.mamba_pool.mamba_cache
        self.pools = cache.conv[0], cache.temporal

    def attach(self, backend: AttentionBackend) -> None:
        """Have the backend decode where it is asked to verify."""
        linear = gdn_backend(backend)
        linear.forward_extend = decoding_one_token(linear)  # type: ignore[method-assign]
        # Qwen3.5 then hands a verify's projections over as they are: decoding unpacks and convolves them in one launch.
        linear.supports_packed_verify = True  # type: ignore[attr-defined]

    def commit(self, batch: ScheduleBatch, plan: Plan, n_committed_B: torch.Tensor) -> None:
        """Copy the states that completed a track interval; verifying has advanced them all."""
        if batch.mamba_track_indices is None:
            return
        backend = self.runner.attn_backend.linear_attn_backend
        track_mamba_states_all_layers(
            *self.pools,
            backend.forward_metadata.mamba_cache_indices,
            (plan.prefix_len_B + 1) % track_interval(batch.tree_cache.page_size) == 0,
            backend._translate_mamba_indices(batch.mamba_track_indices),
            plan.n_requests,
        )


def decoding_one_token(backend: GDNAttnBackend) -> Callable[..., Any]:
    """Return a `forward_extend` that decodes where it is asked to verify; prompts go where they went.

    It returns what `forward_decode` returns: the outputs, with the gates z beside them where projections came packed.
    """
    extend, decode = backend.forward_extend, backend.forward_decode

    def forward_extend(*, forward_batch: ForwardBatch, **others: Any) -> torch.Tensor:
        forward = decode if forward_batch.forward_mode.is_target_verify() else extend
        return forward(forward_batch=forward_batch, **others)

    return forward_extend


class RecordingVerify:
    """SGLang's GDN backend calls it for a block of drafts; `intermediate_states_buffer` is a layer's record.

    States [S, H, V, K] at `cache_indices`, int [B], are read and not written.
    """

    supports_strided_target_verify_qkv = True

    def __init__(self, record_LRNX: torch.Tensor) -> None:
        # Chosen and checked as for the fold.
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
        **others: object,  # steps and rows, which are the block's and the batch's
    ) -> torch.Tensor:
        """Verify a layer's blocks: q, k [1, T, G, K], v [1, T, H, V], a and b [T, H]. Returns outputs [1, T, H, V]."""
        slot_B = cache_indices[: len(query_start_loc) - 1]
        x = Inputs(q[0], k[0], v[0], a, b, A_log, dt_bias)
        out = self.verify(x, ssm_states, slot_B, intermediate_states_buffer)
        return out[None]


def gdn_backend(backend: AttentionBackend) -> GDNAttnBackend:
    """Return the Gated DeltaNet part of `backend`.

    Raises:
        NotSupported: it has none.
    """
    if isinstance(backend, HybridLinearAttnBackend) and isinstance(backend.linear_attn_backend, GDNAttnBackend):
        return backend.linear_attn_backend
    raise NotSupported(
        f"SGLANG_DFLASH_GDN_STATE=fold needs SGLang's Gated DeltaNet attention backend, found "
        f"{type(backend).__name__}; set SGLANG_DFLASH_GDN_STATE=snapshot"
    )


class BlockSlots:
    """Finds the slots of a block of `width` tokens whose recurrent states a commit keeps, in one launch.

    SGLang's kernel also serves trees, so it asks for the row of every accepted token. In a chain slot i of request b is
    row b * width + i, whatever is accepted: the table is made once.
    """

    def __init__(self, worker: TpModelWorker, width: int) -> None:
        n_rows = len(worker.model_runner.req_to_token_pool.req_to_token)  # more than can run at once
        device = worker.model_runner.req_to_token_pool.req_to_token.device
        self.row_QN = torch.arange(n_rows * width, device=device).view(n_rows, width)

    def last_and_tracked(
        self, batch: ScheduleBatch, plan: Plan, n_committed_B: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        """Return two slots per request, int64 [B]: the last one kept, and the one that the radix cache can resume from.

        The second is the slot after which the committed length is a multiple of the track interval, or -1. It is None
        for all where nothing is tracked.
        """
        tracks = batch.mamba_track_indices is not None
        return fused_commit_track_indices(
            self.row_QN[: plan.n_requests],
            n_committed_B,
            plan.prefix_len_B if tracks else None,
            plan.width,
            track_interval(batch.tree_cache.page_size) if tracks else 0,
        )


@cache
def track_interval(page_size: int) -> int:
    """Return the interval of committed lengths at which states are tracked; a server's never changes."""
    return mamba_track_grid(page_size)


def make_state(worker: TpModelWorker, kind: GdnState | None, width: int) -> State:
    """Make what advances the target's recurrent states after blocks of `width` tokens.

    The target's memory pools and attention backends exist, its graphs do not.

    Args:
        worker: the target's.
        kind: None: the target has no such states, or nothing is verified.
    Raises:
        NotSupported: the target has further states that folding leaves behind.
    """
    if kind is None:
        return NoState()
    if kind is GdnState.SNAPSHOT:
        return SnapshotState(worker, width)
    pools = worker.model_runner.req_to_token_pool
    if pools.short_conv_pool.enabled or pools.ngram_pool.enabled:
        raise NotSupported(
            "SGLANG_DFLASH_GDN_STATE=fold does not advance the states of the target's per-layer embeddings; "
            "set SGLANG_DFLASH_GDN_STATE=snapshot"
        )
    return InPlaceState(worker) if width == 1 else FoldState(worker, width)
