"""Regions of the memory saver: what this package allocates in which region, and the padding row after a resume."""

from collections.abc import Callable
from contextlib import AbstractContextManager
from types import SimpleNamespace
from typing import Any, cast

import pytest
import torch
from sglang.srt.layers.rotary_embedding import get_rope
from sglang.srt.managers.io_struct import ResumeMemoryOccupationReqInput
from torch import nn

from sglang_dflash.engine import saver
from sglang_dflash.engine.draft.head_copy import Fp8Head, HeadCopy
from sglang_dflash.engine.draft.rotary import reach
from sglang_dflash.engine.draft.weights import lay_side_by_side
from sglang_dflash.engine.saver import clear_padding
from sglang_dflash.engine.stages.context_kv import LateRows
from sglang_dflash.engine.stages.copier import TextCopies
from sglang_dflash.platforms.rehearsal.saver import Region, Saver

WEIGHTS, KV_CACHE = Region("weights", restored=True), Region("kv_cache", restored=False)


def head() -> Any:
    quant_method = SimpleNamespace(process_weights_after_loading=lambda layer: None)
    return SimpleNamespace(weight=torch.randn(6, 4), quant_method=quant_method)


def table_after(n_positions: int, **scaling: Any) -> torch.Tensor:
    """Return the table of a draft that was trained for 16 positions and serves `n_positions`."""
    rope = {"rope_type": "default", "rope_theta": 10_000.0} | scaling
    rotary = get_rope(8, 8, 16, 10_000, rope_scaling=rope, dtype=torch.float32)
    reach(rotary, n_positions)
    assert rotary.cos_sin_cache.shape[0] >= n_positions
    return rotary.cos_sin_cache


ALLOCATED: dict[str, tuple[Region, Callable[[], torch.Tensor]]] = {
    "stacked weights": (WEIGHTS, lambda: lay_side_by_side([nn.Parameter(torch.randn(3, 2)) for _ in range(2)])),
    "rows of the head": (WEIGHTS, lambda: HeadCopy(head(), torch.tensor([1, 4])).rows_DH),
    "fp8 head": (WEIGHTS, lambda: Fp8Head(head()).rows_DH),
    "scales of the fp8 head": (WEIGHTS, lambda: Fp8Head(head()).scale_D1),
    "rotary table": (WEIGHTS, lambda: table_after(16)),
    "extended rotary table": (WEIGHTS, lambda: table_after(5000)),
    "table of linear scaling": (WEIGHTS, lambda: table_after(5000, rope_type="linear", factor=4.0)),
    "waiting rows": (KV_CACHE, lambda: LateRows(4, 2, torch.zeros(1, 3)).features_TC),
    "token histories": (KV_CACHE, lambda: TextCopies(torch.zeros(2, 9, dtype=torch.int32), 10, 4).text_QM),
}


@pytest.mark.parametrize("what", ALLOCATED)
def test_large_tensors_are_allocated_in_their_region(what: str, monkeypatch: pytest.MonkeyPatch) -> None:
    region, allocate = ALLOCATED[what]
    emulated = Saver()

    def entered(tag: str, *, restored: bool) -> AbstractContextManager[None]:
        return emulated.region(tag, restored)

    monkeypatch.setattr(saver, "_region", entered)
    monkeypatch.setattr(saver, "is_on", lambda: True)
    tensor = allocate()
    assert emulated.storages[tensor.untyped_storage()._cdata][0] == region


def test_counts_stay_outside(monkeypatch: pytest.MonkeyPatch) -> None:
    """Counts of copies must stay valid, and no step would write them again."""
    emulated = Saver()
    monkeypatch.setattr(saver, "_region", lambda tag, *, restored: emulated.region(tag, restored))
    copies = TextCopies(torch.zeros(2, 9, dtype=torch.int32), 10, 4)
    for counts in (copies.counts_QK2, copies.totals_K2):
        assert counts.untyped_storage()._cdata not in emulated.storages


@pytest.mark.parametrize("on", [True, False])
def test_sglangs_saver_is_used_if_it_is_on(on: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    regions = list[tuple[Any, ...]]()

    class Adapter:
        def region(self, tag: str, enable_cpu_backup: bool = False) -> AbstractContextManager[None]:
            regions.append((tag, enable_cpu_backup))
            return Saver().region(tag)

    features = SimpleNamespace(enable_memory_saver=on)
    monkeypatch.setattr(saver, "get_context", lambda: SimpleNamespace(is_config_namespace_published=lambda name: True))
    monkeypatch.setattr(saver, "get_exec", lambda: SimpleNamespace(features=features))
    monkeypatch.setattr(saver, "TorchMemorySaverAdapter", SimpleNamespace(create=lambda enable: Adapter()))
    with saver.weights(), saver.kv_cache():
        pass
    assert regions == ([("weights", True), ("kv_cache", False)] if on else [])


def test_outside_a_server_nothing_is_saved() -> None:
    assert not saver.is_on()
    with saver.weights(), saver.kv_cache():
        assert torch.ones(2).sum() == 2


@pytest.mark.parametrize(
    ("tags", "row"), [(["weights"], [7, 7]), (["weights", "kv_cache"], [0, 0]), ([], [0, 0]), (None, [0, 0])]
)
def test_the_padding_row_is_written_after_the_kv_cache_is_resumed(tags: list[str] | None, row: list[int]) -> None:
    pools = [SimpleNamespace(req_to_token=torch.full((3, 2), 7, dtype=torch.int32)) for _ in range(2)]
    runners = [cast(Any, SimpleNamespace(req_to_token_pool=pool)) for pool in pools]
    manager = SimpleNamespace(
        tp_worker=SimpleNamespace(model_runner=runners[0]), draft_worker=SimpleNamespace(draft_runner=runners[1])
    )
    assert clear_padding("result", manager, ResumeMemoryOccupationReqInput(tags=tags)) == "result"
    for pool in pools:
        assert pool.req_to_token.tolist() == [row, [7, 7], [7, 7]]
