"""DFlash or DFlash 2 draft in MLX: the computation of `reference/torch/draft.py`, for one block of one sequence.

Shapes: S committed tokens, slots or taps of a convolution; N slots of a block, D = N - 1 drafts, T visible context
tokens, H hidden, C features, E head width, V vocabulary, K candidates, R rank of the selector; 1 is the batch.
"""

from collections.abc import Callable

import mlx.core as mx
import mlx.nn as nn
from mlx_lm.models.cache import KVCache
from mlx_lm.models.rope_utils import initialize_rope

from sglang_dflash.engine.draft.record import Checkpoint


class Attention(nn.Module):
    """Attention to `context` (K and V from the features of the tokens before the anchor) and to the block itself."""

    def __init__(self, config: Checkpoint, window: int | None) -> None:
        super().__init__()
        self.window, self.is_causal = window, config.sliding_is_causal
        self.n_heads, self.n_kv_heads = config.num_attention_heads, config.num_key_value_heads
        self.head_dim = config.head_dim
        q_size, kv_size = self.n_heads * self.head_dim, self.n_kv_heads * self.head_dim
        self.q_proj = nn.Linear(config.hidden_size, q_size, bias=config.attention_bias)
        self.k_proj = nn.Linear(config.hidden_size, kv_size, bias=config.attention_bias)
        self.v_proj = nn.Linear(config.hidden_size, kv_size, bias=config.attention_bias)
        self.o_proj = nn.Linear(q_size, config.hidden_size, bias=config.attention_bias)
        self.q_norm = nn.RMSNorm(self.head_dim, eps=config.rms_norm_eps)
        self.k_norm = nn.RMSNorm(self.head_dim, eps=config.rms_norm_eps)
        rope = dict(config.rope_parameters)
        self.rope = initialize_rope(self.head_dim, rope["rope_theta"], False, rope, config.max_position_embeddings)

    def heads(self, flat: mx.array, n_heads: int) -> mx.array:
        """Split heads: [1, S, n_heads * E] -> [1, n_heads, S, E]."""
        return flat.reshape(1, -1, n_heads, self.head_dim).swapaxes(1, 2)

    def key_value(self, hidden_1SH: mx.array, first_position: int) -> tuple[mx.array, mx.array]:
        keys = self.k_norm(self.heads(self.k_proj(hidden_1SH), self.n_kv_heads))
        return self.rope(keys, offset=first_position), self.heads(self.v_proj(hidden_1SH), self.n_kv_heads)

    def __call__(self, hidden_1NH: mx.array, context: KVCache, draft_window: int | None) -> mx.array:
        N, prefix_len = hidden_1NH.shape[1], context.offset
        queries = self.rope(self.q_norm(self.heads(self.q_proj(hidden_1NH), self.n_heads)), offset=prefix_len)
        limits = draft_window, self.window and self.window - 1  # a layer's window includes the slot itself
        T = min([prefix_len, *(limit for limit in limits if limit is not None)])
        seen = (past[..., prefix_len - T : prefix_len, :] for past in context.keys_and_values())
        own = self.key_value(hidden_1NH, prefix_len)
        keys, values = (mx.concatenate(pair, axis=2) for pair in zip(seen, own, strict=True))
        out = mx.fast.scaled_dot_product_attention(
            queries, keys, values, scale=self.head_dim**-0.5, mask=self.mask(N, T)
        )
        return self.o_proj(out.swapaxes(1, 2).reshape(1, N, -1))

    def mask(self, N: int, T: int) -> mx.array | None:
        """Return the attention mask of the slots, bool [N, T + N]; None in a full layer: all keys are visible."""
        if self.window is None:
            return None
        distance = mx.arange(N)[:, None] - mx.arange(-T, N)
        latest = 0 if self.is_causal else 1 - self.window
        return (distance >= latest) & (distance < self.window)


class Mlp(nn.Module):
    def __init__(self, config: Checkpoint) -> None:
        super().__init__()
        self.gate_proj = nn.Linear(config.hidden_size, config.intermediate_size, bias=False)
        self.up_proj = nn.Linear(config.hidden_size, config.intermediate_size, bias=False)
        self.down_proj = nn.Linear(config.intermediate_size, config.hidden_size, bias=False)

    def __call__(self, hidden: mx.array) -> mx.array:
        return self.down_proj(nn.silu(self.gate_proj(hidden)) * self.up_proj(hidden))


class BlockConv(nn.Module):
    """DFlash 2's convolutions over slots, before and after a sublayer, see `sglang_dflash.reference.torch.second`."""

    def __init__(self, config: Checkpoint) -> None:
        super().__init__()
        self.n_taps, self.group_size = config.conv_kernel_size, config.conv_group_size
        n_groups = config.hidden_size // config.conv_group_size
        self.base_kernel = mx.zeros((2, self.n_taps, config.hidden_size))
        self.kernel_projection = nn.Linear(config.hidden_size, 2 * self.n_taps * n_groups, bias=False)

    def __call__(self, sublayer: Callable[[mx.array], mx.array], hidden_1NH: mx.array) -> mx.array:
        change = self.kernel_projection(hidden_1NH).reshape(*hidden_1NH.shape[:2], 2, self.n_taps, -1)
        kernels = self.base_kernel + mx.repeat(change, self.group_size, axis=-1)
        return convolve(sublayer(convolve(hidden_1NH, kernels[:, :, 0])), kernels[:, :, 1])


