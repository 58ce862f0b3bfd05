"""A tiny pair (target and draft) for every target architecture with published DFlash drafts, made when a test needs it.

Only the architecture is under test, so a target has random weights. Its greedy answers soon repeat themselves, which a
draft of two layers learns in seconds from the target's features. So drafts are accepted if the features are right.
"""

from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from types import MappingProxyType
from typing import Any, NamedTuple

import torch
import transformers
from transformers import PreTrainedModel

from sglang_dflash.engine.draft.record import FULL, Checkpoint
from sglang_dflash.pairs.tiny.pairs import HYBRID, HYBRID_FLAGS, Pair
from sglang_dflash.train.draft import Data, Settings, train_draft
from sglang_dflash.train.features import read_rows
from sglang_dflash.train.loop import TrainRecipe
from sglang_dflash.train.tokens import Rows
from tests.server.lib.rehearsals import GRAPHS, SM90, STREAMS, attention

N_LAYERS, VOCABULARY, HIDDEN, HEADS, KV_HEADS, HEAD_DIM = 4, 128, 64, 4, 2, 16
END, MASK = 2, 3
BLOCK_SIZE, FEATURE_LAYERS = 8, (0, 1, 2)
N_TEXTS, N_PROMPT, N_ANSWER = 16, 12, 56
RECIPE = TrainRecipe(steps=200, learning_rate=4e-3, warmup_steps=20)

COMMON: dict[str, Any] = {
    "vocab_size": VOCABULARY, "hidden_size": HIDDEN, "num_hidden_layers": N_LAYERS, "num_attention_heads": HEADS,
    "num_key_value_heads": KV_HEADS, "head_dim": HEAD_DIM, "max_position_embeddings": 512,
    "bos_token_id": None, "eos_token_id": END, "pad_token_id": 0,
}  # fmt: skip
DENSE_MLP = {"intermediate_size": 96}
EXPERTS = {"num_experts": 8, "num_experts_per_tok": 2, "moe_intermediate_size": 32, "norm_topk_prob": True}
GATED_DELTA_NET = {
    "linear_conv_kernel_dim": 4, "linear_key_head_dim": 16, "linear_value_head_dim": 16,
    "linear_num_key_heads": 2, "linear_num_value_heads": 4,
}  # fmt: skip
MROPE = {
    "partial_rotary_factor": 0.5,  # for SGLang; Transformers reads the same field of `rope_parameters`
    "rope_parameters": {
        "rope_type": "default", "rope_theta": 10_000.0, "partial_rotary_factor": 0.5,
        "mrope_interleaved": True, "mrope_section": [2, 1, 1],
    }
}  # fmt: skip
LLAMA3_ROPE = {
    "rope_parameters": {
        "rope_type": "llama3", "rope_theta": 10_000.0, "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
        "original_max_position_embeddings": 64,
    }
}  # fmt: skip
VISION = {
    "depth": 1, "hidden_size": 32, "intermediate_size": 64, "num_heads": 2, "in_channels": 3, "patch_size": 16,
    "spatial_merge_size": 2, "temporal_patch_size": 2, "num_position_embeddings": 16, "out_hidden_size": HIDDEN,
}  # fmt: skip
# Token ids inside the vocabulary that no prompt has.
IMAGES = {"image_token_id": 127, "video_token_id": 126, "vision_start_token_id": 125, "vision_end_token_id": 124}
# SGLang's warm-up sends English text, which a vocabulary of 128 cannot encode, or an image, which a CPU cannot serve.
NO_WARMUP = ("--skip-server-warmup",)


LATENT = {
    "q_lora_rank": 32, "kv_lora_rank": 32, "qk_rope_head_dim": 8, "qk_nope_head_dim": 16, "v_head_dim": 16,
    "head_dim": 8, "num_key_value_heads": HEADS, "n_routed_experts": 8, "num_experts_per_tok": 2,
    "n_shared_experts": 1, "moe_intermediate_size": 32, "n_group": 1, "topk_group": 1, "first_k_dense_replace": 1,
    "num_mtp_layers": 0,
    "moe_layer_freq": 1, "scoring_func": "sigmoid", "topk_method": "noaux_tc",  # read by SGLang only
}  # fmt: skip
GEMMA4 = {
    "sliding_window": 16, "layer_types": ["sliding_attention"] * 3 + ["full_attention"], "global_head_dim": 32,
    "attention_k_eq_v": True, "num_global_key_value_heads": 1, "hidden_size_per_layer_input": 0,
    "final_logit_softcapping": 30.0, "tie_word_embeddings": True,
    "initializer_range": 0.03,  # matters for embeddings only, because norms follow the other layers
}  # fmt: skip
GEMMA4_OUTER = {
    "vision_config": {
        "hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 1, "num_attention_heads": 2,
        "num_key_value_heads": 2, "head_dim": 16,
    },
    "image_token_id": 1000, "video_token_id": 1001, "audio_token_id": 1002, "audio_config": None,  # never output
}  # fmt: skip


