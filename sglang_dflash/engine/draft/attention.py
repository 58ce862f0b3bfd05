"""Attention of a draft layer: which tokens a slot attends to, and how the result is gated.

The variants are fields of the checkpoint: full and sliding layers, causal or not inside the block, Laguna's gate,
and attention sinks.
Dimensions: T rows (B requests x N slots), Q query heads, G KV heads, E head width, H hidden.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from sglang.kernels.ops.attention.table_qk_norm_rope import table_qk_norm_rope_
from sglang.srt.layers.layernorm import RMSNorm
from sglang.srt.layers.linear import ColumnParallelLinear, QKVParallelLinear, RowParallelLinear
from sglang.srt.layers.quantization.base_config import QuantizationConfig
from sglang.srt.layers.radix_attention import AttentionType, RadixAttention
from sglang.srt.layers.rotary_embedding.base import RotaryEmbedding
from sglang.srt.model_executor.forward_batch_info import ForwardBatch
from sglang.srt.models.utils import apply_qk_norm
from sglang.srt.runtime_context import get_parallel
from torch import nn
from torch.nn.functional import softplus

from sglang_dflash.engine.draft.record import Checkpoint

FP32_SINKS = ("trtllm_mha",)  # backends that read attention sinks in fp32; others read them in the draft's dtype


class DraftAttention(nn.Module):
    """Attention of one draft layer: full layers attend to context and block, sliding layers to a window.

    A causal layer's slots attend to no later slot of their block.
    """

    def __init__(
        self, config: Checkpoint, layer_id: int, rotary: RotaryEmbedding, quant_config: QuantizationConfig | None
    ) -> None:
        """Build the attention of layer `layer_id`. All layers share one rotary table, `rotary`."""
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
        self.rotary_emb = rotary
        one_kernel = self.qkv_proj.weight.dtype == torch.bfloat16 or self.qkv_proj.weight.is_cpu
        self.norm_rotate = self.norm_rotate_in_one if one_kernel else self.norm_rotate_in_two
        window = config.layer_windows[layer_id]
        causal = config.full_is_causal if window is None else config.sliding_is_causal
        self.g_proj: ColumnParallelLinear | None = None
        if config.gating:
            n_gates = config.num_attention_heads * (1 if config.gating == "per-head" else self.head_dim)
            self.g_proj = ColumnParallelLinear(config.hidden_size, n_gates, bias=False)
        self.options: dict[str, torch.Tensor] = {}  # further keyword arguments for the attention backend
        if config.attention_sink_bias:
            self.attention_sink_bias = nn.Parameter(torch.zeros(self.q_size // self.head_dim), requires_grad=False)
            self.attention_sink_bias.weight_loader = own_heads(get_parallel().tp_rank)  # type: ignore[attr-defined]
            self.options["sinks"] = self.attention_sink_bias
        self.attn = RadixAttention(
            num_heads=self.q_size // self.head_dim,
            head_dim=self.head_dim,
            scaling=self.head_dim**-0.5,
            num_kv_heads=self.n_kv_heads,
            layer_id=layer_id,
            # A window in the checkpoint (as in Transformers) counts the current token, SGLang's window does not.
            sliding_window_size=-1 if window is None else window - 1,
            attn_type=AttentionType.DECODER if causal else AttentionType.ENCODER_ONLY,
        )

    def forward(self, positions_T: torch.Tensor, hidden_TH: torch.Tensor, batch: ForwardBatch) -> torch.Tensor:
        """Write the K/V of the blocks, and attend from each slot to context and block: [T, H] -> [T, H]."""
        qkv, _ = self.qkv_proj(hidden_TH)
        q, k, v = self.norm_rotate(qkv, positions_T)
        attended = self.attn(q, k, v, batch, **self.options)
        if self.g_proj is not None:
            attended = gated(attended, self.g_proj(hidden_TH)[0])
        out, _ = self.o_proj(attended)
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


def own_heads(rank: int) -> Callable[[nn.Parameter, torch.Tensor], None]:
    """Return a loader that copies the values of this rank's heads from those of all heads."""

    def load(parameter: nn.Parameter, of_all: torch.Tensor) -> None:
        n_heads = len(parameter)
        parameter.data.copy_(of_all[rank * n_heads : (rank + 1) * n_heads])

    return load


def gated(attended: torch.Tensor, gate: torch.Tensor) -> torch.Tensor:
    """Multiply the output of each head, or each of its elements, by the softplus of its gate: [T, Q E] -> [T, Q E].

    `gate`: [T, Q] or [T, Q E].
    """
    heads = attended.view(*gate.shape, -1)
    return (heads * softplus(gate.float()).to(attended.dtype)[..., None]).view_as(attended)
