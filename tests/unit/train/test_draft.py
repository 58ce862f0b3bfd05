"""Draft training: bf16 arithmetic, starting weights, and checkpoints that SGLang, this plugin and vLLM can load."""

from dataclasses import replace
from functools import partial
from pathlib import Path

import pytest
import torch
from transformers import (
    AutoConfig,
    AutoModelForCausalLM,
    Qwen2Config,
    Qwen2ForCausalLM,
    Qwen3_5TextConfig,
    Qwen3Config,
    Qwen3ForCausalLM,
)

import sglang_dflash
from sglang_dflash.engine.draft import checkpoint
from sglang_dflash.reference.torch import DraftConfig, DraftModel
from sglang_dflash.train.draft import Data, DraftRun, Settings, draft_config_for, train_draft
from sglang_dflash.train.features import read_rows, weights_digest
from sglang_dflash.train.loop import CHECKPOINT, TrainRecipe
from sglang_dflash.train.sizes import Second
from sglang_dflash.train.start import initialised, start, start_from
from sglang_dflash.train.text import padded
from sglang_dflash.train.tokens import Tokens

ASSETS = Path(sglang_dflash.__file__).parent / "assets"
SIZES = {
    "vocab_size": 64, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 6, "num_attention_heads": 4,
    "num_key_value_heads": 2, "head_dim": 16, "initializer_range": 0.3, "max_position_embeddings": 2048,
    "rope_parameters": {"rope_type": "default", "rope_theta": 1_000_000.0}, "eos_token_id": None, "bos_token_id": None,
}  # fmt: skip


def make_target(dtype=torch.float32):
    torch.manual_seed(0)
    return Qwen3ForCausalLM(Qwen3Config(**SIZES)).to(dtype).eval().requires_grad_(False)


def config_for(target) -> DraftConfig:
    return draft_config_for(target, n_layers=2, block_size=8, mask_token_id=63)


def some_rows():
    torch.manual_seed(1)
    return padded([Tokens(torch.randint(0, 63, (32,)).tolist(), [True] * 32) for _ in range(2)], pad_id=0)


def loss_of(dtype) -> tuple[DraftModel, torch.Tensor, set[torch.dtype]]:
    """Return a draft, its loss on one batch, and the output dtypes of its linear layers."""
    target = make_target(dtype)
    config = config_for(target)
    draft = initialised(DraftModel(config), std=0.3)
    computed = set()
    for module in draft.modules():
        if isinstance(module, torch.nn.Linear):
            module.register_forward_hook(lambda module, inputs, output: computed.add(output.dtype))
    read = partial(read_rows, target, layer_ids=config.target_layer_ids)
    loss = DraftRun(draft, target, Settings(n_anchors=16), read=read).loss(some_rows(), step=0)
    return draft, loss, computed


def test_bf16_computes_in_bf16_with_weights_and_gradients_in_fp32():
    (draft, half, in_half), (_, full, in_full) = loss_of(torch.bfloat16), loss_of(torch.float32)
    half.backward()
    assert (in_half, in_full) == ({torch.bfloat16}, {torch.float32})
    assert half.dtype == torch.float32
    assert {p.dtype for p in draft.parameters()} == {p.grad.dtype for p in draft.parameters()} == {torch.float32}
    assert abs(half.item() - full.item()) < 0.1


def test_steps_too_small_for_bf16_are_not_lost(tmp_path):
    """The checkpoint has fp32 weights, in which small steps add up, even if the saved bf16 draft is still unchanged."""
    target = make_target(torch.bfloat16)
    config = config_for(target)
    recipe = TrainRecipe(steps=3, learning_rate=1e-7, warmup_steps=0, weight_decay=0.0)
    data = Data(lambda step: some_rows(), held_out=[some_rows()], prompts=[], facts={})
    train_draft(target, config, data, recipe, out=tmp_path, dtype=target.dtype, settings=Settings(eval_tokens=4))
    torch.manual_seed(0)
    before = initialised(DraftModel(config)).state_dict()["norm.weight"]
    master = torch.load(tmp_path / CHECKPOINT, weights_only=True)["module"]["norm.weight"]
    saved = DraftModel.from_pretrained(tmp_path).state_dict()["norm.weight"]
    assert master.dtype == torch.float32
    assert not torch.equal(master, before)
    assert saved.dtype == torch.bfloat16
    assert torch.equal(saved, before.bfloat16())


