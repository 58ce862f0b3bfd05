"""Emulated memory saver: what a release loses, what a resume restores, and the rule that weights lie in regions."""

import gc
from collections.abc import Iterator
from typing import NamedTuple

import pytest
import torch
from torch import nn

from sglang_dflash.platforms.rehearsal import saver as emulated
from sglang_dflash.platforms.rehearsal.graph import Graph
from sglang_dflash.platforms.rehearsal.saver import ReleasedMemory, Saver, held, require_inside

LARGE = 4096  # values, more bytes than `NOTICEABLE`


class Held(nn.Module):
    __module__ = "sglang_dflash.engine.draft.tested"

    def __init__(self) -> None:
        super().__init__()
        self.parameter = nn.Parameter(torch.zeros(LARGE), requires_grad=False)
        self.register_buffer("table", torch.zeros(LARGE))
        self.listed = [torch.zeros(LARGE)]


class HeldFields(NamedTuple):
    row: torch.Tensor


HeldFields.__module__ = Held.__module__


@pytest.fixture
def saver(monkeypatch: pytest.MonkeyPatch) -> Saver:
    """Return a saver whose rule sees no tensors that other tests have left."""
    monkeypatch.setattr(emulated, "held", lambda: iter(()))
    return Saver()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float8_e4m3fn])
def test_a_release_loses_values_and_a_resume_restores_those_with_a_copy(saver: Saver, dtype: torch.dtype) -> None:
    outside = torch.ones(4).to(dtype)
    with saver.region("weights", enable_cpu_backup=True):
        kept = torch.ones(4).to(dtype)
        view = kept[1:]
    with saver.region("weights"):
        lost = torch.ones(4).to(dtype)
    with saver.region("kv_cache"):
        other = torch.ones(4).to(dtype)
    addresses = kept.data_ptr(), lost.data_ptr()
    saver.pause("weights")
    assert torch.isnan(kept.float()).all()
    assert torch.isnan(view.float()).all()
    assert torch.isnan(lost.float()).all()
    saver.resume("weights")
    assert (kept.float() == 1).all()
    assert torch.isnan(lost.float()).all()
    assert (kept.data_ptr(), lost.data_ptr()) == addresses
    assert (outside.float() == 1).all()
    assert (other.float() == 1).all()


def test_released_memory_must_not_be_written(saver: Saver) -> None:
    with saver.region("kv_cache"):
        cache = torch.zeros(8)
    saver.pause("kv_cache")
    cache[3] = 1
    with pytest.raises(ReleasedMemory, match="32 bytes of kv_cache were written while they were released"):
        saver.resume("kv_cache")


def test_a_tag_is_released_and_resumed_by_turns(saver: Saver) -> None:
    with pytest.raises(ReleasedMemory, match="kv_cache is not released"):
        saver.resume("kv_cache")
    saver.pause("kv_cache")
    with pytest.raises(ReleasedMemory, match="kv_cache is released twice"):
        saver.pause("kv_cache")
    saver.resume("kv_cache")


def test_freed_tensors_are_forgotten(saver: Saver) -> None:
    with saver.region("weights"):
        kept = torch.ones(4) + 1
    assert list(saver.storages) == [kept.untyped_storage()._cdata]


def test_a_graph_replays_after_its_memory_was_released(saver: Saver) -> None:
    graph, weight = Graph(), torch.full((8,), 3.0)
    with torch.inference_mode(), saver.cuda_graph(cuda_graph=graph, tag="cuda_graph", enable_cpu_backup=True):
        out = weight * 2
    graph.replay()
    saver.pause("cuda_graph")
    assert torch.isnan(out).all()
    saver.resume("cuda_graph")
    assert (out == 6).all()
    weight.fill_(4)
    graph.replay()
    assert (out == 8).all()


@pytest.mark.parametrize("frozen", [False, True])
def test_the_rule_sees_attributes_parameters_buffers_and_fields(frozen: bool) -> None:
    """SGLang freezes the objects of a scheduler that has started."""
    module, fields = Held(), HeldFields(torch.zeros(1))
    if frozen:
        gc.freeze()
    found = {name: tensor for name, tensor in held() if name.startswith(("Held.", "HeldFields."))}
    assert found["Held.parameter"] is module.parameter
    assert found["Held.table"] is module.table
    assert found["Held.listed"] is module.listed[0]
    assert found["HeldFields.row"] is fields.row
    assert (gc.get_freeze_count() > 0) == frozen
    gc.unfreeze()


def test_weights_outside_all_regions_are_refused(saver: Saver, monkeypatch: pytest.MonkeyPatch) -> None:
    with saver.region("weights"):
        inside = torch.zeros(LARGE)
    outside, small = torch.zeros(LARGE), torch.zeros(4)

    def both() -> Iterator[tuple[str, torch.Tensor]]:
        yield from (("A.inside", inside), ("A.small", small), ("B.outside", outside))

    monkeypatch.setattr(emulated, "held", both)
    saver.pause("kv_cache")
    with pytest.raises(ReleasedMemory, match=r"a release would not give back B\.outside; allocate"):
        saver.pause("weights")
    monkeypatch.setattr(emulated, "held", lambda: iter([("A.inside", inside)]))
    require_inside(saver)
