"""Commits of the target's recurrent states: from records (fold), from snapshots, or in place by decoding.

Tracking copies a request's state to another state slot when the state contains a multiple of the track interval of
tokens.
"""

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from sglang.kernels.ops.mamba import mamba_state_scatter_triton
from sglang.srt.layers.attention import hybrid_linear_attn_backend
from sglang.srt.layers.attention.hybrid_linear_attn_backend import HybridLinearAttnBackend
from sglang.srt.mem_cache.memory_pool import MambaPool
from sglang.srt.model_executor.forward_batch_info import ForwardMode
from sglang.srt.speculative import spec_utils
from sglang_dflash_kernels.accept import Accepted, accept_ref
from sglang_dflash_kernels.gdn_verify import split_record

from sglang_dflash.engine.memory import records
from sglang_dflash.engine.memory.records import RecordPool
from sglang_dflash.engine.stages import state
from sglang_dflash.engine.stages.state import (
    FoldState,
    InPlaceState,
    NoState,
    SnapshotState,
    make_state,
)
from sglang_dflash.errors import NotSupported
from sglang_dflash.flags import GdnState
from sglang_dflash.platforms.cpu import mamba_state
from tests.fixtures.recurrent import make_pool


def accepting(n_committed: list[int], prefix_len_B: torch.Tensor, *, width: int, track_interval: int) -> Accepted:
    """Return the outcome of a step in which each request commits `n_committed` tokens."""
    target_BN = torch.ones(len(n_committed), width, dtype=torch.int64)
    right_BN = torch.arange(width) < torch.tensor(n_committed)[:, None]
    return accept_ref(right_BN.long(), target_BN, prefix_len_B, track_interval)


def test_the_interval_is_zero_without_track_slots(monkeypatch):
    monkeypatch.setattr(state, "_track_interval", lambda page_size: 64 * page_size)
    batch = SimpleNamespace(mamba_track_indices=torch.zeros(1), tree_cache=SimpleNamespace(page_size=2))
    assert state.track_interval(batch) == 128
    batch.mamba_track_indices = None
    assert state.track_interval(batch) == 0


class LinearBackend:
    """Stand-in for SGLang's linear-attention backend, with the members that a commit of one token uses."""

    forward_metadata = SimpleNamespace(mamba_cache_indices=torch.tensor([3, 1, 2, 4, 0]))  # 0: padding request

    def _translate_mamba_indices(self, indices):
        return indices


def after_counting_verify(kind: type[MambaPool], width: int) -> Any:
    """Return a pool for blocks of up to 8 tokens, as a verify of `width` tokens for each of three requests leaves it.

    In the first column of a state, every element is the number of the block's tokens that the state contains. In the
    first column of a convolution window, every element is the index of the window's block slot. Records and
    snapshots of block slots from `width` on are NaN, so that a result shows if they were read.
    """
    pool = make_pool(kind, n_requests=3, n_tokens=8)
    cache = pool.mamba_cache
    cache.temporal.zero_()
    cache.conv[0].fill_(-1)
    if kind is RecordPool:
        names = {"n_value_heads": 4, "value_width": 64, "n_key_heads": 2, "key_width": 64}
        delta, key, total = split_record(cache.intermediate_ssm, **names)
        delta.fill_(1)
        key.zero_()
        key[..., 0] = 1
        total.zero_()
    else:
        cache.intermediate_ssm.copy_(torch.arange(1.0, 9).view(1, 1, 8, 1, 1, 1).expand_as(cache.intermediate_ssm))
    cache.intermediate_ssm[:, :, width:] = torch.nan
    for slot in range(8):  # one slot at a time, because windows may share memory
        cache.intermediate_conv_window[0][:, :, slot, :, 0] = slot
    return pool


@pytest.mark.parametrize(("kind", "make"), [(RecordPool, FoldState), (MambaPool, SnapshotState)])
def test_states_advance_by_kept_tokens_and_copies_to_the_interval(kind, make, monkeypatch):
    monkeypatch.setattr(records, "get_cuda_graph_max_batch_size", lambda n_requests: n_requests)
    monkeypatch.setattr(spec_utils, "mambaish_config", lambda config: True)
    for module in (mamba_state_scatter_triton, hybrid_linear_attn_backend):
        for name in ("fused_mamba_state_scatter_with_mask", "fused_conv_window_scatter_with_mask"):
            monkeypatch.setattr(module, name, mamba_state.scatter_states_with_mask)
    monkeypatch.setattr(mamba_state_scatter_triton, "_conv_multi_eligible", mamba_state.no_fused_conv_scatter)

    pool = after_counting_verify(kind, width=4)
    requests = SimpleNamespace(
        mamba_pool=pool,
        req_to_token=torch.zeros(5, 8),
        get_speculative_mamba2_params_all_layers=pool.get_speculative_mamba2_params_all_layers,
        short_conv_pool=SimpleNamespace(conv_state=None),
        ngram_pool=SimpleNamespace(context=None),
    )
    backend: Any = HybridLinearAttnBackend.__new__(HybridLinearAttnBackend)
    backend.linear_attn_backend = LinearBackend()
    backend.linear_attn_backend.req_to_token_pool = requests
    backend.linear_attn_backend.accept_lens_pool = None
    runner = SimpleNamespace(req_to_token_pool=requests, attn_backend=backend, model_config=None, model=None)
    batch = SimpleNamespace(
        mamba_track_indices=torch.tensor([5, 6, 4]),
        forward_mode=ForwardMode.TARGET_VERIFY,
        req_pool_indices=torch.arange(3),
    )
    tokens_BN = torch.zeros(3, 4, dtype=torch.int64)
    plan = SimpleNamespace(
        prefix_len_B=torch.tensor([62, 10, 60]), n_requests=3, width=4, verified=SimpleNamespace(tokens_BN=tokens_BN)
    )
    # Prefix lengths are 62, 10 and 60, and the track interval is 64. The first request has 3 kept rows, and its state
    # contains 64 tokens after the second. The third has 4, and its state contains 64 tokens after the last.
    accepted = accepting([3, 2, 4], plan.prefix_len_B, width=4, track_interval=64)
    make(SimpleNamespace(model_runner=runner)).commit(batch, plan, accepted)

    # The requests' states are in state slots 3, 1 and 2. Tracked copies go to 5 and 4. The second request does not
    # reach 64, so slot 6 stays 0.
    n_tokens = torch.tensor([0, 2, 4, 3, 4, 2, 0])
    temporal, conv = pool.mamba_cache.temporal[..., 0], pool.mamba_cache.conv[0][..., 0]
    assert torch.equal(temporal, n_tokens.view(1, 7, 1, 1).expand_as(temporal).float())
    assert torch.equal(conv, (n_tokens - 1).view(1, 7, 1).expand_as(conv).to(conv.dtype))


