"""Memory of ring buffers and token histories: the bytes left for the target, and the pools that are built.

A ring holds the context K/V of a draft with a sliding window, for one request.
"""

from contextlib import nullcontext
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from sglang.srt.model_executor.pool_configurator import MemoryPoolConfig
from sglang.srt.speculative.base_spec_worker import BaseSpecWorker, HiCacheDraftMode, HiCacheDraftPlan
from sglang.srt.speculative.dflash_utils import scale_kv_cell_size_per_token_for_dflash

from sglang_dflash.engine.memory import draft_kv, texts
from sglang_dflash.engine.memory.draft_kv import Rings, copy_along, target_alone
from sglang_dflash.engine.worker import DFlashWorker
from sglang_dflash.errors import NotSupported
from sglang_dflash.flags import Copy

WINDOW, BLOCK = 64, 16


def room(
    monkeypatch: pytest.MonkeyPatch,
    *,
    page: int = 1,
    hybrid: bool = False,
    slot_bytes: int | None = 100,
    n_groups: int = 1,
) -> int:
    """Return how many of 10**6 bytes are left for the target's KV, with at most 8 requests and 15 state slots.

    Args:
        n_groups: number of groups of ranks that serve different requests. They share the 8 requests.
    """
    schedule = SimpleNamespace(page_size=page, max_running_requests=8, max_mamba_cache_size=15)
    monkeypatch.setattr(draft_kv, "get_schedule", lambda: schedule)
    configurator = SimpleNamespace(
        attn_dp_size=n_groups,
        dflash_draft_cell_size_per_token=slot_bytes,
        mambaish_config=object() if hybrid else None,
        _calculate_mamba_ratio=lambda: 5,
    )
    return Rings(WINDOW, BLOCK).available_bytes(lambda configurator, before: 10**6, configurator, 0.0)


@pytest.mark.parametrize(("page", "ring"), [(1, 80), (16, 96)])
def test_rings_are_subtracted_from_the_targets_memory(monkeypatch, page, ring):
    assert room(monkeypatch, page=page) == 10**6 - 9 * ring * 100
    # A hybrid target needs 5 of the 15 state slots per request, so 3 requests run. Row 0 (padding) has a ring as well.
    assert room(monkeypatch, page=page, hybrid=True) == 10**6 - 4 * ring * 100
    # With attention data parallelism a rank has rings only for the requests of its group, at least one.
    assert room(monkeypatch, page=page, n_groups=2) == 10**6 - 5 * ring * 100
    assert room(monkeypatch, page=page, n_groups=16) == 10**6 - 2 * ring * 100


def test_rings_larger_than_the_memory_are_refused(monkeypatch):
    with pytest.raises(ValueError, match=r"ring buffers for 8 requests take 0\.7 GiB, .* lower --max-running-requests"):
        room(monkeypatch, slot_bytes=10**6)


def test_an_unknown_slot_size_is_refused(monkeypatch):
    with pytest.raises(NotSupported, match=r"SGLANG_DFLASH_WORKER=stock.*, or drop --speculative-draft-window-s"):
        room(monkeypatch, slot_bytes=None)


def test_pool_and_table_have_a_ring_for_each_row(monkeypatch):
    execution = SimpleNamespace(features=SimpleNamespace(enable_memory_saver=False))
    monkeypatch.setattr(draft_kv, "get_exec", lambda: execution)
    monkeypatch.setattr(draft_kv, "get_schedule", lambda: SimpleNamespace(page_size=1))
    target = MemoryPoolConfig(max_total_num_tokens=100_000, max_running_requests=8, mem_fraction_static=0.8)
    pool, table = Rings(WINDOW, BLOCK).pools(target, None, "cpu")
    assert (pool.max_total_num_tokens, pool.max_running_requests) == (9 * 80, 8)
    assert table.req_to_token.shape == (9, 80)
    assert target.max_total_num_tokens == 100_000


def test_only_the_targets_bytes_per_token_are_counted():
    sizes = {"target_cell_size_per_token": 4096, "target_num_layers": 16, "draft_num_layers": 5}
    assert scale_kv_cell_size_per_token_for_dflash(**sizes) > 4096
    assert target_alone(scale_kv_cell_size_per_token_for_dflash, **sizes) == 4096


