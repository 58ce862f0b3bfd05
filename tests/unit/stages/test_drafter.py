"""How the draft is called: through SGLang's runner where there are graphs to replay, directly where there are none."""

from contextlib import nullcontext
from types import SimpleNamespace

import pytest
import torch

from sglang_dflash.memory.slots import SharedSlots
from sglang_dflash.stages.drafter import Drafter
from sglang_dflash.step import Block, Plan

EAGER, GRAPHS = object(), object()
MASK = -7


class Runner:
    """SGLang's, as far as a draft is called through it."""

    device = torch.device("cpu")
    eager_runner = EAGER
    attn_backend = SimpleNamespace(init_forward_metadata=lambda batch: None)

    def __init__(self, decode_runner: object) -> None:
        self.decode_cuda_graph_runner = decode_runner

    def forward(self, batch: object) -> SimpleNamespace:
        return SimpleNamespace(logits_output="through the runner")

    def model(self, input_ids: object, positions: object, batch: object) -> str:
        return "directly"


@pytest.mark.parametrize(
    ("decode_runner", "way"),
    [
        pytest.param(GRAPHS, "through the runner", id="graphs"),
        pytest.param(EAGER, "directly", id="a-draft-without-graphs-has-the-eager-runner-there"),
        pytest.param(None, "directly", id="nothing"),
    ],
)
def test_directly_without_graphs(decode_runner: object, way: str) -> None:
    drafter = Drafter(Runner(decode_runner), SharedSlots(), block_size=16, scope=nullcontext)
    batch = SimpleNamespace(input_ids=None, positions=None, moe_num_token_non_padded=None)
    assert drafter.forward(batch).logits_output == way


@pytest.mark.parametrize(("n_requests", "width"), [(1, 2), (1, 16), (2, 2), (2, 16), (1, 24), (2, 32)])
def test_drafts_do_not_lie_in_the_forwards_memory(n_requests: int, width: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """A captured forward returns the same cells every time, and another graph's replay may write there. Behind what is
    drafted mask tokens are verified."""
    monkeypatch.setattr("sglang_dflash.stages.drafter.enable_num_token_non_padded", lambda: False)
    N = 16
    of_the_graph_T = torch.arange(n_requests * N)
    runner = Runner(GRAPHS)
    runner.kv_index_translator = None
    runner.forward = lambda batch: SimpleNamespace(logits_output=SimpleNamespace(hidden_states=of_the_graph_T))
    block = Block(
        tokens_BN=torch.zeros(n_requests, N, dtype=torch.int64),
        positions_BN=torch.zeros(n_requests, N, dtype=torch.int64),
        slots_BN=torch.zeros(n_requests, N, dtype=torch.int64),
        bound_B_cpu=torch.full((n_requests,), N),
        bound_sum=n_requests * N,
        kv=SimpleNamespace(bind=lambda batch, translator: None),
    )
    verified = block._replace(tokens_BN=torch.full((n_requests, width), MASK))
    plan = Plan(
        block,
        verified,
        prefix_len_B=torch.zeros(n_requests),
        rows_B=torch.arange(n_requests),
        rows_B_cpu=torch.arange(n_requests),
    )
    tokens_BN = Drafter(runner, SharedSlots(), block_size=N, scope=nullcontext).draft(plan, graphs=True)

    assert tokens_BN.untyped_storage().data_ptr() != of_the_graph_T.untyped_storage().data_ptr()
    drafted_BN = torch.full((n_requests, width), MASK)
    drafted_BN[:, :N] = of_the_graph_T.view(n_requests, N)[:, :width]
    of_the_graph_T.fill_(-1)  # the target's replay
    assert torch.equal(tokens_BN, drafted_BN)
    assert tokens_BN.is_contiguous()
