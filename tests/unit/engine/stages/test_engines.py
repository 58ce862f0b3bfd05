"""Engines: the selection of widths whose graphs are captured if the graphs of all widths exceed the free memory."""

import math
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from functools import partial
from types import SimpleNamespace
from typing import Any
from unittest.mock import patch

import pytest
import torch
from sglang.srt.model_executor import forward_batch_info
from sglang.srt.model_executor.cuda_graph_config import CudaGraphConfig, PhaseConfig
from sglang.srt.model_executor.forward_batch_info import CaptureHiddenMode
from sglang.srt.speculative.spec_info import SpeculativeAlgorithm
from torch import nn

from sglang_dflash.engine.stages import engines
from sglang_dflash.engine.stages.engines import build_while_they_fit, capturing, fewer
from sglang_dflash.engine.stages.state import NoState
from sglang_dflash.engine.stages.verifier import WidthEngine

WIDTHS = (1, 2, 4, 6, 8, 12, 16)


def built(free_gib: float, graphs_gib: float, reserve_gib: float = 0.0) -> tuple[list[int], float]:
    """Return the widths in the order built, and the memory left free, in GiB."""
    left, widths = free_gib, list[int]()

    def build(width: int) -> WidthEngine:
        nonlocal left
        left -= graphs_gib if width < 16 else 0  # SGLang has already captured width 16
        widths.append(width)
        return WidthEngine(None, None, NoState(), {})

    engines = build_while_they_fit(WIDTHS, build, lambda: left, reserve_gib)
    assert list(engines) == widths
    return widths, left


@pytest.mark.parametrize("free_gib", [10.0, math.inf])
def test_all_widths_are_built_if_they_fit(free_gib: float) -> None:
    assert built(free_gib, 0.5)[0] == [16, 1, 4, 8, 2, 12, 6]


@pytest.mark.parametrize(("graphs_gib", "n_built"), [(1.0, 6), (1.25, 5), (2.0, 3), (2.6, 2), (6.0, 2)])
def test_half_of_the_memory_stays_free_once_graph_sizes_are_known(graphs_gib: float, n_built: int) -> None:
    """The memory of a width's graphs is known only after a capture, so width 1 is built even if it takes too much."""
    widths, left = built(10.0, graphs_gib)
    assert widths == [16, 1, 4, 8, 2, 12, 6][:n_built]
    assert left >= 5 or graphs_gib > 5


@pytest.mark.parametrize(("reserve_gib", "n_built"), [(4.0, 6), (6.5, 4), (8.0, 3), (9.5, 2), (11.0, 1)])
def test_the_reserve_of_sampling_and_prompts_stays_free(reserve_gib: float, n_built: int) -> None:
    """The reserve may exceed half of the free memory.

    Width 1 may use a part of the reserve, because the memory of its graphs is not known before their capture.
    """
    widths, left = built(10.0, 1.0, reserve_gib)
    assert widths == [16, 1, 4, 8, 2, 12, 6][:n_built]
    assert left >= reserve_gib or n_built < 3