@pytest.mark.parametrize("row", [96, 4096 + 32])
def test_page_tables_are_as_wide_as_the_drafts_rows(row):
    """Backends make page tables of `context_len` columns, so `context_len` is set to the row length of the
    request table while page tables are made.

    In a narrower table a block that ends past the context length would be written into the next row. A ring's row is
    shorter than the context.
    """
    runner = SimpleNamespace(
        model_config=SimpleNamespace(context_len=4096),
        req_to_token_pool=SimpleNamespace(req_to_token=torch.zeros(9, row)),
    )
    seen: list[int] = []
    worker: Any = object.__new__(DFlashWorker)
    worker.draft_runner = runner
    worker.making_draft = nullcontext

    class Made(Exception):
        """Exception raised in place of building the draft's attention backends."""

    def make() -> None:
        seen.append(runner.model_config.context_len)
        raise Made

    worker._draft_worker = SimpleNamespace(init_attention_backends=make)
    with pytest.raises(Made):
        worker.init_attention_backends()
    assert seen == [row]


@pytest.mark.parametrize(("window", "mode"), [(None, HiCacheDraftMode.SIDECAR), (64, HiCacheDraftMode.NONE)])
def test_a_hierarchical_cache_copies_shared_slots_but_no_rings(monkeypatch, window, mode):
    """The hierarchical cache indexes the draft's pool by the target's slot ids. A pool of rings has fewer slots."""
    plan = HiCacheDraftPlan(HiCacheDraftMode.SIDECAR, ("the draft's pool",))
    monkeypatch.setattr(BaseSpecWorker, "_build_hicache_draft_plan", lambda self: plan)
    worker = DFlashWorker.__new__(DFlashWorker)
    worker.config = SimpleNamespace(draft_window=window)
    worker.init_hicache_draft_plan()
    assert worker.hicache_draft_plan.mode is mode


def test_a_drafts_kv_are_offloaded_with_the_targets():
    """A retracted request resumes in other KV slots. So the draft's K/V must move together with the target's."""

    class Pool:
        def __init__(self, first: int) -> None:
            self.kv = torch.arange(first, first + 8)

        def get_cpu_copy(self, slots: torch.Tensor, **_: object) -> torch.Tensor:
            return self.kv[slots].clone()

        def load_cpu_copy(self, copy: torch.Tensor, slots: torch.Tensor, **_: object) -> None:
            self.kv[slots] = copy

    target, draft = Pool(0), Pool(10)
    copy_along(target, draft)
    copy = target.get_cpu_copy(torch.tensor([1, 2]), mamba_indices=None)
    target.kv, draft.kv = torch.zeros(2, 8, dtype=torch.long)
    target.load_cpu_copy(copy, torch.tensor([5, 3]), mamba_indices=None)
    assert target.kv.tolist() == [0, 0, 0, 2, 0, 1, 0, 0]
    assert draft.kv.tolist() == [0, 0, 0, 12, 0, 11, 0, 0]


@pytest.mark.parametrize(
    ("copy", "disaggregation", "kept"),
    [
        (Copy.OFF, "null", False),
        (Copy.AUTO, "null", True),
        (Copy.ON, "null", True),
        (Copy.AUTO, "prefill", False),
        (Copy.AUTO, "decode", False),
    ],
)
def test_disaggregated_servers_keep_no_token_histories(copy: Copy, disaggregation: str, kept: bool) -> None:
    assert (not texts.why_no_copies(copy, disaggregation)) is kept


@pytest.mark.parametrize("copy", [Copy.ON, Copy.RANDOM])
@pytest.mark.parametrize(
    ("disaggregation", "reason"),
    [("prefill", "a prefill server does not decode"), ("decode", "another server reads the prompts, .*")],
)
def test_copying_is_refused_on_disaggregated_servers(copy: Copy, disaggregation: str, reason: str) -> None:
    with pytest.raises(NotSupported, match=rf"COPY={copy} .* {disaggregation} \({reason}\); set SGLANG_DFLASH_COPY to"):
        texts.why_no_copies(copy, disaggregation)


def test_token_histories_are_subtracted_from_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    schedule = SimpleNamespace(max_running_requests=48)
    monkeypatch.setattr("sglang.srt.runtime_context.get_schedule", lambda: schedule)
    for n_groups, n_rows in ((1, 49), (8, 7)):
        configurator = SimpleNamespace(attn_dp_size=n_groups, model_config=SimpleNamespace(context_len=262144))
        left = texts.beside_texts(lambda configurator, before: 10**9, configurator, 1.0)
        assert left == 10**9 - n_rows * 262144 * 4
