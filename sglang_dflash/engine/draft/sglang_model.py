"""DFlash draft as an SGLang model: one forward turns blocks of mask tokens into draft tokens.

The draft has no embedding and no head. `attach` stores the target's embedding and head in the draft, so that one
forward (one CUDA graph) maps token ids to token ids. The draft's context is the target's hidden states (features), from
which `context_kv` computes K and V for every layer. The model is independent of requests, steps and acceptance.

Paper: DFlash, arXiv 2602.06036, section 3. Checkpoints: z-lab's `DFlashDraftModel` and `DFlash2DraftModel`.
Dimensions: T rows (B requests x N block tokens, or packed prompt tokens), L draft layers, Q query heads, G KV heads,
E head width, H hidden, C features (captured layers x H), V vocabulary.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any, cast

import torch
from sglang.kernels.ops.attention.table_qk_norm_rope import table_qk_norm_rope_
from sglang.srt.layers.activation import SiluAndMul
from sglang.srt.layers.layernorm import RMSNorm
from sglang.srt.layers.linear import MergedColumnParallelLinear, QKVParallelLinear, RowParallelLinear
from sglang.srt.layers.logits_processor import LogitsProcessorOutput
from sglang.srt.layers.quantization.base_config import QuantizationConfig
from sglang.srt.layers.quantization.unquant import UnquantizedLinearMethod
from sglang.srt.layers.radix_attention import AttentionType, RadixAttention
from sglang.srt.layers.rotary_embedding import get_rope
from sglang.srt.model_executor.forward_batch_info import ForwardBatch
from sglang.srt.models.utils import apply_qk_norm
from sglang.srt.runtime_context import get_parallel
from sglang.srt.utils.hf_transformers_utils import get_rope_config
from torch import nn

from sglang_dflash.engine.draft.fill import filled
from sglang_dflash.engine.draft.packed import unpacked
from sglang_dflash.engine.draft.rotary import reach
from sglang_dflash.engine.draft.second import SGLangBlockConv, SGLangCandidateSelector, convolved
from sglang_dflash.engine.draft.target_ends import TargetEnds
from sglang_dflash.engine.draft.weights import (
    QUANTIZED,
    checkpoint_names,
    is_unused,
    lay_side_by_side,
    loader_of,
    require_all_known,
    require_known,
)


class DraftAttention(nn.Module):
    """Attention of one draft layer: full layers attend to context and whole block, sliding layers to a window."""

    def __init__(self, config: Any, layer_id: int, quant_config: QuantizationConfig | None) -> None:
        super().__init__()
        tp_size, bias = get_parallel().tp_size, config.attention_bias
        self.head_dim = config.head_dim
        self.n_kv_heads = max(1, config.num_key_value_heads // tp_size)
        self.q_size = config.num_attention_heads // tp_size * self.head_dim
        self.kv_size = self.n_kv_heads * self.head_dim
        self.qkv_proj = QKVParallelLinear(
            config.hidden_size,
            self.head_dim,
            config.num_attention_heads,
            config.num_key_value_heads,
            bias=bias,
            quant_config=quant_config,
        )
        self.o_proj = RowParallelLinear(self.q_size * tp_size, config.hidden_size, bias=bias, quant_config=quant_config)
        self.q_norm = RMSNorm(self.head_dim, eps=config.rms_norm_eps)
        self.k_norm = RMSNorm(self.head_dim, eps=config.rms_norm_eps)
        rope_theta, rope_scaling = get_rope_config(config)
        self.rotary_emb = get_rope(
            self.head_dim,
            rotary_dim=self.head_dim,
            max_position=config.max_position_embeddings,
            base=rope_theta,
            rope_scaling=rope_scaling,
        )
        one_kernel = self.qkv_proj.weight.dtype == torch.bfloat16 or self.qkv_proj.weight.is_cpu
        self.norm_rotate = self.norm_rotate_in_one if one_kernel else self.norm_rotate_in_two
        sliding = config.layer_types[layer_id] == "sliding_attention"
        causal = sliding and config.to_dict().get("is_causal") is not False
        self.attn = RadixAttention(
            num_heads=self.q_size // self.head_dim,
            head_dim=self.head_dim,
            scaling=self.head_dim**-0.5,
            num_kv_heads=self.n_kv_heads,
            layer_id=layer_id,
            # A window in the checkpoint (as in Transformers) counts the current token, SGLang's window does not.
            sliding_window_size=config.sliding_window - 1 if sliding else -1,
            attn_type=AttentionType.DECODER if causal else AttentionType.ENCODER_ONLY,
        )

    def forward(self, positions_T: torch.Tensor, hidden_TH: torch.Tensor, batch: ForwardBatch) -> torch.Tensor:
        """Write the K/V of the blocks, and attend from each slot to context and block: [T, H] -> [T, H]."""
        qkv, _ = self.qkv_proj(hidden_TH)
        q, k, v = self.norm_rotate(qkv, positions_T)
        out, _ = self.o_proj(self.attn(q, k, v, batch))
        return out

    def norm_rotate_in_one(self, qkv: torch.Tensor, positions_T: torch.Tensor) -> Sequence[torch.Tensor]:
        """Normalise and rotate q and k in qkv, [T, (Q + 2 G) E], in place with one launch.

        Returns:
            Views of q, k and v with this rank's heads: [T, Q E], [T, G E], [T, G E].
        """
        table_qk_norm_rope_(
            qkv,
            positions_T,
            self.q_norm.weight,
            self.k_norm.weight,
            self.rotary_emb.cos_sin_cache,
            self.q_size // self.head_dim,
            self.n_kv_heads,
            self.head_dim,
            self.q_norm.variance_epsilon,
        )
        return qkv.split([self.q_size, self.kv_size, self.kv_size], dim=-1)

    def norm_rotate_in_two(self, qkv: torch.Tensor, positions_T: torch.Tensor) -> Sequence[torch.Tensor]:
        """Return the same as `norm_rotate_in_one`, from SGLang's layers, for dtypes that the fused kernel lacks."""
        q, k, v = qkv.split([self.q_size, self.kv_size, self.kv_size], dim=-1)
        q, k = apply_qk_norm(q, k, self.q_norm, self.k_norm, self.head_dim)
        return *self.rotary_emb(positions_T, q, k), v


