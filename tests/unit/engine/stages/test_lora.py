"""LoRA routing tensors: each width's graphs must have their own, and SGLang must write into those of the used width."""

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from sglang.srt.lora.backend.chunked_backend import ChunkedSgmvLoRABackend
from sglang.srt.lora.backend.triton_backend import TritonLoRABackend
from sglang.srt.lora.backend.triton_v2_backend import TritonV2LoRABackend

from sglang_dflash.engine.stages import lora
from sglang_dflash.engine.stages.outputs import HiddenStates
from sglang_dflash.engine.stages.ranks import OneGroup
from sglang_dflash.engine.stages.state import NoState
from sglang_dflash.engine.stages.verifier import Verifier, WidthEngine


class Backend:
    """Stand-in for SGLang's LoRA backend, which allocates static tensors for every graph runner."""

    def __init__(self) -> None:
        self.batch_info: Any = None
        self._moe_cg_buffer_max_bs = 128

    def init_decode(self, width: int) -> None:
        self.cuda_graph_batch_info = f"static of {width}"


def runner_with(backend: Backend | None) -> Any:
    manager = backend and SimpleNamespace(lora_backend=backend)
    return SimpleNamespace(
        lora_manager=manager, attn_backend=None, decode_cuda_graph_runner=None, device="cuda", forward=None
    )


def test_each_width_uses_the_adapter_state_of_its_own_graphs() -> None:
    backend = Backend()
    runner, engines = runner_with(backend), dict[int, WidthEngine]()
    for width in (16, 1, 4):
        backend.init_decode(width)
        engines[width] = WidthEngine("backend", "graphs", NoState(), lora.routing_of(runner))
    verifier = Verifier(SimpleNamespace(model_runner=runner), engines, OneGroup(), HiddenStates(), on_host=False)
    for width in (16, 4, 1, 16):
        verifier.use(width)
        assert backend.cuda_graph_batch_info == f"static of {width}"
    assert backend.batch_info is None, "`batch_info`, which SGLang sets for each batch, stays"


@pytest.mark.parametrize("kind", [ChunkedSgmvLoRABackend, TritonLoRABackend, TritonV2LoRABackend])
def test_routing_holds_all_that_sglang_allocates_with_graphs(kind: type) -> None:
    backend = kind.__new__(kind)  # __init__ may need a GPU
    backend.max_loras_per_batch, backend.device = 2, torch.device("cpu")
    before = set(vars(backend))
    backend.init_decode_cuda_graph_batch_info(4, 8)
    made = {name: value for name, value in vars(backend).items() if name not in before}
    assert made
    assert lora.routing_of(runner_with(backend)) == made


def test_buffers_of_wider_graphs_are_kept() -> None:
    backend = Backend()
    lora.keep_buffers(runner_with(backend))
    assert backend._moe_cg_buffer_max_bs is None, "None keeps SGLang from allocating smaller buffers"


def test_a_dummy_batch_uses_no_adapters() -> None:
    prepared = list[Any]()
    runner = SimpleNamespace(lora_manager=SimpleNamespace(prepare_lora_batch=prepared.append))
    batch = SimpleNamespace(batch_size=3, lora_ids=None)
    lora.without_adapters(runner, batch)
    assert prepared == [batch]
    assert batch.lora_ids == [None] * 3


@pytest.mark.parametrize(("kind", "again"), [(TritonLoRABackend, True), (ChunkedSgmvLoRABackend, False)])
def test_only_triton_routes_a_decode_step_differently(kind: type, again: bool) -> None:
    """SGLang has routed the rows as those of a verify, for which triton leaves the sorted routing unchanged."""
    backend, prepared = kind.__new__(kind), list[Any]()
    backend.max_loras_per_batch, backend.device = 2, torch.device("cpu")
    backend.init_decode_cuda_graph_batch_info(4, 1)
    runner = SimpleNamespace(lora_manager=SimpleNamespace(lora_backend=backend, prepare_lora_batch=prepared.append))
    lora.route_decode_step(runner, "batch")
    assert prepared == ["batch"] * again


def test_without_lora_nothing_is_touched() -> None:
    runner, batch = runner_with(None), SimpleNamespace(batch_size=3, lora_ids=None)
    assert lora.routing_of(runner) == {}
    lora.use(runner, {})
    lora.keep_buffers(runner)
    lora.without_adapters(runner, batch)
    lora.route_decode_step(runner, batch)
    assert batch.lora_ids is None