def test_a_width_without_room_is_left_out(caplog: pytest.LogCaptureFixture) -> None:
    """SGLang wraps the error of a capture. On one of several ranks, and for the only width, the launch ends."""

    def build(width: int) -> WidthEngine:
        if width in (4, failing):
            try:
                raise torch.OutOfMemoryError("CUDA out of memory")
            except RuntimeError as error:
                raise Exception(f"Capture cuda graph failed: {error}")  # noqa: B904, as SGLang raises it
        return WidthEngine(None, None, NoState(), {})

    failing = 0
    assert list(build_while_they_fit(WIDTHS, build, lambda: 3.0, 0.0, may_fail=True)) == [16, 1]
    assert caplog.messages == ["width 4: memory ran out during its capture, with 3.00 GiB free before it"]
    with pytest.raises(Exception, match="Capture cuda graph failed"):
        build_while_they_fit(WIDTHS, build, lambda: 3.0, 0.0, may_fail=False)
    failing = 16
    with pytest.raises(Exception, match="Capture cuda graph failed"):
        build_while_they_fit(WIDTHS, build, lambda: 3.0, 0.0, may_fail=True)
    with pytest.raises(ZeroDivisionError):
        build_while_they_fit(
            (1, 16),
            lambda width: WidthEngine(None, width // (width - 1), NoState(), {}),
            lambda: 3.0,
            0.0,
            may_fail=True,
        )


CAPTURED = [*range(1, 9), *range(10, 33, 2), *range(40, 65, 4), *range(72, 257, 8)]  # SGLang's sizes with DFLASH


def test_narrow_widths_are_captured_for_fewer_batches() -> None:
    assert fewer([*range(1, 9), 10, 12, 14, 16, 24, 32, 40, 44, 48], 1) == [1, 2, 4, 8, 16, 32, 48]
    assert fewer([1, 2, 3], 16) == [1, 2, 3]
    assert fewer([24], 8) == [24]
    assert fewer(CAPTURED[: CAPTURED.index(48) + 1], 8) == [1, 2, 4, 8, 16, 20, 26, 32, 40, 48]
    assert fewer(CAPTURED[: CAPTURED.index(48) + 1], 12) == [1, 2, 4, 8, 12, 16, 20, 26, 32, 40, 48]


@pytest.mark.parametrize("most", [9, 24, 39, 48, 64, 100, 256])
@pytest.mark.parametrize("width", [1, 4, 6, 8, 12, 24, 32])
def test_batches_above_128_rows_are_padded_by_a_quarter_at_most(width: int, most: int) -> None:
    """SGLang's own padding may exceed a quarter, for example that of 33 requests to 40 in a server of 33."""
    sizes = sorted({size for size in CAPTURED if size < most} | {most})
    kept = fewer(sizes, width)
    for n in range(128 // width + 1, most + 1):
        runs, sglang_runs = (next(size for size in captured if size >= n) for captured in (kept, sizes))
        assert runs <= max(1.25 * n, sglang_runs)
    assert len(kept) <= len(fewer(sizes, 1)) + 12


def test_a_batch_runs_at_the_next_captured_size() -> None:
    def ran(**graphs: Any) -> list[int]:
        engine = WidthEngine(None, SimpleNamespace(**graphs) if graphs else None, NoState(), {})
        return [engine.padded(n) for n in (1, 3, 4, 5)]

    assert ran(capture_bs=[2, 4], disable_padding=False) == [2, 4, 4, 5], "5 requests run eagerly"
    assert ran(capture_bs=[2, 4], disable_padding=True) == [1, 3, 4, 5]
    assert ran() == [1, 3, 4, 5]


def test_sglang_captures_the_given_sizes(monkeypatch: pytest.MonkeyPatch) -> None:
    """After the capture SGLang's own sizes are restored."""
    graph = SimpleNamespace(cuda_graph_config=CudaGraphConfig(decode=PhaseConfig(bs=[1, 2, 3], max_bs=3)))

    @contextmanager
    def override(cuda_graph_config: CudaGraphConfig) -> Iterator[None]:
        before, graph.cuda_graph_config = graph.cuda_graph_config, cuda_graph_config
        yield
        graph.cuda_graph_config = before

    graph.override = override
    monkeypatch.setattr(engines, "get_exec", lambda: SimpleNamespace(graph=graph))
    with capturing([1, 3]):
        assert graph.cuda_graph_config.decode.bs == [1, 3]
        assert graph.cuda_graph_config.decode.max_bs == 3
    assert graph.cuda_graph_config.decode.bs == [1, 2, 3]


@pytest.mark.parametrize("width", [1, 4])
def test_graphs_are_captured_with_the_state_attached(width: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Graphs captured before `state.attach` would run without the state.

    SGLang's backends and graph runners read the width from its configuration, which holds the widest verify otherwise.
    """
    order: list[Any] = []
    spec = SimpleNamespace(speculative_num_draft_tokens=8)
    spec.override = partial(patch.multiple, spec)

    class Graphs:
        capture_bs = (1, 2, 3, 4)

        def __init__(self, runner: object, *, attn_backend: Any, speculative_num_draft_tokens: int) -> None:
            assert attn_backend is backend
            assert spec.speculative_num_draft_tokens == width
            attn_backend.init_cuda_graph_state(4, 4 * width)
            order.append(f"captured at {speculative_num_draft_tokens}")

    backend = SimpleNamespace(init_cuda_graph_state=lambda max_bs, max_num_tokens: order.append("allocated"))
    runner = SimpleNamespace(
        attn_backend="SGLang's own",
        _get_attention_backend=lambda **_: order.append(spec.speculative_num_draft_tokens) or backend,
        prefill_attention_backend_str="fa3",
        decode_attention_backend_str="fa3",
        kv_index_translator=SimpleNamespace(bind_and_verify_backends=lambda backends: order.append("bound")),
        model=nn.Module(),
    )
    state = SimpleNamespace(attach=lambda to: order.append("attached"), decodes=width == 1)
    monkeypatch.setattr(engines, "get_spec", lambda: spec)
    monkeypatch.setattr(engines, "capturing", lambda sizes: order.append(sizes) or nullcontext())
    monkeypatch.setattr(engines, "decoding", lambda runner: order.append("decoding") or nullcontext())
    monkeypatch.setattr(engines, "routing_of", lambda runner: {"of": "the last graphs"})
    widest = WidthEngine("the widest's backend", Graphs.__new__(Graphs), NoState(), {})
    monkeypatch.setattr(engines, "share_buffers", lambda one, other: order.append((one, other)))
    engine = engines._build_engine(runner, state, width, widest)
    shared = (backend, "the widest's backend")
    decoding = ["decoding"] if width == 1 else []
    assert order == [width, "bound", "attached", shared, [1, 2, 4], *decoding, "allocated", f"captured at {width}"]
    assert (engine.backend, engine.state, engine.routing) == (backend, state, {"of": "the last graphs"})
    assert spec.speculative_num_draft_tokens == 8


def test_decode_steps_are_captured_without_speculation_but_with_features(monkeypatch: pytest.MonkeyPatch) -> None:
    """In a server without speculation, graphs copy recurrent states to track slots. Here `commit` copies them."""
    features = SimpleNamespace(return_hidden_states_mode=None, enable_return_hidden_states=False)
    mamba = SimpleNamespace(enable_mamba_extra_buffer=True)
    for group in (features, mamba):
        group.override = partial(patch.multiple, group)
    exec_ = SimpleNamespace(features=features, mamba=mamba)
    monkeypatch.setattr(engines, "get_exec", lambda: exec_)
    monkeypatch.setattr(forward_batch_info, "get_exec", lambda: exec_)
    runner: Any = SimpleNamespace(spec_algorithm=SpeculativeAlgorithm.DFLASH)

    def seen() -> tuple[Any, ...]:
        hidden_states = forward_batch_info.get_server_return_hidden_states_mode()
        glued = engines.envs.SGLANG_ENABLE_METADATA_GLUE_GRAPH.get()
        return runner.spec_algorithm, hidden_states, mamba.enable_mamba_extra_buffer, glued

    monkeypatch.setenv("SGLANG_ENABLE_METADATA_GLUE_GRAPH", "1")
    with engines.decoding(runner):
        assert seen() == (SpeculativeAlgorithm.NONE, CaptureHiddenMode.FULL, False, False)
    assert seen() == (SpeculativeAlgorithm.DFLASH, CaptureHiddenMode.NULL, True, True)


@pytest.mark.parametrize("widths", [(1, 8), (1, 4)], ids=["the block", "narrower ones only"])
def test_only_the_widest_verify_has_sglangs_own_engine(
    widths: tuple[int, ...], monkeypatch: pytest.MonkeyPatch
) -> None:
    """SGLang has built its own backend for the widest verify, here 8. Other widths have a state of their own."""
    group = SimpleNamespace(world_size=1)
    monkeypatch.setattr(engines, "get_parallel", lambda: SimpleNamespace(tp_group=group))
    monkeypatch.setattr(engines, "from_first_rank", lambda group: lambda values: None)
    monkeypatch.setattr(engines, "_build_engine", lambda runner, state, width, widest: (state, width, widest))
    monkeypatch.setattr(engines, "keep_buffers", lambda runner: None)
    runner: Any = SimpleNamespace(attn_backend="backend", decode_cuda_graph_runner=None, lora_manager=None)
    worker: Any = SimpleNamespace(model_runner=runner)
    found = engines.build_engines(
        worker, "state of 8", lambda width: f"state of {width}", widths, widest=8, reserve_bytes=0
    )
    own = WidthEngine("backend", None, "state of 8", {})
    want = {width: own if width == 8 else (f"state of {width}", width, own) for width in widths}
    assert found == want


def test_hooks_are_off_while_graphs_are_captured() -> None:
    model, seen = nn.Sequential(nn.Linear(2, 2), nn.ReLU()), []
    model[0].register_forward_hook(lambda module, args, output: seen.append(module))
    with engines.without_hooks(model):
        model(torch.ones(1, 2))
    assert not seen
    model(torch.ones(1, 2))
    assert seen == [model[0]]
