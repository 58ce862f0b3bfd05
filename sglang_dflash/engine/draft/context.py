"""Context of a draft: how the target's features become K and V of every draft layer.

Every kind of draft reduces a token's features to one hidden state by `fc` and a norm. Laguna's drafts also norm each
captured layer's features before `fc`. In these drafts, each draft layer applies its input norm to the hidden state.

Dimensions: T tokens, F captured layers, C features (F x H), L draft layers, G KV heads, E head width, H hidden, X rows
of a layer's q, k and v.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
import torch.nn.functional as F
from sglang.srt.layers.layernorm import RMSNorm
from sglang.srt.layers.quantization.unquant import UnquantizedLinearMethod

from sglang_dflash.engine.draft.attention import DraftAttention
from sglang_dflash.engine.draft.weights import lay_side_by_side


class ContextProjection:
    """Function from features to K and V, with the layers' weights stacked so that one product serves all layers."""

    def __init__(
        self,
        fuse: Callable[[torch.Tensor], torch.Tensor],
        attentions: Sequence[DraftAttention],
        input_norms: Sequence[RMSNorm] | None = None,
    ) -> None:
        """Stack the layers' weights.

        Args:
            fuse: features [T, C] -> hidden states [T, H].
            attentions: attention of every layer.
            input_norms: norm of every layer, applied to its context; None: the context is equal for all layers.
        """
        first = attentions[0]
        self.fuse, self.attentions = fuse, attentions
        # Weights and biases of the q, k and v projections. The rows of k and v begin at `first_k_row`. `qkv_LXH` is
        # None if the projections are quantized. `bias_LX` is None if they have no biases.
        plain = isinstance(first.qkv_proj.quant_method, UnquantizedLinearMethod)
        self.qkv_LXH = lay_side_by_side([a.qkv_proj.weight for a in attentions]) if plain else None
        has_bias = first.qkv_proj.bias is not None
        self.bias_LX = lay_side_by_side([a.qkv_proj.bias for a in attentions]) if has_bias else None
        self.norm_LH = lay_side_by_side([norm.weight for norm in input_norms]) if input_norms else None
        self.eps = input_norms[0].variance_epsilon if input_norms else 0.0
        self.first_k_row = first.q_size
        self.kv_shape = (2, first.n_kv_heads, first.head_dim)

    def kv(self, fused: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Return K (before norm and rope) and V of the context, for all layers: two tensors [T, L, G, E].

        `fused`: context rows that `fuse` returned, [T, H].
        """
        if self.norm_LH is not None:
            fused = F.rms_norm(fused, fused.shape[-1:], eps=self.eps) * self.norm_LH[:, None]  # [L, T, H]
        if self.qkv_LXH is None:
            kv_LTX = torch.stack([self._quantized(i, fused) for i in range(len(self.attentions))])
        else:
            kv_LTX = torch.matmul(fused, self.qkv_LXH[:, self.first_k_row :].transpose(1, 2))
            if self.bias_LX is not None:
                kv_LTX += self.bias_LX[:, None, self.first_k_row :]
        k_TLGE, v_TLGE = kv_LTX.view(*kv_LTX.shape[:2], *self.kv_shape).transpose(0, 1).unbind(2)
        return k_TLGE, v_TLGE

    def _quantized(self, layer: int, fused: torch.Tensor) -> torch.Tensor:
        hidden_TH = fused if self.norm_LH is None else fused[layer]
        return self.attentions[layer].qkv_proj(hidden_TH)[0][:, self.first_k_row :]


class FeatureNorms:
    """Norms of each captured layer's features, in one launch for all layers and one for their weights."""

    def __init__(self, norms: Sequence[RMSNorm], eps: float) -> None:
        self.weight_FH, self.eps = lay_side_by_side([norm.weight for norm in norms]), eps

    def __call__(self, features_TC: torch.Tensor) -> torch.Tensor:
        features_TFH = features_TC.view(len(features_TC), *self.weight_FH.shape)
        return (F.rms_norm(features_TFH, features_TFH.shape[-1:], eps=self.eps) * self.weight_FH).flatten(1)
