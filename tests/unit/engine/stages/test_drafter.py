"""Drafter: calls of the draft through SGLang's runner or directly, and the batch that describes the draft's context."""

from contextlib import nullcontext
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from sglang_dflash.engine.draft.layout import Layout
from sglang_dflash.engine.memory.slots import SharedSlots
from sglang_dflash.engine.stages import drafter as module
from sglang_dflash.engine.stages.drafter import Drafter
from sglang_dflash.engine.stages.planner import Planner
from tests.fixtures.rings import make_rings, translator
from tests.unit.engine.stages.test_verifier import plan_of

EAGER, GRAPHS = object(), object()
LAYOUT = Layout.of(sample_from_anchor=False)
MASK = -7


class Runner:
    """Stand-in for SGLang's model runner, with the members that the drafter uses."""

    device = torch.device("cpu")
    eager_runner = EAGER
    attn_backend = SimpleNamespace(init_forward_metadata=lambda batch: None)

    def __init__(self, decode_runner: object) -> None:
        self.decode_cuda_graph_runner = decode_runner

    def forward(self, batch: object) -> SimpleNamespace:
        return SimpleNamespace(logits_output="through the runner")

    def model(self, input_ids: object, positions: object, batch: object, **options: int) -> str:
        return "directly"


@pytest.mark.parametrize(
    ("decode_runner", "way"),
    [
        pytest.param(GRAPHS, "through the runner", id="graphs"),
        pytest.param(EAGER, "directly", id="eager-runner-as-sglang-sets-for-a-draft-without-graphs"),
        pytest.param(None, "directly", id="nothing"),
    ],
)
def test_a_draft_without_graphs_is_called_directly(decode_runner: object, way: str) -> None:
    drafter = Drafter(Runner(decode_runner), SharedSlots(), n_slots=16, layout=LAYOUT, scope=nullcontext)
    batch = SimpleNamespace(input_ids=None, positions=None, moe_num_token_non_padded=None)
    assert drafter.forward(batch).logits_output == way


@pytest.mark.parametrize(
    ("device", "gib", "backend", "captured"),
    [
        ("cuda", 1.0, "full", True),
        ("cuda", 0.99, "full", False),
        ("cuda", 9.0, "disabled", False),
        ("cpu", 0.5, "full", True),
    ],
)
def test_a_draft_is_captured_if_a_gibibyte_is_free(
    device: str, gib: float, backend: str, captured: bool, monkeypatch: pytest.MonkeyPatch, caplog: Any
) -> None:
    """Capture like SGLang's own worker. In the GPU emulation, whose device is "cpu", memory does not count."""
    config = SimpleNamespace(decode=SimpleNamespace(backend=backend))
    monkeypatch.setattr(module, "get_exec", lambda: SimpleNamespace(graph=SimpleNamespace(cuda_graph_config=config)))
    monkeypatch.setattr(module, "current_platform", SimpleNamespace(is_out_of_tree=lambda: False))
    monkeypatch.setattr(module, "free_gib", lambda runner: gib)
    assert module.may_capture(SimpleNamespace(device=device)) == captured
    warned = [message for message in caplog.messages if "only 0.99 GiB of memory are free" in message]
    assert len(warned) == (gib == 0.99)


