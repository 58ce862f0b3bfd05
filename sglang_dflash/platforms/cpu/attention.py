"""Paged attention in PyTorch: decode, extend, DFlash's verify (a causal chain) and its draft block.

Decode, verify and the draft block gather the keys of several requests into one rectangle, padded to the longest
request, and mask the padding. So one attention call per layer serves several requests, as many as fit in MAX_RECTANGLE.
Extend computes request by request, a slice of queries at a time.

A layer's mask follows SGLang's other backends. If `attn_type` is ENCODER_ONLY, queries attend to all keys, otherwise
causally. A window w allows keys at most w positions away (SGLang's layers store the model's window less one).

Dimension key: B requests, N query tokens per request, L key positions (padded), T packed tokens, A query heads, G KV
heads, E head width.
"""

from typing import TYPE_CHECKING, NamedTuple

import torch
from sglang.srt.layers.attention.base_attn_backend import AttentionBackend
from sglang.srt.layers.radix_attention import AttentionType
from sglang.srt.mem_cache.memory_pool import KVWriteLoc
from sglang.srt.mem_cache.swa_memory_pool import SWAKVPool
from torch.nn.functional import scaled_dot_product_attention

from sglang_dflash.platforms.cpu.refuse import refuse

if TYPE_CHECKING:
    from sglang.srt.layers.radix_attention import RadixAttention
    from sglang.srt.model_executor.forward_batch_info import ForwardBatch
    from sglang.srt.model_executor.model_runner import ModelRunner

MAX_RECTANGLE = 1 << 16  # key positions of a rectangle: 64 MiB of keys and values for 2 heads of 64 in fp32
MAX_QUERIES = 512  # most queries of one attention call in extend; bounds the memory of the mask


class Mask(NamedTuple):
    """Rule for the keys that a layer's queries attend to. Layers with equal rules share a bias (`Rectangle.bias`)."""

    causal: bool
    window: int | None

    @classmethod
    def of(cls, layer: "RadixAttention") -> "Mask":
        window = layer.sliding_window_size
        return cls(
            layer.attn_type != AttentionType.ENCODER_ONLY, window if window is not None and window > -1 else None
        )

    def allowed(self, query_position: torch.Tensor, key_position: torch.Tensor) -> torch.Tensor:
        """Return True where a query may attend to a key. The two position tensors are broadcast together."""
        distance = query_position - key_position
        allowed = distance >= 0 if self.causal else torch.ones_like(distance, dtype=torch.bool)
        if self.window is not None:
            allowed &= distance <= self.window
            if not self.causal:
                allowed &= distance >= -self.window
        return allowed


def consecutive(slots: torch.Tensor) -> torch.Tensor | slice:
    """Return KV slots [n] as a slice if they are consecutive, because a slice of a buffer needs no copy."""
    first, end = int(slots[0]), int(slots[0]) + len(slots)
    is_run = int(slots[-1]) == end - 1 and torch.equal(slots, torch.arange(first, end, dtype=slots.dtype))
    return slice(first, end) if is_run else slots


class Rectangle:
    """Group of requests of the batch, whose lists of KV slots are padded to the longest list.

    The bias for a mask and dtype is computed at its first use, and shared by layers.
    """

    def __init__(self, requests: slice, slots_BL: torch.Tensor, n_keys_B: torch.Tensor, n_queries: int) -> None:
        self.requests = requests
        self.shape = slots_BL.shape
        self._key_position_L = torch.arange(slots_BL.shape[1])
        self._n_keys_B1 = n_keys_B[:, None]
        self._n_queries = n_queries
        # Padding reads the request's own first KV slot. Padding is masked, but a KV slot of another request might hold
        # NaN, and 0 * NaN is NaN.
        padded_BL = self._key_position_L >= self._n_keys_B1
        self.slots = consecutive(torch.where(padded_BL, slots_BL[:, :1], slots_BL).flatten())
        self._bias: dict[tuple[Mask, torch.dtype], torch.Tensor | None] = {}

    def bias(self, mask: Mask, dtype: torch.dtype) -> torch.Tensor | None:
        """Return the bias of the attention scores, 0 or -inf, [B, 1, N, L]; None if every value is 0."""
        key = (mask, dtype)
        if key not in self._bias:
            query_position_BN = self._n_keys_B1 - self._n_queries + torch.arange(self._n_queries)
            allowed_BNL = mask.allowed(query_position_BN[:, :, None], self._key_position_L)
            allowed_BNL &= (self._key_position_L < self._n_keys_B1)[:, None]
            masked_BNL = ~allowed_BNL
            bias_BNL = torch.zeros(masked_BNL.shape, dtype=dtype).masked_fill_(masked_BNL, -torch.inf)
            self._bias[key] = bias_BNL[:, None] if masked_BNL.any() else None
        return self._bias[key]


