"""The draft's forward in PyTorch must equal its definition. Saved drafts must load unchanged."""

import json
import math
from dataclasses import replace

import pytest
import torch
import torch.nn.functional as F
from safetensors.torch import load_file, save_file
from transformers import Qwen3Config
from transformers.models.qwen3.modeling_qwen3 import Qwen3RotaryEmbedding

from sglang_dflash.reference.torch import DraftConfig, DraftModel
from sglang_dflash.reference.torch.rope import rope_frequencies, rotation_at

FULL, SLIDING = "full_attention", "sliding_attention"


def make_config(**fields) -> DraftConfig:
    common = {
        "hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 8,
        "intermediate_size": 48, "vocab_size": 50, "block_size": 4, "mask_token_id": 49, "target_layer_ids": (0, 2),
        "num_target_layers": 4, "layer_types": (FULL, FULL),
        "rope_parameters": {"rope_type": "default", "rope_theta": 100.0},
    }  # fmt: skip
    return DraftConfig(**(common | fields))


def make_draft(**fields) -> DraftModel:
    torch.manual_seed(0)
    draft = DraftModel(make_config(**fields)).eval()
    for parameter in draft.parameters():  # with unit weights a missing norm would go unnoticed
        torch.nn.init.normal_(parameter, mean=0.2 if parameter.ndim == 1 else 0.0, std=0.3)
    return draft.requires_grad_(False)


def rms_norm(x, weight, eps=1e-6):
    return x / (x.pow(2).mean() + eps).sqrt() * weight


def turned(head, position, width, theta=100.0):
    """Rotate the first `width` numbers of one head at one position: pairs (i, i + E/2) by position / theta^(2i/E)."""
    out, half = head.clone(), width // 2
    for i in range(half):
        angle = position / theta ** (2 * i / width)
        a, b = head[i], head[i + half]
        out[i] = a * math.cos(angle) - b * math.sin(angle)
        out[i + half] = b * math.cos(angle) + a * math.sin(angle)
    return out


def sees(config, layer, query_position, key_position, *, prefix_len, window):
    """Return whether the query may attend to the key. Context ends at prefix_len, where the block begins."""
    distance = query_position - key_position
    in_context = key_position < prefix_len
    if in_context and window is not None and key_position < prefix_len - window:
        return False
    if config.layer_types[layer] == FULL:
        return distance >= 0 or not config.full_is_causal
    return (0 if config.sliding_is_causal else 1 - config.sliding_window) <= distance < config.sliding_window