@pytest.mark.parametrize("from_whole", [False, True])
def test_a_reduced_vocabulary_has_the_frequent_tokens(from_whole, tmp_path):
    """The draft lists the given tokens and the lowest others, also if it starts with a draft that has all tokens."""
    target = make_target()
    other = tmp_path / "other"
    initialised(DraftModel(config_for(target))).save_pretrained(other)
    data = Data(lambda step: some_rows(), [some_rows()], prompts=[], facts={}, listed=torch.tensor([40, 9, 33]))
    settings = Settings(eval_tokens=4, start=str(other) if from_whole else "random")
    recipe = TrainRecipe(steps=1, learning_rate=1e-3, warmup_steps=0)
    config = replace(config_for(target), draft_vocab_size=5)
    out = tmp_path / "out"
    train_draft(target, config, data, recipe, out=out, dtype=target.dtype, settings=settings)
    assert DraftModel.from_pretrained(out).token_ids().tolist() == [0, 1, 9, 33, 40]


@pytest.fixture(scope="module")
def saved(tmp_path_factory) -> Path:
    """Return a draft as training saves it, for a target with an unusual rotary base."""
    folder = tmp_path_factory.mktemp("saved")
    target = make_target()
    initialised(DraftModel(config_for(target))).bfloat16().save_pretrained(folder)
    return folder


def test_the_plugin_reads_the_saved_draft(saved):
    draft = checkpoint.read(str(saved))  # reads config.json and the headers of the weight files
    assert (draft.block_size, draft.mask_token_id, draft.target_layer_ids) == (8, 63, (2, 4))
    assert (draft.num_hidden_layers, draft.num_target_layers) == (2, 6)
    assert draft.rope_parameters["rope_theta"] == 1_000_000.0
    assert draft.window is None


def test_sglang_reads_the_saved_draft(saved):
    from sglang.srt.speculative import dflash_utils as stock

    hf_config = AutoConfig.from_pretrained(saved)
    read = stock.parse_dflash_draft_config(draft_hf_config=hf_config)
    assert (read.block_size, read.mask_token_id, read.num_target_layers) == (8, 63, 6)
    assert read.require_num_layers() == 2
    assert read.resolve_target_layer_ids(target_num_layers=6) == [2, 4]
    assert stock.get_dflash_attention_sliding_window_size(hf_config) is None
    assert not read.is_domino
    assert (read.conv_kernel_size, read.selector_rank, read.output_multiplier) == (0, 0, 1.0)
    assert hf_config.architectures == ["DFlashDraftModel"]
    assert hf_config.rope_parameters["rope_theta"] == 1_000_000.0