class Segment(NamedTuple):
    """One request of an extend: its range of the packed queries, and the KV slots of all its tokens."""

    queries: slice
    n_prefix: int
    slots: torch.Tensor | slice


class CpuAttentionBackend(AttentionBackend):
    """Attention backend that this platform registers in SGLang as `torch_native`."""

    needs_cpu_seq_lens: bool = False

    def __init__(self, model_runner: "ModelRunner") -> None:
        super().__init__()
        self.req_to_token_pool = model_runner.req_to_token_pool
        self.token_to_kv_pool = model_runner.token_to_kv_pool
        refuse(
            "torch_native attention",
            {"a latent-attention (MLA) model": model_runner.use_mla_backend},
        )
        if isinstance(self.token_to_kv_pool, SWAKVPool):
            raise NotImplementedError(
                "the CPU platform has no separate KV pool for sliding layers; add --disable-hybrid-swa-memory"
            )
        self._rectangles: list[Rectangle] = []
        self._segments: list[Segment] = []
        self._known_layers: set[int] = set()

    def support_triton(self) -> bool:
        return False

    def get_cuda_graph_seq_len_fill_value(self) -> int:
        """Return the sequence length of padding requests."""
        return 1

    def init_forward_metadata(self, forward_batch: "ForwardBatch") -> None:
        self._rectangles, self._segments = [], []
        mode = forward_batch.forward_mode
        if mode.is_idle():
            return
        if mode.is_decode():
            self._rectangles = self._plan_rectangles(forward_batch, forward_batch.seq_lens, 1)
        elif mode.is_target_verify():
            spec = forward_batch.spec_info
            refuse(
                "torch_native attention",
                {"custom_mask (a tree)": spec.custom_mask, "ragged_verify_layout": spec.ragged_verify_layout},
            )
            n_block = int(spec.draft_token_num)
            self._rectangles = self._plan_rectangles(forward_batch, forward_batch.seq_lens + n_block, n_block)
        elif mode.is_extend_without_speculative():
            self._segments = self._plan_segments(forward_batch)
        else:
            refuse("torch_native attention", {f"forward mode {mode.name}": True})

    def _plan_rectangles(
        self, forward_batch: "ForwardBatch", n_keys_B: torch.Tensor, n_queries: int
    ) -> list[Rectangle]:
        """Group the requests. A group has at most MAX_RECTANGLE key positions, padding included, or is one request."""
        widest = int(n_keys_B.max())
        B = n_keys_B.shape[0]
        n_at_once = max(1, MAX_RECTANGLE // widest)
        row_B = forward_batch.req_pool_indices.long()
        rectangles = []
        for start in range(0, B, n_at_once):
            requests = slice(start, min(start + n_at_once, B))
            n_keys = n_keys_B[requests]
            width = widest if n_at_once >= B else int(n_keys.max())
            slots_BL = self.req_to_token_pool.req_to_token[row_B[requests], :width]
            rectangles.append(Rectangle(requests, slots_BL, n_keys, n_queries))
        return rectangles

    def _plan_segments(self, forward_batch: "ForwardBatch") -> list[Segment]:
        segments, start = [], 0
        lengths = zip(
            forward_batch.req_pool_indices.tolist(),
            forward_batch.extend_prefix_lens.tolist(),
            forward_batch.extend_seq_lens.tolist(),
            strict=True,
        )
        for row, n_prefix, n_new in lengths:
            slots = self.req_to_token_pool.req_to_token[row, : n_prefix + n_new]
            segments.append(Segment(slice(start, start + n_new), n_prefix, consecutive(slots)))
            start += n_new
        return segments

    def forward_decode(
        self,
        q: torch.Tensor,
        k: torch.Tensor | None,
        v: torch.Tensor | None,
        layer: "RadixAttention",
        forward_batch: "ForwardBatch",
        save_kv_cache: bool = True,
        **others: object,
    ) -> torch.Tensor:
        """Attend with q [T, A E], after writing k, v [T, G, E] to the batch's KV slots; returns [T, A E]."""
        self._write(k, v, layer, forward_batch.out_cache_loc if save_kv_cache else None, others)
        return self._attend_rectangles(q, layer)

    def forward_extend(
        self,
        q: torch.Tensor,
        k: torch.Tensor | None,
        v: torch.Tensor | None,
        layer: "RadixAttention",
        forward_batch: "ForwardBatch",
        save_kv_cache: bool = True,
        **others: object,
    ) -> torch.Tensor:
        """Attend with q [T, A E], after writing k, v [T, G, E] to the batch's KV slots; returns [T, A E]."""
        self._write(k, v, layer, forward_batch.out_cache_loc if save_kv_cache else None, others)
        if forward_batch.forward_mode.is_target_verify():
            return self._attend_rectangles(q, layer)
        return self._attend_segments(q, layer)

    def _write(
        self,
        k: torch.Tensor | None,
        v: torch.Tensor | None,
        layer: "RadixAttention",
        slots: torch.Tensor | None,
        others: dict[str, object],
    ) -> None:
        refuse("torch_native attention", others)
        if layer.layer_id not in self._known_layers:
            _refuse_layer(layer)
            self._known_layers.add(layer.layer_id)
        if slots is not None and k is not None:
            self.token_to_kv_pool.set_kv_buffer(layer, KVWriteLoc(slots, None), k, v)

    def _read(
        self, layer: "RadixAttention", slots: torch.Tensor | slice, dtype: torch.dtype
    ) -> tuple[torch.Tensor, ...]:
        """Return keys and values of KV slots, [slots, G, E] each: views of a slice, otherwise copies."""
        pool = self.token_to_kv_pool
        buffers = (pool.get_key_buffer(layer.layer_id), pool.get_value_buffer(layer.layer_id))
        if isinstance(slots, slice):
            return tuple(buffer[slots].to(dtype) for buffer in buffers)
        # All heads of a KV slot are copied as one row.
        return tuple(
            buffer.view(buffer.shape[0], -1).index_select(0, slots).view(-1, *buffer.shape[1:]).to(dtype)
            for buffer in buffers
        )

    def _attend_rectangles(self, q: torch.Tensor, layer: "RadixAttention") -> torch.Tensor:
        mask = Mask.of(layer)
        outputs = []
        n_requests = sum(rectangle.shape[0] for rectangle in self._rectangles)
        q_BNAE = q.view(n_requests, -1, layer.tp_q_head_num, layer.qk_head_dim)
        for rectangle in self._rectangles:
            k, v = self._read(layer, rectangle.slots, q.dtype)
            out_BANE = scaled_dot_product_attention(
                q_BNAE[rectangle.requests].transpose(1, 2),
                k.view(*rectangle.shape, *k.shape[1:]).transpose(1, 2),
                v.view(*rectangle.shape, *v.shape[1:]).transpose(1, 2),
                attn_mask=rectangle.bias(mask, q.dtype),
                scale=layer.scaling,
                enable_gqa=layer.tp_q_head_num != layer.tp_k_head_num,
            )
            outputs.append(out_BANE.transpose(1, 2).reshape(-1, layer.tp_q_head_num * layer.v_head_dim))
        return outputs[0] if len(outputs) == 1 else torch.cat(outputs)

    def _attend_segments(self, q: torch.Tensor, layer: "RadixAttention") -> torch.Tensor:
        mask = Mask.of(layer)
        q_TAE = q.view(-1, layer.tp_q_head_num, layer.qk_head_dim)
        out_TAE = q.new_zeros(q_TAE.shape[0], layer.tp_q_head_num, layer.v_head_dim)
        for segment in self._segments:
            k, v = self._read(layer, segment.slots, q.dtype)
            for start in range(segment.queries.start, segment.queries.stop, MAX_QUERIES):
                queries = slice(start, min(start + MAX_QUERIES, segment.queries.stop))
                first = segment.n_prefix + start - segment.queries.start
                n_keys = first + queries.stop - queries.start if mask.causal else len(k)
                allowed = mask.allowed(torch.arange(first, first + queries.stop - start)[:, None], torch.arange(n_keys))
                out_TAE[queries] = scaled_dot_product_attention(
                    q_TAE[queries].transpose(0, 1)[None],
                    k[:n_keys].transpose(0, 1)[None],
                    v[:n_keys].transpose(0, 1)[None],
                    attn_mask=allowed,
                    scale=layer.scaling,
                    enable_gqa=layer.tp_q_head_num != layer.tp_k_head_num,
                )[0].transpose(0, 1)
        return out_TAE.flatten(1)


def _refuse_layer(layer: "RadixAttention") -> None:
    refuse(
        f"torch_native attention, layer {layer.layer_id}",
        {
            "cross attention": layer.is_cross_attention,
            "logit_cap": layer.logit_cap > 0,
            "k_scale (a scaled KV cache)": layer.k_scale_float not in (None, 1.0),
            "attn_type DECODER_BIDIRECTIONAL": layer.attn_type == AttentionType.DECODER_BIDIRECTIONAL,
        },
    )