def convolved(w, name, side, sources, slots):
    """Return `slots`, each mixed with earlier slots of its block by DFlash 2's convolution.

    The kernel of slot n is the base kernel plus a projection of `sources[n]`.
    """
    if f"{name}.base_kernel" not in w:
        return slots
    base_SH = w[f"{name}.base_kernel"][side]
    (n_taps, H), out = base_SH.shape, []
    for n, source in enumerate(sources):
        change_SJ = (w[f"{name}.kernel_projection.weight"] @ source).view(2, n_taps, -1)[side]
        group_size = H // change_SJ.shape[1]
        mixed = torch.zeros(H)
        for s in range(min(n_taps, n + 1)):
            for h in range(H):
                mixed[h] += (base_SH[s, h] + change_SJ[s, h // group_size]) * slots[n - s][h]
        out.append(mixed)
    return out


def defined_forward(draft, embeddings_NH, features_TC, window=None):
    """Return one block's output after T context tokens, computed number by number."""
    config, weights = draft.config, dict(draft.named_parameters())
    T, N, E = len(features_TC), len(embeddings_NH), config.head_dim
    width = config.rope_parameters.get("rope_dim", E)
    if config.norms_features:  # each captured layer's part has a norm of its own
        parts = [[weights[f"aux_hidden_norms.{i}.weight"], i * 32] for i in range(len(config.target_layer_ids))]
        features_TC = [torch.cat([rms_norm(f[at : at + 32], norm) for norm, at in parts]) for f in features_TC]
    context = [rms_norm(weights["fc.weight"] @ f, weights["hidden_norm.weight"]) for f in features_TC]
    hidden = list(embeddings_NH)
    for i in range(config.num_hidden_layers):
        w = {name.removeprefix(f"layers.{i}."): p for name, p in weights.items() if name.startswith(f"layers.{i}.")}
        normed = [rms_norm(h, w["input_layernorm.weight"]) for h in hidden]
        inputs = convolved(w, "attention_conv", 0, normed, normed)
        own = [rms_norm(c, w["input_layernorm.weight"]) for c in context] if config.norms_features else context
        sources = own + inputs
        keys, values = [], []  # [position][KV group]
        for position, source in enumerate(sources):
            key_GE = (w["self_attn.k_proj.weight"] @ source).view(-1, E)
            keys.append([turned(rms_norm(key, w["self_attn.k_norm.weight"]), position, width) for key in key_GE])
            values.append((w["self_attn.v_proj.weight"] @ source).view(-1, E))
        attended = []
        for n in range(N):
            seen = [p for p in range(T + N) if sees(config, i, T + n, p, prefix_len=T, window=window)]
            heads = []
            for head, query in enumerate((w["self_attn.q_proj.weight"] @ inputs[n]).view(-1, E)):
                group = head // (config.num_attention_heads // config.num_key_value_heads)
                query = turned(rms_norm(query, w["self_attn.q_norm.weight"]), T + n, width)
                shares = [(query @ keys[p][group] / math.sqrt(E)).exp() for p in seen]
                sink = w["self_attn.attention_sink_bias"][head].exp() if config.attention_sink_bias else 0
                total = sum(shares) + sink
                heads.append(sum(share / total * values[p][group] for share, p in zip(shares, seen, strict=True)))
            if config.gating:
                gate_QX = (w["self_attn.g_proj.weight"] @ inputs[n]).view(config.num_attention_heads, -1)
                heads = [head * (1 + gate.exp()).log() for head, gate in zip(heads, gate_QX, strict=True)]
            attended.append(w["self_attn.o_proj.weight"] @ torch.cat(heads))
        attended = convolved(w, "attention_conv", 1, normed, attended)
        hidden = [h + out for h, out in zip(hidden, attended, strict=True)]
        normed = [rms_norm(h, w["post_attention_layernorm.weight"]) for h in hidden]
        outputs = []
        for x in convolved(w, "mlp_conv", 0, normed, normed):
            gate, up = w["mlp.gate_proj.weight"] @ x, w["mlp.up_proj.weight"] @ x
            gated = F.silu(gate) * up
            if config.hidden_act == "swigluoai":
                limit, alpha = config.swiglu_limit, config.swiglu_alpha
                pairs = [
                    (min(float(g), limit), max(-limit, min(float(u), limit))) for g, u in zip(gate, up, strict=True)
                ]
                gated = torch.tensor([g / (1 + math.exp(-alpha * g)) * (u + 1) for g, u in pairs])
            outputs.append(w["mlp.down_proj.weight"] @ gated)
        outputs = convolved(w, "mlp_conv", 1, normed, outputs)
        hidden = [h + out for h, out in zip(hidden, outputs, strict=True)]
    return torch.stack([rms_norm(h, weights["norm.weight"]) for h in hidden])


@pytest.mark.parametrize("window", [None, 4])
@pytest.mark.parametrize(
    "fields",
    [
        {},
        {"layer_types": (SLIDING, FULL), "sliding_window": 3, "block_size": 3},
        {"layer_types": (FULL, SLIDING), "sliding_window": 6},
        {"layer_types": (SLIDING, SLIDING), "sliding_window": 3, "block_size": 3},
        {"layer_types": (SLIDING, FULL), "sliding_window": 3, "block_size": 3, "sliding_is_causal": False},
        {"conv_kernel_size": 2, "conv_group_size": 8},
        {"conv_kernel_size": 3, "conv_group_size": 1, "layer_types": (SLIDING, FULL), "sliding_window": 6},
        {"conv_kernel_size": 6, "conv_group_size": 32},
        {"full_is_causal": True},
        {"full_is_causal": True, "layer_types": (SLIDING, FULL), "sliding_window": 6},
        {"norms_features": True, "gating": "per-head"},
        {"gating": "per-element"},
        {"hidden_act": "swigluoai", "swiglu_alpha": 1.7, "swiglu_limit": 0.5},
        {"attention_sink_bias": True},
        {"rope_parameters": {"rope_type": "default", "rope_theta": 100.0, "rope_dim": 4}},
    ],
)
def test_forward_equals_the_definition(fields, window):
    draft = make_draft(**fields)
    features_TC, embeddings_NH = torch.randn(7, 64), torch.randn(4, 32)
    context = draft.context_kv(features_TC[None])
    got = draft(embeddings_NH[None, None], context, torch.tensor([[7]]), window)
    want = defined_forward(draft, embeddings_NH, features_TC, window)
    torch.testing.assert_close(got[0, 0], want, atol=2e-5, rtol=1e-5)


def test_context_may_be_appended_in_pieces():
    draft = make_draft()
    features_RTC = torch.randn(1, 9, 64)
    whole = draft.context_kv(features_RTC)
    pieces = draft.context_kv(features_RTC[:, :4]).append(draft.context_kv(features_RTC[:, 4:], first_position=4))
    assert pieces.n_tokens == 9
    for got, want in zip(pieces, whole, strict=True):
        torch.testing.assert_close(got, want, atol=1e-6, rtol=0)


def test_many_blocks_over_one_context_equal_one_block_at_a_time():
    """Training drafts many blocks over whole rows. Inference drafts one block over the tokens before its anchor."""
    draft = make_draft(layer_types=(FULL, SLIDING), sliding_window=5)
    features_RTC, embeddings_RANH = torch.randn(2, 20, 64), torch.randn(2, 3, 4, 32)
    anchors_RA = torch.tensor([[1, 7, 16], [12, 3, 19]])
    together = draft(embeddings_RANH, draft.context_kv(features_RTC), anchors_RA)
    for r in range(2):
        for a in range(3):
            anchor = anchors_RA[r, a : a + 1]
            context = draft.context_kv(features_RTC[r : r + 1, :anchor])
            alone = draft(embeddings_RANH[r : r + 1, a : a + 1], context, anchor[None])
            torch.testing.assert_close(together[r, a], alone[0, 0], atol=1e-6, rtol=1e-6)


@pytest.mark.parametrize(
    "rope",
    [
        {"rope_type": "default", "rope_theta": 10_000.0},
        {"rope_type": "linear", "rope_theta": 10_000.0, "factor": 4.0},
        {"rope_type": "yarn", "rope_theta": 10_000.0, "factor": 4.0, "original_max_position_embeddings": 64},
        {
            "rope_type": "llama3", "rope_theta": 10_000.0, "factor": 8.0, "low_freq_factor": 1.0,
            "high_freq_factor": 4.0, "original_max_position_embeddings": 64,
        },
    ],
    ids=lambda rope: rope["rope_type"],
)  # fmt: skip
def test_rope_equals_transformers(rope):
    config = make_config(rope_parameters=rope, head_dim=16, max_position_embeddings=256)
    theirs = Qwen3RotaryEmbedding(Qwen3Config(head_dim=16, max_position_embeddings=256, rope_parameters=dict(rope)))
    positions = torch.arange(200)
    cos, sin = theirs(torch.zeros(1), positions[None])
    frequencies, scale = rope_frequencies(config)
    ours = rotation_at(positions, frequencies, scale, torch.float32)
    torch.testing.assert_close(ours.cos, cos[0])
    torch.testing.assert_close(ours.sin, sin[0])


def test_a_saved_draft_is_loaded_unchanged(tmp_path):
    draft = make_draft(attention_bias=True)
    draft.save_pretrained(tmp_path)
    loaded = DraftModel.from_pretrained(tmp_path)
    assert loaded.config == replace(draft.config, dtype="float32")
    assert not loaded.training
    for name, parameter in draft.named_parameters():
        assert torch.equal(parameter, dict(loaded.named_parameters())[name])
    assert DraftModel.from_pretrained(tmp_path, dtype=torch.bfloat16).dtype == torch.bfloat16


def test_prefixed_tensor_names_are_read(tmp_path):
    draft = make_draft()
    draft.save_pretrained(tmp_path)
    tensors = load_file(tmp_path / "model.safetensors")
    renamed = {f"model.{name}": tensor for name, tensor in tensors.items()}
    save_file(renamed | {"model.layers.0.self_attn.rotary_emb.inv_freq": torch.ones(4)}, tmp_path / "model.safetensors")
    assert torch.equal(DraftModel.from_pretrained(tmp_path).fc.weight, draft.fc.weight)


def test_a_missing_folder_is_named(tmp_path):
    with pytest.raises(FileNotFoundError, match="is no directory"):
        DraftModel.from_pretrained(tmp_path / "nowhere")
    with pytest.raises(FileNotFoundError, match=r"holds no config\.json"):
        DraftModel.from_pretrained(tmp_path)


def test_nothing_of_a_checkpoint_is_executed(tmp_path):
    make_draft().save_pretrained(tmp_path)
    (tmp_path / "dflash.py").write_text("raise SystemExit('executed')")
    config = json.loads((tmp_path / "config.json").read_text())
    config["auto_map"] = {"AutoModel": "dflash.DFlashDraftModel"}
    (tmp_path / "config.json").write_text(json.dumps(config))
    assert DraftModel.from_pretrained(tmp_path).config.block_size == 4
