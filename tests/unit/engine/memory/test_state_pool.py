"""Memory of recurrent records. A record is the contribution of one verified token to the recurrent states.

The bytes allocated, the bytes computed by `block_bytes`, and the bytes that SGLang counts must be equal.
"""

from functools import partial
from types import SimpleNamespace
from typing import Any
from unittest.mock import patch

import pytest
import torch
from sglang.srt.mem_cache.memory_pool import HybridReqToTokenPool, MambaPool

from sglang_dflash.engine.memory import records as state_pool
from sglang_dflash.engine.memory.records import RecordPool, block_bytes, count_records, snapshot_bytes
from tests.fixtures.recurrent import TINY, make_pool, params


@pytest.fixture(autouse=True)
def capture_as_many_as_run(monkeypatch: pytest.MonkeyPatch) -> None:
    """Make the largest captured batch as large as the number of requests that may run."""
    monkeypatch.setattr(state_pool, "get_cuda_graph_max_batch_size", lambda n_requests: n_requests)


@pytest.mark.parametrize(("n_requests", "n_tokens"), [(1, 8), (4, 16)])
def test_computed_bytes_equal_allocated_bytes(n_requests: int, n_tokens: int) -> None:
    pool = make_pool(RecordPool, n_requests, n_tokens)
    cache = pool.mamba_cache
    assert cache.intermediate_ssm.dtype is torch.float32, "for states of any dtype"
    # SGLang's pools have one row more for padding.
    assert pool.block_bytes == block_bytes(params(TINY, 3), n_tokens) * (n_requests + 1)
    strips = pool._intermediate_conv_window_phys
    assert pool.block_bytes == sum(tensor.nbytes for tensor in (cache.intermediate_ssm, *strips))
    persistent = sum(tensor.nbytes for tensor in (cache.temporal, *cache.conv))
    assert pool.mem_usage == pytest.approx((persistent + pool.block_bytes) / 2**30)


def test_every_request_of_a_captured_batch_has_a_record(monkeypatch: pytest.MonkeyPatch) -> None:
    """SGLang may round the size of captured batches up to a multiple of the rank count (here 8).

    Such a batch may have more requests than may run. The pool has a row for each request of the batch, and at least
    one row more than requests may run: the padding row.
    """
    monkeypatch.setattr(state_pool, "get_cuda_graph_max_batch_size", lambda n_requests: -(-n_requests // 8) * 8)
    for n_requests, n_rows in ((3, 8), (8, 9), (9, 16)):
        assert make_pool(RecordPool, n_requests, 4).mamba_cache.intermediate_ssm.shape[1] == n_rows


def test_the_pool_differs_from_sglangs_only_in_states_per_token() -> None:
    ours, stock = make_pool(RecordPool, 4, 8), make_pool(MambaPool, 4, 8)
    assert vars(ours).keys() >= vars(stock).keys() - {"conv_window_axis"}  # read only by SGLang's own allocation
    for name, theirs in vars(stock.mamba_cache).items():
        mine = getattr(ours.mamba_cache, name)
        if name == "intermediate_ssm":
            assert theirs.nbytes > 7 * mine.nbytes
        elif isinstance(theirs, list):
            assert [(x.shape, x.dtype) for x in mine] == [(x.shape, x.dtype) for x in theirs]
        elif theirs is not None:
            assert (mine.shape, mine.dtype) == (theirs.shape, theirs.dtype)
        else:
            assert mine is None


def test_windows_overlap_as_in_sglangs_pool_and_channels_are_contiguous() -> None:
    """A write to one token's window changes the windows of its neighbours, in both pools alike."""
    (mine,), (theirs,) = (
        make_pool(kind, 4, 8).mamba_cache.intermediate_conv_window for kind in (RecordPool, MambaPool)
    )
    random = torch.Generator().manual_seed(0)
    for slot in torch.randperm(8, generator=random):
        mine[:, :, slot] = theirs[:, :, slot] = torch.randn(theirs[:, :, slot].shape, generator=random).to(theirs.dtype)
        assert torch.equal(mine, theirs)
    n_channels = mine.shape[3]
    assert mine.stride()[2:] == (n_channels, 1, n_channels)


def counted(monkeypatch: pytest.MonkeyPatch, pool: type[MambaPool], n_tokens: int) -> float:
    """Return the bytes per request that SGLang's formula counts for a block of `n_tokens`."""
    spec = SimpleNamespace(speculative_num_draft_tokens=n_tokens)
    spec.override = partial(patch.multiple, spec)
    monkeypatch.setattr(state_pool, "get_spec", lambda: spec)
    monkeypatch.setattr(HybridReqToTokenPool, "mamba_pool_cls", pool)
    cache_params = params(TINY, 3)
    configurator = SimpleNamespace(mambaish_config=SimpleNamespace(mamba2_cache_params=cache_params))
    sizes = []

    def stock(_: Any, rest_gib: float) -> float:
        sizes.append(cache_params.mamba_cache_per_req * spec.speculative_num_draft_tokens)
        return rest_gib / 2

    assert count_records(stock, configurator, 8.0) == 4.0
    assert spec.speculative_num_draft_tokens == n_tokens
    return sizes[0]


def test_sglang_counts_the_allocated_bytes(monkeypatch: pytest.MonkeyPatch) -> None:
    assert counted(monkeypatch, RecordPool, 16) == pytest.approx(block_bytes(params(TINY, 3), 16))
    assert counted(monkeypatch, MambaPool, 16) == snapshot_bytes(params(TINY, 3), 16)


def test_use_records_selects_the_record_pool(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(HybridReqToTokenPool, "mamba_pool_cls", MambaPool)
    state_pool.use_records()
    assert HybridReqToTokenPool.mamba_pool_cls is RecordPool