GPT_OSS = {"num_local_experts": 8, "num_experts_per_tok": 2, "intermediate_size": 32, "sliding_window": 16}


class Family(NamedTuple):
    """Architecture: class names in Transformers (`model`, `config`), and config fields.

    `fields`: config of the text model. `outer`: fields next to `text_config` in a target with vision; if empty,
    `VISION` and `IMAGES`.
    """

    model: str
    config: str
    fields: Mapping[str, Any]
    flags: tuple[str, ...] = ()
    vision: bool = False
    outer: Mapping[str, Any] = MappingProxyType({})
    env: tuple[tuple[str, str], ...] = ()
    features: tuple[int, ...] = FEATURE_LAYERS


def yarn(**more: float) -> dict[str, Any]:
    scaling = {"factor": 8.0, "original_max_position_embeddings": 64, "beta_fast": 32.0, "beta_slow": 1.0}
    return {"rope_parameters": {"rope_type": "yarn", "rope_theta": 10_000.0} | scaling | more}


def rehearsed(
    model: str,
    config: str,
    fields: Mapping[str, Any],
    *,
    backend: str = "fa3",
    flags: tuple[str, ...] = (),
    outer: Mapping[str, Any] = MappingProxyType({}),
) -> Family:
    """Return a family that is served under GPU emulation, with captured graphs."""
    return Family(model, config, fields, (*flags, *attention(backend), *GRAPHS), bool(outer), outer, SM90)


FAMILIES = {
    "llama": Family("LlamaForCausalLM", "LlamaConfig", DENSE_MLP | LLAMA3_ROPE),
    # One matrix is embedding and head, as in Qwen3-4B.
    "qwen3-tied": Family("Qwen3ForCausalLM", "Qwen3Config", DENSE_MLP | {"tie_word_embeddings": True}),
    "qwen3-moe": Family("Qwen3MoeForCausalLM", "Qwen3MoeConfig", DENSE_MLP | EXPERTS),
    "qwen3.5": Family(
        "Qwen3_5ForConditionalGeneration", "Qwen3_5Config", DENSE_MLP | GATED_DELTA_NET | MROPE, HYBRID_FLAGS,
        vision=True,
    ),
    "qwen3.5-moe": Family(
        "Qwen3_5MoeForConditionalGeneration", "Qwen3_5MoeConfig",
        EXPERTS | GATED_DELTA_NET | MROPE | {"shared_expert_intermediate_size": 32}, HYBRID_FLAGS, vision=True,
    ),
}  # fmt: skip

# Families whose attention or other layers SGLang has for GPUs only.
REHEARSED = {
    # Every other layer has a sliding window; each head has a sink.
    "gpt-oss": rehearsed("GptOssForCausalLM", "GptOssConfig", GPT_OSS | yarn(truncate=False)),
    "gpt-oss-last-layer": rehearsed("GptOssForCausalLM", "GptOssConfig", GPT_OSS | yarn(truncate=False))._replace(
        features=(0, 1, N_LAYERS - 1)
    ),
    # The text model of Kimi-K2.5.
    "deepseek-v3": rehearsed(
        "DeepseekV3ForCausalLM", "DeepseekV3Config", DENSE_MLP | LATENT | yarn(mscale=1.0, mscale_all_dim=1.0)
    ),
    "minimax-m2": rehearsed(
        "MiniMaxM2ForCausalLM",
        "MiniMaxM2Config",
        {"num_local_experts": 8, "num_experts_per_tok": 2, "intermediate_size": 32, "rotary_dim": 8}
        | {"use_qk_norm": True, "qk_norm_type": "per_layer"}  # this line and the next: read by SGLang only
        | {"scoring_func": "sigmoid", "use_routing_bias": True},
    ),
    "qwen3-next": rehearsed(
        "Qwen3NextForCausalLM",
        "Qwen3NextConfig",
        EXPERTS | GATED_DELTA_NET | DENSE_MLP | {"shared_expert_intermediate_size": 32, "partial_rotary_factor": 0.5},
        flags=HYBRID_FLAGS,
    )._replace(env=STREAMS),  # captured forwards run the K norm and the experts on a second stream
    # SGLang refuses fa3 for Gemma 4, and fa4 supports these head widths.
    "gemma-4": rehearsed(
        "Gemma4ForConditionalGeneration", "Gemma4Config", DENSE_MLP | GEMMA4, backend="fa4", outer=GEMMA4_OUTER
    ),
    "gemma-4-moe": rehearsed(
        "Gemma4ForConditionalGeneration",
        "Gemma4Config",
        DENSE_MLP
        | GEMMA4
        | {"enable_moe_block": True, "num_experts": 8, "top_k_experts": 2, "moe_intermediate_size": 32},
        backend="fa4",
        outer=GEMMA4_OUTER,
    ),
}