def test_vllm_finds_its_fields_in_the_saved_draft(saved):
    """vLLM reads z-lab's layout unchanged (vllm-project/vllm, `main` of 2026). Its files and what they read:

    - config/speculative.py: the architecture DFlashDraftModel, which selects the method
    - v1/spec_decode/llm_base_proposer.py: dflash_config.mask_token_id
    - v1/worker/gpu/spec_decode/eagle/eagle3_utils.py: dflash_config.target_layer_ids, to which it adds one
    - model_executor/models/qwen3_dflash.py: all other fields, and the tensors, whose names have no prefix `model.` and
      which include neither embedding nor head
    """
    hf_config = AutoConfig.from_pretrained(saved)
    assert hf_config.model_type == "qwen3"
    assert hf_config.architectures == ["DFlashDraftModel"]
    assert hf_config.dflash_config["mask_token_id"] == 63
    assert [layer + 1 for layer in hf_config.dflash_config["target_layer_ids"]] == [3, 5]
    assert hf_config.block_size - 1 == 7  # num_speculative_tokens, given by the user
    sizes = ("hidden_size", "num_hidden_layers", "num_attention_heads", "num_key_value_heads", "head_dim", "vocab_size")
    assert [getattr(hf_config, name) for name in sizes] == [32, 2, 4, 2, 16, 64]
    assert (hf_config.hidden_act, hf_config.rms_norm_eps, hf_config.max_position_embeddings) == ("silu", 1e-6, 2048)
    assert hf_config.layer_types == ["full_attention"] * 2  # attention is neither causal nor windowed
    assert not hasattr(hf_config, "is_causal")
    assert not hasattr(hf_config, "eagle_aux_hidden_state_layer_ids")  # would override target_layer_ids
    names = set(DraftModel.from_pretrained(saved).state_dict())
    assert {name.split(".")[0] for name in names} == {"fc", "hidden_norm", "layers", "norm"}


def test_transformers_4_finds_the_rotary_base(saved):
    """Transformers 4 ignores rope_parameters and would use a base of 10,000."""
    assert checkpoint.draft_files.read_config(str(saved), None)["rope_theta"] == 1_000_000.0


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_the_config_of_the_tiny_pairs_is_unchanged(dtype):
    for pair in ("tiny", "tiny_dense"):
        target = AutoModelForCausalLM.from_pretrained(ASSETS / pair / "target", dtype=dtype)
        config = draft_config_for(target, n_layers=2, block_size=16, mask_token_id=3, target_layer_ids=(0, 1, 2))
        assert config == checkpoint.read(str(ASSETS / pair / "draft"))


def test_a_target_without_the_layers_is_refused():
    with pytest.raises(
        ValueError, match=r"--target-layer-ids 5 is not an ascending list within 0\.\.4, the layers of a target of 6"
    ):
        draft_config_for(make_target(), n_layers=1, block_size=8, mask_token_id=63, target_layer_ids=(5,))


def test_qwen3_5_can_be_a_target():
    """The draft takes the target's rotary base, but not its partial or multi-axis rotation: it rotates whole heads."""
    config = Qwen3_5TextConfig(**(SIZES | {"rope_parameters": {
        "rope_type": "default", "rope_theta": 1e7, "partial_rotary_factor": 0.25, "mrope_section": [1, 1, 0],
    }}))  # fmt: skip
    with torch.device("meta"):
        target = AutoModelForCausalLM.from_config(config)
    assert config_for(target).rope_parameters == {"rope_type": "default", "rope_theta": 1e7}


def test_biases_of_the_target_are_left_out():
    """Qwen2's queries, keys and values have a bias, and a draft's have none."""
    sizes = {"num_hidden_layers": 2, "hidden_size": 32, "intermediate_size": 48, "vocab_size": 64}
    target = Qwen2ForCausalLM(Qwen2Config(**sizes, num_attention_heads=2, num_key_value_heads=1))
    draft = DraftModel(draft_config_for(target, n_layers=1, block_size=8, mask_token_id=63))
    start_from(initialised(draft), target)
    assert torch.equal(draft.layers[0].self_attn.q_proj.weight, target.model.layers[1].self_attn.q_proj.weight)


def test_layers_of_another_kind_need_a_random_start():
    target = make_target()
    draft = DraftModel(draft_config_for(target, n_layers=1, block_size=8, mask_token_id=63))
    del target.model.layers[-1].input_layernorm
    with pytest.raises(ValueError, match="layers are not built like a draft's; give --start-from random"):
        start_from(initialised(draft), target)


