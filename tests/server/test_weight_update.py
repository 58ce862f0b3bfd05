"""An online update of the draft reaches the block and the context alike: there is no second copy to go stale."""

import base64
import pickle
from collections.abc import Callable

import httpx
import torch
from safetensors.torch import load_file

from launch.server import Server
from launch.tiny import HYBRID
from tests.server.oracle import Oracle
from tests.server.variants import VARIANTS

MAX_NEW_TOKENS = 48
NAMES = ("fc.weight", "hidden_norm.weight", "layers.0.self_attn.k_proj.weight", "layers.1.self_attn.v_proj.weight",
         "layers.1.self_attn.k_norm.weight")  # fmt: skip


def update(server: Server, tensors: dict[str, torch.Tensor]) -> None:
    """Through SGLang's own endpoints, while the server runs."""
    body = {
        "serialized_named_tensors": [base64.b64encode(pickle.dumps(list(tensors.items()))).decode()],
        "selector": "draft",
    }
    for path, content in (("begin_weight_update", {}), ("update_weights_from_tensor", body), ("end_weight_update", {})):
        answer = httpx.post(f"{server.url}/{path}", json=content, timeout=60)
        assert answer.status_code == 200, f"{path}: {answer.text}"


def test_an_updated_draft_drafts_as_if_it_had_been_loaded(server: Callable, questions: Callable) -> None:
    running, prompts = server(flags=VARIANTS["hybrid"].flags), questions(4, seed=11)
    original = {name: tensor.float() for name, tensor in load_file(HYBRID.draft / "model.safetensors").items()}
    torch.manual_seed(0)
    changed = {name: original[name] + 0.3 * original[name].std() * torch.randn_like(original[name]) for name in NAMES}
    expert = Oracle(HYBRID, None, None)

    def served() -> list[dict[int, int]]:
        metas = [running.generate(prompt, max_new_tokens=MAX_NEW_TOKENS).meta for prompt in prompts]
        return [{n: c for n, c in enumerate(meta["spec_correct_drafts_histogram"]) if c} for meta in metas]

    def expected() -> list[dict[int, int]]:
        return [expert.accepted_histogram(prompt, MAX_NEW_TOKENS) for prompt in prompts]

    before = expected()
    assert served() == before
    try:
        update(running, changed)
        expert.draft.load_state_dict(changed, strict=False)
        assert expected() != before, "the change is too small to see; this test could not fail"
        assert served() == expected()
    finally:
        update(running, {name: original[name] for name in NAMES})
    assert served() == before
