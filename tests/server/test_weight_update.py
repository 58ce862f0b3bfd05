"""Weight updates of draft and target in a running server, from pushed tensors, a process group or a checkpoint."""

import shutil
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from sglang.srt.utils import init_custom_process_group

from sglang_dflash.pairs.servers.ports import free_port
from sglang_dflash.pairs.servers.server import Server
from sglang_dflash.pairs.tiny.pairs import HYBRID
from tests.server.lib.oracle import Oracle
from tests.server.lib.rehearsals import REHEARSALS
from tests.server.lib.talk import post, push, steps, tokens_of
from tests.server.lib.variants import VARIANTS

MAX_NEW_TOKENS = 48
NAMES = ("fc.weight", "hidden_norm.weight", "layers.0.self_attn.k_proj.weight", "layers.1.self_attn.v_proj.weight",
         "layers.1.self_attn.k_norm.weight")  # fmt: skip


@pytest.fixture(params=["cpu", pytest.param("fa3-graphs", marks=pytest.mark.full)])
def whole(request: pytest.FixtureRequest, server: Callable) -> Server:
    """Return a server that verifies whole blocks without copies, on the CPU or with emulated captured graphs."""
    row = VARIANTS["hybrid"] if request.param == "cpu" else REHEARSALS[request.param]
    return server(flags=row.flags, env=dict(row.env))


def test_updated_draft_drafts_as_if_loaded(whole: Server, questions: Callable) -> None:
    """The update must reach the block's forward and the context K/V, which may use separate copies of a weight."""
    prompts = questions(4, seed=11)
    original = {name: tensor.float() for name, tensor in load_file(HYBRID.draft / "model.safetensors").items()}
    torch.manual_seed(0)
    changed = {name: original[name] + 0.3 * original[name].std() * torch.randn_like(original[name]) for name in NAMES}
    expert = Oracle(HYBRID, None, None)

    def expected() -> list[dict[int, int]]:
        return [expert.accepted_histogram(prompt, MAX_NEW_TOKENS) for prompt in prompts]

    before = expected()
    assert served_steps(whole, prompts) == before
    try:
        assert push(whole, changed, selector="draft").status_code == 200
        expert.draft.load_state_dict(changed, strict=False)
        assert expected() != before, "the change is too small to see; this test cannot fail"
        assert served_steps(whole, prompts) == expected()
    finally:
        assert push(whole, {name: original[name] for name in NAMES}, selector="draft").status_code == 200
    assert served_steps(whole, prompts) == before


def changed_copy(checkpoint: Path, folder: Path) -> Path:
    """Copy a checkpoint and change its matrices."""
    shutil.copytree(checkpoint, folder)
    torch.manual_seed(1)
    tensors = {name: tensor.float() for name, tensor in load_file(checkpoint / "model.safetensors").items()}
    for tensor in tensors.values():
        if tensor.ndim == 2:
            tensor += 0.1 * tensor.std() * torch.randn_like(tensor)
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    return folder


def test_checkpoint_from_disk_updates_the_model_it_belongs_to(
    whole: Server, off: Server, questions: Callable, tmp_path: Path
) -> None:
    """A new target changes answers as it does without speculation. A new draft changes only steps."""
    prompts, (new_target, new_draft) = questions(2, seed=12), (changed_copy(p, tmp_path / p.name) for p in HYBRID)

    def load(server: Server, path: Path) -> int:
        return post(server, "/update_weights_from_disk", {"model_path": str(path)}).status_code

    def served() -> tuple[list[list[int]], list[dict[int, int]]]:
        answers = [whole.generate(prompt, max_new_tokens=MAX_NEW_TOKENS) for prompt in prompts]
        assert [off.generate(prompt, max_new_tokens=MAX_NEW_TOKENS).token_ids for prompt in prompts] == [
            answer.token_ids for answer in answers
        ]
        return tokens_of(answers), list(map(steps, answers))

    before = served()
    try:
        name = whole.openai().models.list().data[0].id
        assert load(whole, new_draft) == 200
        assert whole.openai().models.list().data[0].id == name, "the draft's path became the model's name"
        text, n_accepted = served()
        assert text == before[0]
        assert n_accepted != before[1], "the draft did not change"
        assert load(whole, HYBRID.draft) == 200
        assert served() == before
        assert [load(s, new_target) for s in (whole, off)] == [200, 200]
        assert served()[0] != before[0], "the target did not change"
    finally:
        assert [load(whole, HYBRID.draft), load(whole, HYBRID.target), load(off, HYBRID.target)] == [200, 200, 200]
    assert served() == before


def test_draft_that_does_not_fit_is_refused(whole: Server, tmp_path: Path) -> None:
    folder = Path(shutil.copytree(HYBRID.draft, tmp_path / "draft"))
    config = (folder / "config.json").read_text()
    (folder / "config.json").write_text(config.replace('"mask_token_id": 3', '"mask_token_id": 4'))
    refused = post(whole, "/update_weights_from_disk", {"model_path": str(folder)})
    assert refused.status_code == 400
    assert "mask_token_id is 4, and the draft being served has 3; restart the server" in refused.json()["message"]
    assert whole.generate([5], max_new_tokens=4).token_ids


def served_steps(server: Server, prompts: list[list[int]]) -> list[dict[int, int]]:
    return [steps(server.generate(prompt, max_new_tokens=MAX_NEW_TOKENS)) for prompt in prompts]


