"""A tiny pair for every family of targets that DFlash drafts were published for, made on the spot.

A target has random weights: its architecture is what is tested, and it writes in loops, which a draft of two layers
learns in seconds. So drafts are accepted, and which ones depends on the target's features.
"""

from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple

import torch
import transformers
from transformers import PreTrainedModel

from launch.tiny import HYBRID, HYBRID_FLAGS, Pair
from sglang_dflash.model.config import FULL, DraftConfig
from sglang_dflash.train.draft import Data, Settings, train_draft
from sglang_dflash.train.features import read_rows
from sglang_dflash.train.loop import Recipe
from sglang_dflash.train.tokens import Rows

N_LAYERS, VOCABULARY, HIDDEN, HEADS, KV_HEADS, HEAD_DIM = 4, 128, 64, 4, 2, 16
END, MASK = 2, 3
BLOCK_SIZE, FEATURE_LAYERS = 8, (0, 1, 2)
N_TEXTS, N_PROMPT, N_ANSWER = 16, 12, 56
RECIPE = Recipe(steps=200, learning_rate=4e-3, warmup_steps=20)

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
    "partial_rotary_factor": 0.5,  # Transformers reads the other one, SGLang this
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
# Inside the vocabulary; no prompt holds one.
IMAGES = {"image_token_id": 127, "video_token_id": 126, "vision_start_token_id": 125, "vision_end_token_id": 124}
# SGLang warms up with English, which a vocabulary of 128 cannot spell, or with an image; the CPU route is for text.
NO_WARMUP = ("--skip-server-warmup",)


class Family(NamedTuple):
    """`model` and `config` are names in Transformers; `fields` are those of its text model."""

    model: str
    config: str
    fields: Mapping[str, Any]
    flags: tuple[str, ...] = ()
    vision: bool = False


FAMILIES = {
    "llama": Family("LlamaForCausalLM", "LlamaConfig", DENSE_MLP | LLAMA3_ROPE),
    # As Qwen3-4B: one matrix is embedding and head.
    "qwen3-tied": Family("Qwen3ForCausalLM", "Qwen3Config", DENSE_MLP | {"tie_word_embeddings": True}),
    "qwen3-moe": Family("Qwen3MoeForCausalLM", "Qwen3MoeConfig", DENSE_MLP | EXPERTS),
    "qwen3.5": Family(
        "Qwen3_5ForConditionalGeneration",
        "Qwen3_5Config",
        DENSE_MLP | GATED_DELTA_NET | MROPE,
        HYBRID_FLAGS,
        vision=True,
    ),
    "qwen3.5-moe": Family(
        "Qwen3_5MoeForConditionalGeneration",
        "Qwen3_5MoeConfig",
        EXPERTS | GATED_DELTA_NET | MROPE | {"shared_expert_intermediate_size": 32},
        HYBRID_FLAGS,
        vision=True,
    ),
}


def make_target(family: Family) -> PreTrainedModel:
    """Random weights, fp32, wide enough that what a token's past says decides what comes next."""
    torch.manual_seed(0)
    fields = COMMON | {"initializer_range": 0.16} | dict(family.fields)
    config_class = getattr(transformers, family.config)
    if family.vision:
        fields = {"text_config": fields, "vision_config": VISION, **IMAGES}
    config = config_class(**fields)
    if "linear_conv_kernel_dim" in family.fields:
        # SGLang reads the layer pattern from this field, which Transformers leaves out.
        config.get_text_config().full_attention_interval = N_LAYERS
    return getattr(transformers, family.model)(config).eval()


def write_pair(family: Family, folder: Path) -> tuple[Pair, list[list[int]]]:
    """Target and draft on disk, and prompts whose answers the draft was taught."""
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
    reading = read_rows(target, rows, FEATURE_LAYERS)  # once: every step trains on the same rows
    settings = Settings(n_anchors=16)
    train_draft(target, draft_config(), data, RECIPE, out=pair.draft, settings=settings, read=lambda rows: reading)
    return pair, rows.ids_RL[:, :N_PROMPT].tolist()


def texts(target: PreTrainedModel) -> Rows:
    """What the target says after random prompts."""
    generator = torch.Generator().manual_seed(1)
    prompts = torch.randint(MASK + 1, VOCABULARY - len(IMAGES), (N_TEXTS, N_PROMPT), generator=generator)
    with torch.inference_mode():
        ids_RL = target.generate(
            prompts, attention_mask=torch.ones_like(prompts), do_sample=False, max_new_tokens=N_ANSWER,
            min_new_tokens=N_ANSWER,
        )  # fmt: skip
    ids_RL = ids_RL.clone()  # out of inference mode
    is_response_RL = torch.arange(ids_RL.shape[1]).expand_as(ids_RL) >= N_PROMPT
    return Rows(ids_RL, is_response_RL, torch.full((N_TEXTS,), -1))


def draft_config() -> DraftConfig:
    return DraftConfig(
        hidden_size=HIDDEN,
        num_hidden_layers=2,
        num_attention_heads=HEADS,
        num_key_value_heads=KV_HEADS,
        head_dim=HEAD_DIM,
        intermediate_size=96,
        vocab_size=VOCABULARY,
        block_size=BLOCK_SIZE,
        mask_token_id=MASK,
        target_layer_ids=FEATURE_LAYERS,
        num_target_layers=N_LAYERS,
        layer_types=(FULL, FULL),
        sliding_window=None,
        is_causal=None,
        rope_parameters={"rope_type": "default", "rope_theta": 10_000.0},
        max_position_embeddings=512,
    )
