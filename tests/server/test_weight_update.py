"""Weights that change while serving, the draft's or the target's: from tensors, and from a checkpoint on disk."""

import base64
import pickle
import shutil
from collections.abc import Callable
from pathlib import Path

import httpx
import torch
from safetensors.torch import load_file, save_file

from sglang_dflash.servers.server import Server
from sglang_dflash.tiny.pairs import HYBRID
from tests.server.lib.oracle import Oracle
from tests.server.lib.talk import post, steps
from tests.server.lib.variants import VARIANTS

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
    """It reaches the block and the context alike: there is no second copy to go stale."""
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


def changed_copy(checkpoint: Path, folder: Path) -> Path:
    """The same model with other matrices."""
    shutil.copytree(checkpoint, folder)
    torch.manual_seed(1)
    tensors = {name: tensor.float() for name, tensor in load_file(checkpoint / "model.safetensors").items()}
    for tensor in tensors.values():
        if tensor.ndim == 2:
            tensor += 0.1 * tensor.std() * torch.randn_like(tensor)
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    return folder


def test_a_checkpoint_from_disk_goes_to_the_model_it_belongs_to(
    server: Callable, questions: Callable, tmp_path: Path
) -> None:
    """A target's changes the text as it does without speculation; a draft's changes how many drafts are accepted."""
    ours, off, prompts = server(flags=VARIANTS["hybrid"].flags), server("off"), questions(2, seed=12)
    new_target, new_draft = (changed_copy(path, tmp_path / path.name) for path in HYBRID)

    def load(server: Server, path: Path) -> int:
        return post(server, "/update_weights_from_disk", {"model_path": str(path)}).status_code

    def served() -> tuple[list[list[int]], list[dict[int, int]]]:
        answers = [ours.generate(prompt, max_new_tokens=MAX_NEW_TOKENS) for prompt in prompts]
        assert [off.generate(prompt, max_new_tokens=MAX_NEW_TOKENS).token_ids for prompt in prompts] == [
            answer.token_ids for answer in answers
        ]
        return [answer.token_ids for answer in answers], list(map(steps, answers))

    before = served()
    try:
        assert load(ours, new_draft) == 200
        text, n_accepted = served()
        assert text == before[0]
        assert n_accepted != before[1], "the draft did not change"
        assert load(ours, HYBRID.draft) == 200
        assert served() == before
        assert [load(s, new_target) for s in (ours, off)] == [200, 200]
        assert served()[0] != before[0], "the target did not change"
    finally:
        assert [load(ours, HYBRID.draft), load(ours, HYBRID.target), load(off, HYBRID.target)] == [200, 200, 200]
    assert served() == before


def test_a_draft_that_does_not_fit_is_refused(server: Callable, tmp_path: Path) -> None:
    ours, folder = server(flags=VARIANTS["hybrid"].flags), tmp_path / "draft"
    shutil.copytree(HYBRID.draft, folder)
    config = (folder / "config.json").read_text()
    (folder / "config.json").write_text(config.replace('"mask_token_id": 3', '"mask_token_id": 4'))
    refused = post(ours, "/update_weights_from_disk", {"model_path": str(folder)})
    assert refused.status_code == 400
    assert "mask_token_id is 4, and the draft being served has 3; restart with it" in refused.json()["message"]
    assert ours.generate([5], max_new_tokens=4).token_ids