@pytest.mark.parametrize("part", ["model.layers.0.", "model.norm.weight", ""])
def test_target_push_leaves_draft(whole: Server, questions: Callable, part: str) -> None:
    """A push without a selector, as trainers send it, must not change the draft.

    Parts: one layer, a norm whose name the draft has too, and the whole target.
    """
    prompts = questions(3, seed=13)
    before = served_steps(whole, prompts)
    tensors = {name: t for name, t in load_file(HYBRID.target / "model.safetensors").items() if part in name}
    assert tensors
    assert push(whole, tensors).status_code == 200
    assert served_steps(whole, prompts) == before


def test_target_push_over_group_leaves_draft(whole: Server, questions: Callable) -> None:
    prompts = questions(3, seed=13)
    before = served_steps(whole, prompts)
    tensors = {
        key: tensor for key, tensor in load_file(HYBRID.target / "model.safetensors").items() if "layers.0." in key
    }
    port = free_port(31900)
    name = f"push-{port}"  # a process can create a group of a name only once
    group = {"world_size": 2, "group_name": name, "backend": "gloo"}
    with ThreadPoolExecutor() as threads:
        joining = threads.submit(
            post, whole, "/init_weights_update_group",
            {"master_address": "127.0.0.1", "master_port": port, "rank_offset": 1, **group},
        )  # fmt: skip
        trainer = init_custom_process_group(init_method=f"tcp://127.0.0.1:{port}", rank=0, **group)
        assert joining.result().status_code == 200
        assert post(whole, "/begin_weight_update", {}).status_code == 200
        body = {
            "names": list(tensors),
            "dtypes": [str(t.dtype).removeprefix("torch.") for t in tensors.values()],
            "shapes": [list(t.shape) for t in tensors.values()],
            "group_name": name,
        }
        receiving = threads.submit(post, whole, "/update_weights_from_distributed", body)
        for tensor in tensors.values():
            torch.distributed.broadcast(tensor, src=0, group=trainer)
        assert receiving.result().status_code == 200
        assert post(whole, "/end_weight_update", {}).status_code == 200
        assert post(whole, "/destroy_weights_update_group", {"group_name": name}).status_code == 200
    assert served_steps(whole, prompts) == before


def test_answers_do_not_depend_on_a_draft_of_nans(whole: Server, off: Server, questions: Callable) -> None:
    """Push NaNs, then the right weights in two halves, the second with the prefix `model.` and in another dtype."""
    prompts, original = questions(4, seed=14), load_file(HYBRID.draft / "model.safetensors")
    before = served_steps(whole, prompts)
    answers = tokens_of(off.generate_many(prompts, concurrency=1, max_new_tokens=MAX_NEW_TOKENS))
    names = sorted(original)
    halves = names[: len(names) // 2], names[len(names) // 2 :]
    try:
        assert push(whole, {name: original[name] * torch.nan for name in names}, selector="draft").status_code == 200
        assert tokens_of(whole.generate_many(prompts, concurrency=4, max_new_tokens=MAX_NEW_TOKENS)) == answers
        assert served_steps(whole, prompts) != before
    finally:
        assert push(whole, {name: original[name] for name in halves[0]}, selector="draft").status_code == 200
        tensors = {f"model.{name}": original[name].float() for name in halves[1]}
        assert push(whole, tensors, selector="draft").status_code == 200
    assert served_steps(whole, prompts) == before


def test_unknown_tensor_is_refused(whole: Server, questions: Callable) -> None:
    """A push with a tensor name or a shape that the model does not have is refused, and loads no tensor."""
    prompts = questions(3, seed=13)
    before = served_steps(whole, prompts)
    tensors = {"norm.weight": torch.zeros(64), "lm_head.bias": torch.zeros(8)}
    refused = push(whole, tensors, selector="draft")
    assert refused.status_code == 400
    assert "a DFlash draft has no tensor 'lm_head.bias'" in refused.json()["message"]
    assert '"selector": "target"' in refused.json()["message"]
    wrong_shape = push(whole, {"model.norm.weight": torch.zeros(8)})
    assert wrong_shape.status_code == 400
    assert served_steps(whole, prompts) == before


def test_draft_uses_head_of_updated_target(whole: Server, off: Server, questions: Callable) -> None:
    """Update the target's head and embedding, which the draft uses.

    Afterwards steps must equal those of the PyTorch reference, and answers those without speculation.
    """
    prompts, original = questions(3, seed=13), load_file(HYBRID.target / "model.safetensors")
    names = [name for name in original if "lm_head" in name or "embed_tokens" in name]
    torch.manual_seed(0)
    changed = {name: original[name] + 0.2 * original[name].std() * torch.randn_like(original[name]) for name in names}
    before, expert = served_steps(whole, prompts), Oracle(HYBRID, None, None)
    try:
        for one in (whole, off):
            assert push(one, changed).status_code == 200
        expert.target.load_state_dict(changed, strict=False)
        answers = [whole.generate(prompt, max_new_tokens=MAX_NEW_TOKENS) for prompt in prompts]
        expected = [off.generate(prompt, max_new_tokens=MAX_NEW_TOKENS).token_ids for prompt in prompts]
        assert tokens_of(answers) == expected
        after = list(map(steps, answers))
        assert after != before, "the change is too small to see"
        assert after == [expert.accepted_histogram(prompt, MAX_NEW_TOKENS) for prompt in prompts]
    finally:
        for one in (whole, off):
            assert push(one, {name: original[name] for name in names}).status_code == 200
    assert served_steps(whole, prompts) == before
