"""Sizes of a server's caches in bytes, computed without torch, SGLang or a GPU.

`tools/capacity` divides a card's memory with these functions, and the server sizes its pools with them, so both agree.
Letters as in the kernels: G key heads, H value heads, K key width, V value width, N tokens per block.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace

from sglang_dflash_kernels.record import record_width

MAX_REQUESTS = 48  # SGLang's default of --max-running-requests with DFLASH
FP32 = 4  # bytes of one value of a record, for any dtype of the states, and of one scale of an fp8 head
INT32 = 4  # bytes per token of a history


def round_up(value: int, multiple: int) -> int:
    """Return the least multiple of `multiple` that is at least `value`."""
    return -(-value // multiple) * multiple


def kept_window(asked: int | None, layers: int | None) -> int | None:
    """Return the number of context tokens that a draft keeps; None: all.

    Args:
        asked: value of `--speculative-draft-window-size`.
        layers: window of the draft's layers; None: a layer attends to the whole context.
    """
    return min((window for window in (asked, layers) if window is not None), default=None)


def ring_slots(window: int, widest: int, page_size: int) -> int:
    """Return the number of KV slots of a request's ring, for a draft with a window of `window` tokens.

    In addition to the window, the ring holds the start of the page in which the window begins. It also holds the tokens
    that a step writes, at most `widest`.
    """
    return round_up(window + page_size - 1 + widest, page_size)


def text_bytes(n_requests: int, context: int) -> int:
    """Return the bytes of token histories: a row of `context` tokens for each request, and a row for padding.

    A row of SGLang's request table is longer by up to twice the widest verify width, plus a page. This is not counted.
    """
    return (n_requests + 1) * context * INT32


def fp8_head_bytes(n_rows: int, width: int) -> int:
    """Return the bytes of an fp8 copy of a head: one byte per weight, and an fp32 scale per row."""
    return n_rows * (width + FP32)


def block_bytes(
    n_tokens: int, *, n_layers: int, record_values: int, conv_shapes: Sequence[tuple[int, int]], conv_itemsize: int
) -> int:
    """Return one rank's bytes for a request's block of `n_tokens`, without the request's persistent states.

    Args:
        n_layers: number of recurrent layers.
        record_values: number of values per layer and token, see `record_width`.
        conv_shapes: for each of a layer's convolutions, the number of channels, and the number of inputs kept between
            steps (the window). Windows after consecutive tokens overlap, so a block has `n_tokens` + window - 1 inputs.
        conv_itemsize: bytes per input of a convolution.
    """
    inputs = sum(n_channels * (n_tokens + window - 1) for n_channels, window in conv_shapes)
    return n_layers * (n_tokens * record_values * FP32 + inputs * conv_itemsize)


@dataclass(frozen=True)
class AttentionSizes:
    """Sizes of the attention layers of a model."""

    n_layers: int
    n_kv_heads: int
    head_dim: int  # width of a key, and of a value
    itemsize: int  # bytes per value

    def bytes_per_token(self, tp_size: int) -> int:
        """Return the bytes of K and V per token on one rank. With fewer KV heads than ranks, a rank keeps one head."""
        return self.n_layers * max(1, self.n_kv_heads // tp_size) * 2 * self.head_dim * self.itemsize


@dataclass(frozen=True)
class RecurrentSizes:
    """Sizes of the Gated DeltaNet layers of a hybrid target.

    Attributes:
        conv_window: number of inputs that the causal convolution keeps between steps, one less than its kernel size.
    """

    n_layers: int
    n_value_heads: int
    value_width: int
    n_key_heads: int
    key_width: int
    conv_window: int
    conv_itemsize: int
    state_itemsize: int

    def shard(self, tp_size: int) -> "RecurrentSizes":
        """Return the sizes on one of `tp_size` ranks; `tp_size` divides both numbers of heads."""
        return replace(self, n_value_heads=self.n_value_heads // tp_size, n_key_heads=self.n_key_heads // tp_size)

    @property
    def n_channels(self) -> int:
        """Return the number of convolution channels: queries, keys and values."""
        return 2 * self.n_key_heads * self.key_width + self.n_value_heads * self.value_width

    @property
    def state_bytes(self) -> int:
        """Return the bytes of a persistent state: H V K values, and the convolution's last inputs, for all layers."""
        state = self.n_value_heads * self.value_width * self.key_width * self.state_itemsize
        return self.n_layers * (state + self.n_channels * self.conv_window * self.conv_itemsize)

    def snapshot_bytes(self, n_tokens: int) -> int:
        """Return the bytes per request with a state for each token of a block, as SGLang counts them."""
        return self.state_bytes * n_tokens

    def record_bytes(self, n_tokens: int) -> int:
        """Return the bytes per request with a record for each token of a block, as `RecordPool` allocates them."""
        return block_bytes(
            n_tokens,
            n_layers=self.n_layers,
            record_values=record_width(self.n_value_heads, self.value_width, self.n_key_heads, self.key_width),
            conv_shapes=[(self.n_channels, self.conv_window)],
            conv_itemsize=self.conv_itemsize,
        )
