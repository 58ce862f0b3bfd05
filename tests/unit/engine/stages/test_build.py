"""Construction of stages: the sizes that each stage gets, if verifies are wider or narrower than the block."""

from types import SimpleNamespace
from typing import Any

import pytest
import torch

from sglang_dflash.engine.draft.layout import Layout
from sglang_dflash.engine.stages import build
from sglang_dflash.flags import Copy

MADE = ("Choice", "ContextKV", "Drafter", "Planner", "Verifier", "build_engines", "make_copier", "reserve_bytes")


@pytest.fixture
def made(monkeypatch: pytest.MonkeyPatch) -> dict[str, tuple[Any, ...]]:
    """Replace constructors by stand-ins. Return the arguments of each call, by name of the constructor."""
    calls = dict[str, tuple[Any, ...]]()

    def stand_in(name: str) -> Any:
        def make(*args: Any, **options: Any) -> Any:
            calls[name] = args, options
            return SimpleNamespace(name=name, req_to_token=torch.zeros(1))

        return make

    for name in MADE:
        monkeypatch.setattr(build, name, stand_in(name))
    return calls


@pytest.mark.parametrize(
    ("layout", "widths", "widest"),
    [
        (Layout(1, 1), (1, 4), 8),  # a narrow step still writes the K/V of the whole drafted block
        (Layout(1, 1), (8, 12), 12),  # n-gram copies continue the block
        (Layout(0, 0), (1, 4), 9),  # an anchor-first block of 8 slots gives 8 drafts
    ],
)
@pytest.mark.parametrize("slots_are_ours", [True, False])
def test_each_stage_gets_its_sizes(made: Any, layout: Layout, widths: Any, widest: int, slots_are_ours: bool) -> None:
    target: Any = SimpleNamespace(max_running_requests=48, model_config=SimpleNamespace(vocab_size=100))
    draft: Any = SimpleNamespace(model=SimpleNamespace(filling=SimpleNamespace(layout=layout)))
    worker: Any = SimpleNamespace(model_runner=target)
    nothing: Any = None
    stages = build.build_stages(
        worker, draft, nothing, ("state", "state_for"), logits=nothing, widths=widths, copy=Copy.AUTO, n_slots=8,
        ranks=SimpleNamespace(draft_scope=lambda target: None), mask_token_id=3, slots_are_ours=slots_are_ours,
        hidden_states=SimpleNamespace(n_waiting=7), simulated=None, on_host=True,
    )  # fmt: skip
    assert made["Planner"][0] == (target, 8, widest, 3)
    engines, options = made["build_engines"]
    assert engines == (worker, "state", "state_for", widths)
    assert options["widest"] == widest
    assert made["reserve_bytes"][0][-2:] == (widths, 7)
    assert made["Drafter"][0][2:4] == (8, layout)
    assert made["ContextKV"][1] == {"n_requests": 48, "block_size": 8, "may_wait": slots_are_ours}
    assert stages.copier.name == "make_copier"