class DraftMLP(nn.Module):
    """Gated MLP: down(silu(gate x) * up x), [T, H] -> [T, H]."""

    def __init__(self, config: Any, quant_config: QuantizationConfig | None) -> None:
        super().__init__()
        hidden, wide = config.hidden_size, config.intermediate_size
        self.gate_up_proj = MergedColumnParallelLinear(hidden, [wide] * 2, bias=False, quant_config=quant_config)
        self.down_proj = RowParallelLinear(wide, hidden, bias=False, quant_config=quant_config)
        self.act = SiluAndMul()

    def forward(self, hidden_TH: torch.Tensor) -> torch.Tensor:
        gate_up, _ = self.gate_up_proj(hidden_TH)
        return self.down_proj(self.act(gate_up))[0]


class DraftLayer(nn.Module):
    """Pre-norm layer. The residual is passed separately, because SGLang's norms add it to the hidden states."""

    def __init__(self, config: Any, layer_id: int, quant_config: QuantizationConfig | None) -> None:
        super().__init__()
        self.input_layernorm = RMSNorm(config.hidden_size, eps=config.rms_norm_eps)
        self.self_attn = DraftAttention(config, layer_id, quant_config)
        self.post_attention_layernorm = RMSNorm(config.hidden_size, eps=config.rms_norm_eps)
        self.mlp = DraftMLP(config, quant_config)
        self.attention_conv, self.mlp_conv = SGLangBlockConv.of(config), SGLangBlockConv.of(config)

    def forward(
        self, positions_T: torch.Tensor, hidden_TH: torch.Tensor, residual_TH: torch.Tensor | None, batch: ForwardBatch
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Return hidden states and residual, both [T, H]; `residual_TH` is None in the first layer."""
        if residual_TH is None:
            residual_TH, hidden_TH = hidden_TH, self.input_layernorm(hidden_TH)
        else:
            hidden_TH, residual_TH = self.input_layernorm(hidden_TH, residual_TH)

        def attend(hidden_TH: torch.Tensor) -> torch.Tensor:
            return self.self_attn(positions_T, hidden_TH, batch)

        block_size = hidden_TH.shape[0] // batch.batch_size
        hidden_TH = convolved(self.attention_conv, attend, hidden_TH, block_size)
        hidden_TH, residual_TH = self.post_attention_layernorm(hidden_TH, residual_TH)
        return convolved(self.mlp_conv, self.mlp, hidden_TH, block_size), residual_TH


class DFlashDraftModel(nn.Module):
    """Draft model: computes draft tokens from blocks of mask tokens, and context K/V from target features.

    SGLang builds the model and loads the checkpoint. Then the worker calls `attach` once. `draft.checkpoint` has
    checked the config, so its fields are not checked again.
    """

    # The attributes from here to `kv_shape` are set by `attach`.
    ends: TargetEnds
    # Weights of the q, k and v projections, stacked over layers, X rows per layer. The rows of k and v begin at
    # `first_k_row`. None: the projections are quantized.
    qkv_LXH: torch.Tensor | None
    bias_LX: torch.Tensor | None  # biases of the q, k and v projections; None: there are no biases
    k_norm_LE: torch.Tensor  # weights of the norm of K
    first_k_row: int
    kv_shape: tuple[int, int, int]  # 2 (K or V), G, E

    def __init__(self, config: Any, quant_config: QuantizationConfig | None = None, prefix: str = "") -> None:
        super().__init__()
        self.config = config
        n_features = len(config.dflash_config["target_layer_ids"])
        self.layers = nn.ModuleList([DraftLayer(config, i, quant_config) for i in range(config.num_hidden_layers)])
        self.norm = RMSNorm(config.hidden_size, eps=config.rms_norm_eps)
        self.fc = nn.Linear(n_features * config.hidden_size, config.hidden_size, bias=False)
        self.hidden_norm = RMSNorm(config.hidden_size, eps=config.rms_norm_eps)
        self.candidate_selector = SGLangCandidateSelector.of(config)
        self.needed, self.loaded = checkpoint_names(dict(self.named_parameters())), set[str]()

    def forward_embed(self, input_ids: torch.Tensor) -> torch.Tensor:
        """Return the target's embeddings of token ids, [T] -> [T, H].

        If a draft model has this method, SGLang's graph runner passes token ids to `forward` instead of embeddings.
        """
        return self.ends.embed(input_ids)

    def get_attention_sliding_window_size(self) -> int | None:
        """Return the number of tokens before the current one in sliding windows; None without sliding layers."""
        return self.config.sliding_window - 1 if "sliding_attention" in self.config.layer_types else None

    def attach(self, ends: TargetEnds, max_position: int) -> None:
        """Store the target's embedding and head, and stack the layers' weights that `context_kv` uses.

        Args:
            ends: the target's embedding and head.
            max_position: number of served positions, one more than the largest position.
        Raises:
            ValueError: a tensor was not loaded.
        """
        if missing := sorted(self.needed - self.loaded):
            raise ValueError(f"the draft's load format left out {missing[0]!r}; drop --speculative-draft-load-format")
        # `object.__setattr__` bypasses nn.Module, so that the target's weights do not become parameters of the draft.
        object.__setattr__(self, "ends", ends)
        attentions = self.attentions
        reach(attentions[0].rotary_emb, max_position)  # all layers share one rotary table
        plain = isinstance(attentions[0].qkv_proj.quant_method, UnquantizedLinearMethod)
        self.qkv_LXH = lay_side_by_side([a.qkv_proj.weight for a in attentions]) if plain else None
        self.k_norm_LE = lay_side_by_side([a.k_norm.weight for a in attentions])
        self.bias_LX = lay_side_by_side([a.qkv_proj.bias for a in attentions]) if self.config.attention_bias else None
        self.first_k_row = attentions[0].q_size
        self.kv_shape = (2, attentions[0].n_kv_heads, attentions[0].head_dim)

    @property
    def attentions(self) -> list[DraftAttention]:
        return [cast(DraftLayer, layer).self_attn for layer in self.layers]

    @torch.no_grad()
    def forward(
        self,
        input_ids: torch.Tensor,
        positions: torch.Tensor,
        forward_batch: ForwardBatch,
        n_filled: int | None = None,
    ) -> LogitsProcessorOutput:
        """Replace the mask tokens of the blocks by drafts.

        Args:
            input_ids: int64 [B * N], for each block its anchor and N - 1 mask tokens.
            positions: int64 [B * N].
            n_filled: number of slots of each block to return; None: all N, which SGLang's graph runner needs.
        Returns:
            SGLang's output type, whose `hidden_states` are the anchors and drafts, int64 [B * N] or [B * n_filled].
            SGLang's graph runner returns one row of this field per input token.
        """
        hidden_TH, residual_TH = self.forward_embed(input_ids), None
        for layer in self.layers:
            hidden_TH, residual_TH = layer(positions, hidden_TH, residual_TH, forward_batch)
        hidden_TH, _ = self.norm(hidden_TH, residual_TH)
        blocks_BN = input_ids.view(forward_batch.batch_size, -1)
        tokens_BN = filled(hidden_TH, blocks_BN, self.candidate_selector, self.ends, n_filled)
        return LogitsProcessorOutput(next_token_logits=None, hidden_states=tokens_BN.view(-1))

    def context_kv(self, features_TC: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Return K (before norm and rope) and V of the context, for all layers: two tensors [T, L, G, E].

        `fc` and `hidden_norm` reduce the features to [T, H]. Then each layer's K and V weights are applied.
        """
        fused_TH = self.hidden_norm(self.fc(features_TC))
        if self.qkv_LXH is None:
            kv_LTX = torch.stack([a.qkv_proj(fused_TH)[0][:, self.first_k_row :] for a in self.attentions])
        else:
            kv_LTX = torch.matmul(fused_TH, self.qkv_LXH[:, self.first_k_row :].transpose(1, 2))
            if self.bias_LX is not None:
                kv_LTX += self.bias_LX[:, None, self.first_k_row :]
        k_TLGE, v_TLGE = kv_LTX.view(*kv_LTX.shape[:2], *self.kv_shape).transpose(0, 1).unbind(2)
        return k_TLGE, v_TLGE

    # -- weights --------------------------------------------------------------------------------------------------

    def load_weights(self, weights: Iterable[tuple[str, torch.Tensor]]) -> None:
        """Load a checkpoint, or update some of its tensors while serving.

        Raises:
            ValueError: a tensor is unknown, or a quantized draft is updated.
            AssertionError, RuntimeError: a tensor has a wrong shape (raised by SGLang's loaders).
        """
        parameters = dict(self.named_parameters())
        weights = unpacked(weights, self.config.packing, self.norm.weight.dtype)
        if self.needed <= self.loaded:
            if self.qkv_LXH is None:
                raise ValueError(QUANTIZED)
            weights = list(weights)  # `weights` may be a generator, and is iterated twice
            require_all_known((name for name, _ in weights), parameters)
        for name, tensor in weights:
            name = name.removeprefix("model.")
            if not is_unused(name):
                fused, shard = require_known(name, parameters)
                loader_of(parameters[fused])(parameters[fused], tensor, *shard)
                self.loaded.add(name)


EntryClass = DFlashDraftModel