def convolve(hidden_1NH: mx.array, kernel_1NSH: mx.array) -> mx.array:
    """Return out[n] = sum over taps s of kernel[n, s] * hidden[n - s], zero-padded before the block."""
    N, n_taps = kernel_1NSH.shape[1:3]
    padded = mx.pad(hidden_1NH, ((0, 0), (n_taps - 1, 0), (0, 0)))
    return sum(kernel_1NSH[:, :, s] * padded[:, n_taps - 1 - s : n_taps - 1 - s + N] for s in range(n_taps))


class CandidateSelector(nn.Module):
    """DFlash 2's greedy path through the best tokens of every slot, see `sglang_dflash.reference.torch.second`."""

    def __init__(self, config: Checkpoint) -> None:
        super().__init__()
        n_vocab, rank = config.vocab_size or 0, config.selector_rank
        self.n_candidates = config.selector_top_k
        self.multiplier, self.cap = config.output_multiplier, config.final_logit_softcapping
        self.predecessor_codebook = mx.zeros((n_vocab, rank))
        self.successor_codebook = mx.zeros((n_vocab, rank))
        self.hidden_projection = nn.Linear(config.hidden_size, rank, bias=False)

    def __call__(self, hidden_DH: mx.array, logits_DV: mx.array, anchor_1: mx.array) -> mx.array:
        logits_DV = logits_DV.astype(mx.float32)
        tokens_DK = mx.argpartition(-logits_DV, self.n_candidates - 1)[:, : self.n_candidates]
        unary_DK = mx.take_along_axis(logits_DV, tokens_DK, 1) * self.multiplier
        if self.cap is not None:
            unary_DK = self.cap * mx.tanh(unary_DK / self.cap)
        projected_DR, path = self.hidden_projection(hidden_DH), [anchor_1]
        for tokens_K, unary_K, projected_R in zip(tokens_DK, unary_DK, projected_DR, strict=True):
            wanted_1R = self.predecessor_codebook[path[-1]] * projected_R
            edges_K = (wanted_1R * self.successor_codebook[tokens_K]).sum(-1)
            path.append(tokens_K[mx.argmax(unary_K + edges_K, keepdims=True)])
        return mx.concatenate(path[1:])


class Layer(nn.Module):
    def __init__(self, config: Checkpoint, window: int | None) -> None:
        super().__init__()
        self.input_layernorm = nn.RMSNorm(config.hidden_size, eps=config.rms_norm_eps)
        self.self_attn = Attention(config, window)
        self.post_attention_layernorm = nn.RMSNorm(config.hidden_size, eps=config.rms_norm_eps)
        self.mlp = Mlp(config)
        self.has_conv = bool(config.conv_kernel_size)
        if self.has_conv:
            self.attention_conv, self.mlp_conv = BlockConv(config), BlockConv(config)

    def __call__(self, hidden_1NH: mx.array, context: KVCache, draft_window: int | None) -> mx.array:
        def attend(hidden_1NH: mx.array) -> mx.array:
            return self.self_attn(hidden_1NH, context, draft_window)

        normed = self.input_layernorm(hidden_1NH)
        hidden_1NH = hidden_1NH + (self.attention_conv(attend, normed) if self.has_conv else attend(normed))
        normed = self.post_attention_layernorm(hidden_1NH)
        return hidden_1NH + (self.mlp_conv(self.mlp, normed) if self.has_conv else self.mlp(normed))


class MLXDraft(nn.Module):
    """The draft of a DFlash checkpoint; parameter names are the checkpoint's tensor names."""

    def __init__(self, config: Checkpoint) -> None:
        super().__init__()
        self.config = config
        self.fc = nn.Linear(config.feature_size, config.hidden_size, bias=False)
        self.hidden_norm = nn.RMSNorm(config.hidden_size, eps=config.rms_norm_eps)
        self.layers = [Layer(config, window) for window in config.layer_windows]
        self.norm = nn.RMSNorm(config.hidden_size, eps=config.rms_norm_eps)
        if config.selector_rank:
            self.candidate_selector = CandidateSelector(config)

    def make_context(self) -> list[KVCache]:
        return [KVCache() for _ in self.layers]

    def append_context_kv(self, features_SC: mx.array, context: list[KVCache]) -> None:
        """Append keys and values of S committed tokens to `context`, from the tokens' features."""
        hidden_1SH = self.hidden_norm(self.fc(features_SC[None].astype(self.fc.weight.dtype)))
        for layer, kv in zip(self.layers, context, strict=True):
            kv.update_and_fetch(*layer.self_attn.key_value(hidden_1SH, kv.offset))

    def __call__(self, embeddings_NH: mx.array, context: list[KVCache], draft_window: int | None = None) -> mx.array:
        """Return the hidden states of the block's slots after its anchor, [D, H].

        Args:
            embeddings_NH: the target's embeddings of anchor, mask, mask, ...
            draft_window: largest number of context tokens that the block attends to; None: no limit.
        """
        hidden_1NH = embeddings_NH[None].astype(self.fc.weight.dtype)
        for layer, kv in zip(self.layers, context, strict=True):
            hidden_1NH = layer(hidden_1NH, kv, draft_window)
        return self.norm(hidden_1NH)[0, 1:]

    def guesses(self, hidden_DH: mx.array, logits_DV: mx.array, anchor_1: mx.array) -> mx.array:
        """Return the drafts of a block, [D]: the selector's path if there is a selector, else each slot's argmax."""
        if not self.config.selector_rank:
            return mx.argmax(logits_DV, axis=-1)
        return self.candidate_selector(hidden_DH, logits_DV, anchor_1)