def make_target(family: Family) -> PreTrainedModel:
    """Return a target of random fp32 weights. Their spread is so wide that the next token depends on the context."""
    torch.manual_seed(0)
    fields = COMMON | {"initializer_range": 0.16} | dict(family.fields)
    config_class = getattr(transformers, family.config)
    if family.vision:
        fields = {"text_config": fields, **(family.outer or {"vision_config": VISION, **IMAGES})}
    config = config_class(**fields)
    if "linear_conv_kernel_dim" in family.fields:
        # SGLang reads the positions of full-attention layers from this field, which Transformers does not write.
        config.get_text_config().full_attention_interval = N_LAYERS
    target = getattr(transformers, family.model)(config).eval()
    for name, tensor in target.state_dict().items():
        if name.endswith(".sinks"):  # SGLang stores attention sinks in bf16
            tensor.copy_(tensor.bfloat16())
        elif name.endswith(".e_score_correction_bias"):
            tensor.normal_(std=0.1)
    return target


def write_pair(family: Family, folder: Path) -> tuple[Pair, list[list[int]]]:
    """Write a target and its draft; return their folders, and the prompts whose answers the draft was trained on."""
    pair = Pair(folder / "target", folder / "draft")
    target = make_target(family)
    target.save_pretrained(pair.target)
    reader = transformers.AutoTokenizer.from_pretrained(HYBRID.target)
    if family.vision:
        parts = transformers.Qwen2VLImageProcessor(), reader, transformers.Qwen3VLVideoProcessor()
        reader = transformers.Qwen3VLProcessor(*parts)
    reader.save_pretrained(pair.target)
    rows = texts(target)
    data = Data(rows_at=lambda step: rows, held_out=[rows], prompts=[], facts={})
    reading = read_rows(target, rows, family.features)  # read once: every step trains on the same rows
    settings = Settings(n_anchors=16)
    train_draft(
        target,
        replace(draft_config(), target_layer_ids=family.features),
        data,
        RECIPE,
        out=pair.draft,
        settings=settings,
        dtype=target.dtype,
        read=lambda rows: reading,
    )
    return pair, rows.ids_RL[:, :N_PROMPT].tolist()


def texts(target: PreTrainedModel) -> Rows:
    """Return `Rows` of random prompts, each followed by the target's greedy answer."""
    generator = torch.Generator().manual_seed(1)
    prompts = torch.randint(MASK + 1, VOCABULARY - len(IMAGES), (N_TEXTS, N_PROMPT), generator=generator)
    with torch.inference_mode():
        ids_RL = target.generate(
            prompts, attention_mask=torch.ones_like(prompts), do_sample=False, max_new_tokens=N_ANSWER,
            min_new_tokens=N_ANSWER,
        )  # fmt: skip
    ids_RL = ids_RL.clone()  # a normal tensor, which training can use, not an inference tensor
    is_response_RL = torch.arange(ids_RL.shape[1]).expand_as(ids_RL) >= N_PROMPT
    return Rows(ids_RL, is_response_RL, torch.full((N_TEXTS,), -1))


def draft_config() -> Checkpoint:
    return Checkpoint(
        hidden_size=HIDDEN, num_hidden_layers=2, num_attention_heads=HEADS, num_key_value_heads=KV_HEADS,
        head_dim=HEAD_DIM, intermediate_size=96, vocab_size=VOCABULARY, block_size=BLOCK_SIZE, mask_token_id=MASK,
        target_layer_ids=FEATURE_LAYERS, num_target_layers=N_LAYERS, layer_types=(FULL, FULL),
        rope_parameters={"rope_type": "default", "rope_theta": 10_000.0}, max_position_embeddings=512,
    )  # fmt: skip