def target(pool: Any) -> Any:
    """Return a worker whose target keeps recurrent states in `pool`."""
    off = SimpleNamespace(enabled=False)
    pools = SimpleNamespace(mamba_pool=pool, short_conv_pool=off, ngram_pool=off, req_to_token=torch.zeros(5, 8))
    runner = SimpleNamespace(req_to_token_pool=pools, decode_attention_backend_str="fa3", sliding_window_size=None)
    return SimpleNamespace(model_runner=runner)


@pytest.mark.parametrize(
    ("asked", "width", "kind"),
    [
        (None, 16, NoState),
        (GdnState.FOLD, 16, FoldState),
        (GdnState.FOLD, 1, InPlaceState),  # decoding has already updated the state, so nothing is left to fold
        (GdnState.SNAPSHOT, 16, SnapshotState),
        (GdnState.SNAPSHOT, 1, SnapshotState),
    ],
)
def test_the_flag_and_width_select_the_state_class(asked, width, kind, monkeypatch):
    monkeypatch.setattr(records, "get_cuda_graph_max_batch_size", lambda n_requests: n_requests)
    worker = target(make_pool(RecordPool, 1, 4))
    assert type(make_state(worker, asked, width)) is kind


@pytest.mark.parametrize(
    ("width", "backend", "window", "decodes"),
    [(1, "triton", None, True), (1, "triton", 511, False), (1, "fa3", 511, True), (4, "triton", None, False)],
)
def test_one_token_is_decoded_if_the_window_is_that_of_a_verify(width, backend, window, decodes, monkeypatch):
    """SGLang's Triton backend decodes with sliding windows that are one token shorter than those of its verify."""
    monkeypatch.setattr(records, "get_cuda_graph_max_batch_size", lambda n_requests: n_requests)
    worker = target(make_pool(RecordPool, 1, 4))
    worker.model_runner.decode_attention_backend_str = backend
    worker.model_runner.sliding_window_size = window
    assert make_state(worker, None, width).decodes == decodes
    assert type(make_state(worker, GdnState.FOLD, width)) is (InPlaceState if decodes else FoldState)
    assert not make_state(worker, GdnState.SNAPSHOT, width).decodes


def test_a_pool_without_records_is_refused():
    with pytest.raises(NotSupported, match=r"found MambaPool; set SGLANG_DFLASH_GDN_STATE=snapshot"):
        make_state(target(make_pool(MambaPool, 1, 4)), GdnState.FOLD, 16)


@pytest.mark.parametrize("tracked", [True, False])
def test_in_place_commit_copies_the_states_that_completed_an_interval(tracked, monkeypatch):
    monkeypatch.setattr(state, "track_mamba_states_all_layers", mamba_state.track_mamba_states_all_layers)
    conv, temporal = torch.randn(2, 9, 4, 3), torch.randn(2, 9, 2, 5, 5)  # layers, state slots, ...
    want = conv.clone(), temporal.clone()
    for pool in want if tracked else ():
        pool[:, 8] = pool[:, 1]  # the second request's state, with 64 tokens after the commit
    cache = SimpleNamespace(conv=[conv], temporal=temporal)
    runner = SimpleNamespace(
        req_to_token_pool=SimpleNamespace(mamba_pool=SimpleNamespace(mamba_cache=cache)),
        attn_backend=SimpleNamespace(linear_attn_backend=LinearBackend()),
    )
    # The last request also completes an interval, but its memory was freed.
    batch = SimpleNamespace(mamba_track_indices=torch.tensor([6, 8, 7, -1]) if tracked else None)
    plan = SimpleNamespace(prefix_len_B=torch.tensor([64, 63, 62, 127]), n_requests=4)
    accepted = accepting([1, 1, 1, 1], plan.prefix_len_B, width=1, track_interval=64 if tracked else 0)
    InPlaceState(SimpleNamespace(model_runner=runner)).commit(batch, plan, accepted)
    assert torch.equal(conv, want[0])
    assert torch.equal(temporal, want[1])


@pytest.mark.parametrize("width", [1, 16])
@pytest.mark.parametrize("pool", ["short_conv_pool", "ngram_pool"])
def test_states_of_per_layer_embeddings_are_not_folded(pool, width):
    worker = target(None)
    setattr(worker.model_runner.req_to_token_pool, pool, SimpleNamespace(enabled=True))
    with pytest.raises(NotSupported, match=r"per-layer embeddings; set SGLANG_DFLASH_GDN_STATE=snapshot"):
        make_state(worker, GdnState.FOLD, width)