def test_a_draft_starts_with_the_targets_last_layers():
    """Draft layer 0 of 2 starts with the weights of target layer 4 of 6. For equal inputs their outputs are equal."""
    target = make_target()
    draft = DraftModel(draft_config_for(target, n_layers=2, block_size=8, mask_token_id=63, target_layer_ids=(1, 3)))
    for module in target.modules():
        if isinstance(module, torch.nn.Module) and type(module).__name__.endswith("RMSNorm"):
            torch.nn.init.uniform_(module.weight, 0.5, 1.5)
    start_from(initialised(draft), target)
    ids_1S = torch.randint(0, 63, (1, 12))
    output = target(ids_1S, output_hidden_states=True)
    # Only the last feature layer, the output of layer 3, is used. The block has one slot, which holds the last token.
    features = torch.cat([torch.randn_like(output.hidden_states[4]), output.hidden_states[4]], dim=-1)
    first = draft.layers[:1]
    draft.layers = first  # only the first: in the target, the context of the second layer is the first layer's output
    hidden = draft(output.hidden_states[4][:, None, -1:], draft.context_kv(features[:, :-1]), torch.tensor([[11]]))
    like = target.model.norm(output.hidden_states[5][:, -1])
    torch.testing.assert_close(hidden[0, 0], like, atol=1e-4, rtol=1e-4)


def test_a_draft_starts_with_another(tmp_path):
    target, sizes = make_target(), {"n_layers": 2, "mask_token_id": 63, "target_layer_ids": (1, 3)}
    other = initialised(DraftModel(draft_config_for(target, block_size=4, **sizes)), std=0.3)
    other.save_pretrained(tmp_path)
    for second in (None, Second(selector_rank=4, selector_top_k=2, conv_group_size=8)):
        draft = DraftModel(draft_config_for(target, block_size=8, second=second, **sizes))
        assert start(draft, target, str(tmp_path)) == weights_digest(other)
        embeddings, context = torch.randn(1, 1, 8, 32), torch.randn(1, 5, 64)
        found, want = (one(embeddings, one.context_kv(context), torch.tensor([[5]])) for one in (draft, other))
        torch.testing.assert_close(found, want)
    draft.save_pretrained(tmp_path / "second")
    for folder, change, found in (
        (tmp_path, {"n_layers": 1}, "num_hidden_layers 2, now 1"),
        (tmp_path, {"target_layer_ids": (2, 3)}, r"target_layer_ids \[1, 3\], now \[2, 3\]"),
        (tmp_path / "second", {}, "selector_rank 4, now unset"),
    ):
        draft = DraftModel(draft_config_for(target, block_size=8, **sizes | change))
        with pytest.raises(ValueError, match=f"is a draft with other settings .*{found}.*; give its settings"):
            start(draft, target, str(folder))


@pytest.mark.parametrize("second", [None, Second(selector_rank=4, selector_top_k=2, conv_group_size=8)])
def test_a_draft_starts_with_one_of_fewer_layers(tmp_path, second):
    """Hidden states are equal at first, and the new layers learn in the first step."""
    target, sizes = make_target(), {"mask_token_id": 63, "target_layer_ids": (1, 3), "block_size": 8}
    other = initialised(DraftModel(draft_config_for(target, n_layers=2, second=second, **sizes)), std=0.3)
    for name, parameter in other.named_parameters():
        if "_conv." in name:
            torch.nn.init.normal_(parameter, std=0.3)
    other.save_pretrained(tmp_path)
    draft = DraftModel(draft_config_for(target, n_layers=4, second=second, **sizes))
    assert start(draft, target, str(tmp_path)) == weights_digest(other)
    embeddings, context = torch.randn(1, 3, 8, 32), torch.randn(1, 9, 64)
    found, want = (one(embeddings, one.context_kv(context), torch.tensor([[2, 5, 9]])) for one in (draft, other))
    assert torch.equal(found, want)
    (found * torch.randn_like(found)).sum().backward()
    for layer in draft.layers[2:]:
        assert layer.self_attn.o_proj.weight.grad.abs().sum() > 0
        assert layer.mlp.down_proj.weight.grad.abs().sum() > 0
        assert torch.equal(layer.self_attn.k_proj.weight, other.layers[1].self_attn.k_proj.weight)