@pytest.mark.parametrize(("n_requests", "width"), [(1, 2), (1, 16), (2, 2), (2, 16), (2, 24)])
def test_drafts_are_copied_from_graph_memory(n_requests: int, width: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """A captured forward returns the same memory every time, and another graph's replay may overwrite it.

    If `width` exceeds the block of 16, mask tokens follow the drafts.
    """
    monkeypatch.setattr("sglang_dflash.engine.stages.drafter.enable_num_token_non_padded", lambda: False)
    N = 16
    of_the_graph_T = torch.arange(n_requests * N)
    runner = Runner(GRAPHS)
    runner.kv_index_translator = None
    runner.forward = lambda batch: SimpleNamespace(logits_output=SimpleNamespace(hidden_states=of_the_graph_T))
    plan = plan_of(n_requests, N)
    kv, tokens_BN = SimpleNamespace(bind=lambda batch, translator: None), torch.full((n_requests, width), MASK)
    plan = plan._replace(drafted=plan.drafted._replace(kv=kv), verified=plan.verified._replace(tokens_BN=tokens_BN))
    tokens_BN = Drafter(runner, SharedSlots(), n_slots=N, layout=LAYOUT, scope=nullcontext).draft(plan, graphs=True)

    assert tokens_BN.untyped_storage().data_ptr() != of_the_graph_T.untyped_storage().data_ptr()
    drafted_BN = torch.full((n_requests, width), MASK)
    drafted_BN[:, :N] = of_the_graph_T.view(n_requests, N)[:, :width]
    of_the_graph_T.fill_(-1)  # as a replay of the target's graph does
    assert torch.equal(tokens_BN, drafted_BN)
    assert tokens_BN.is_contiguous()


@pytest.mark.parametrize(("width", "n_filled"), [(2, 2), (16, 16), (24, 16)])
def test_without_graphs_only_verified_slots_are_filled(
    width: int, n_filled: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("sglang_dflash.engine.stages.drafter.enable_num_token_non_padded", lambda: False)
    asked, runner, N = list[int](), Runner(EAGER), 16

    def model(input_ids: object, positions: object, batch: object, n_filled: int) -> SimpleNamespace:
        asked.append(n_filled)
        return SimpleNamespace(hidden_states=torch.arange(2 * N).view(2, N)[:, :n_filled].flatten())

    runner.model, runner.kv_index_translator = model, None
    plan = plan_of(2, N)
    kv, tokens_BN = SimpleNamespace(bind=lambda batch, translator: None), torch.full((2, width), MASK)
    plan = plan._replace(drafted=plan.drafted._replace(kv=kv), verified=plan.verified._replace(tokens_BN=tokens_BN))
    tokens_BN = Drafter(runner, SharedSlots(), n_slots=N, layout=LAYOUT, scope=nullcontext).draft(plan, graphs=False)

    assert asked == [width]
    assert tokens_BN.shape == (2, width)
    assert torch.equal(tokens_BN[:, :n_filled], torch.arange(2 * N).view(2, N)[:, :n_filled])
    assert (tokens_BN[:, n_filled:] == MASK).all()


def test_a_draft_with_rings_gets_its_own_window_and_slots(monkeypatch: pytest.MonkeyPatch) -> None:
    """The draft has its own KV slots, fewer than the target's."""
    monkeypatch.setattr("sglang_dflash.engine.stages.drafter.enable_num_token_non_padded", lambda: False)
    req_to_token = torch.arange(3 * 64, dtype=torch.int32).view(3, 64)
    rings = make_rings(req_to_token, window=8, widest=4)  # 12 slots each
    target: Any = SimpleNamespace(
        req_to_token_pool=SimpleNamespace(req_to_token=req_to_token), kv_index_translator=translator(req_to_token)
    )
    seen = list[Any]()

    def forward(batch: Any) -> SimpleNamespace:
        seen.append(batch)
        return SimpleNamespace(logits_output=SimpleNamespace(hidden_states=torch.arange(8)))

    runner: Any = Runner(GRAPHS)
    runner.forward, runner.kv_index_translator = forward, rings.translator
    rows = torch.tensor([1, 2])
    plan = Planner(target, n_slots=4, widest=4, mask_token_id=MASK).place(
        torch.tensor([10, 20]), torch.tensor([3, 40]), rows, rows, torch.tensor([3, 40]), width=4
    )
    tokens_BN = Drafter(runner, rings, n_slots=4, layout=LAYOUT, scope=nullcontext).draft(plan, graphs=True)

    (batch,) = seen
    assert batch.seq_lens.tolist() == [3, 8]
    assert batch.seq_lens_cpu.tolist() == [7, 12]
    assert batch.seq_lens_sum == 19
    assert batch.out_cache_loc.tolist() == [15, 16, 17, 18, 28, 29, 30, 31]  # 12 row + position % 12
    assert batch.positions.tolist() == [3, 4, 5, 6, 40, 41, 42, 43]
    assert batch.input_ids.tolist() == [10, MASK, MASK, MASK, 20, MASK, MASK, MASK]
    assert (batch.spec_info.draft_token_num, batch.can_run_decode_cuda_graph) == (4, True)
    assert tokens_BN.tolist() == [[0, 1, 2, 3], [4, 5, 6, 7]]
