"""How the draft is called: through SGLang's runner where there are graphs to replay, directly where there are none."""

from types import SimpleNamespace

import pytest
import torch

from sglang_dflash.draft_slots import SharedSlots
from sglang_dflash.drafter import Drafter

EAGER, GRAPHS = object(), object()


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
    drafter = Drafter(Runner(decode_runner), SharedSlots(), block_size=16)
    assert drafter.forward(SimpleNamespace(input_ids=None, positions=None, moe_num_token_non_padded=None)) == way
