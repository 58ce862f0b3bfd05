"""Division of a card's memory, and the number of requests that fit, with this plugin's worker or SGLang's.

    card x mem_fraction_static
      - weights of target and draft, copy of the head, SGLang's image cache          -> rest
      - recurrent states and blocks of all requests, ring buffers, token histories   -> bytes of K and V
      / bytes of K and V per token, of target and draft                              -> tokens; requests

The workers differ. For a block on a hybrid target, SGLang's worker stores a recurrent state per token, this plugin's
worker a smaller record per token. For a windowed draft, SGLang has as many KV slots as for the target, this plugin has
a ring buffer per request. Only this plugin can have token histories (for n-gram copies), widths beyond the
block, and a copy of the head's rows, in fp8 or of a reduced vocabulary.

`geometry` creates the dataclasses with sizes from config.json, and `report` prints the result. Speed is not computed.
The memory of graphs and activations is not computed either: 1 - mem_fraction_static of the card is left for them.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from enum import IntEnum, StrEnum
from math import gcd
from typing import NamedTuple

from sglang_dflash.engine.memory.sizes import (
    MAX_REQUESTS,
    AttentionSizes,
    RecurrentSizes,
    kept_window,
    ring_slots,
    round_up,
    text_bytes,
)
from sglang_dflash.flags import Worker

MIB, GIB = 2**20, 2**30

# SGLang 0.5.23's defaults, including changes under DFLASH.
MAMBA_RATIO = 0.9
IMAGE_CACHE_BYTES = 100 * MIB  # SGLANG_VLM_CACHE_SIZE_MB, subtracted before K and V are sized


class RadixStates(IntEnum):
    """Number of state slots that SGLang plans per request, by prefix-cache strategy.

    The slots hold the request's own state, states of the prefix cache, and states that will join it.
    """

    EXTRA_BUFFER = 5
    EXTRA_BUFFER_LAZY = 4
    NO_BUFFER = 3
    OFF = 1  # no prefix cache: one state per request


class Bound(StrEnum):
    """Resource or flag that limits the number of requests."""

    WEIGHTS = "weights"
    STATE = "recurrent state"
    TOKENS = "KV tokens"
    FLAG = "--max-running-requests"


@dataclass(frozen=True)
class TargetSizes:
    """Sizes of a target.

    Attributes:
        weight_bytes: total of all ranks.
        itemsize: bytes per weight as loaded, quantized weights aside. The draft is loaded in the same dtype.
        weights_from, source: sources of `weight_bytes` and of the config, as text.
        image_width: hidden size of the image encoder; 0 if there is none.
        context_length: largest number of tokens of a request: the target's limit, or the server's.
        fp8_head_bytes: bytes of an fp8 copy of the head, total of all ranks.
    """

    name: str
    attention: AttentionSizes
    recurrent: RecurrentSizes | None
    n_heads: int
    weight_bytes: int
    weights_from: str
    image_width: int
    context_length: int
    fp8_head_bytes: int
    source: str
    itemsize: int = 2


@dataclass(frozen=True)
class DraftSizes:
    """Sizes of a draft.

    Attributes:
        split_bytes: weights that are split over ranks: attention and MLP.
        whole_bytes: weights that every rank has: feature fusion, norms, convolutions and the selector's tables.
        window: the layers' sliding window in tokens; None if a layer attends to the whole context.
        head_bytes: copy of the head's rows for a reduced vocabulary, total of all ranks; 0 if the vocabulary is whole.
        fp8_head_bytes: the same copy in fp8.
    """

    name: str
    attention: AttentionSizes
    n_heads: int
    split_bytes: int
    whole_bytes: int
    window: int | None
    block_size: int
    source: str
    head_bytes: int = 0
    fp8_head_bytes: int = 0

    def copied_bytes(self, target: TargetSizes, *, fp8: bool) -> int:
        """Return the bytes of this plugin's copy of the target's head, total of all ranks."""
        return (self.fp8_head_bytes or target.fp8_head_bytes) if fp8 else self.head_bytes


@dataclass(frozen=True)
class Serving:
    """Settings of a launch.

    Attributes:
        context: tokens of a request, prompt and answer together.
        window: `--speculative-draft-window-size`.
        copies: this plugin keeps token histories for n-gram copies.
        fp8_head: this plugin keeps an fp8 copy of the target's head.
        wider: tokens of this plugin's widest verify if it exceeds the block; else 0.
        max_tokens: `--max-total-tokens`.
        n_states: `--max-mamba-cache-size`.
    """

    mem_fraction: float
    block_size: int
    context: int
    tp_size: int = 1
    window: int | None = None
    max_requests: int = MAX_REQUESTS
    mamba_ratio: float = MAMBA_RATIO
    page_size: int = 1
    radix: RadixStates = RadixStates.EXTRA_BUFFER
    copies: bool = False
    fp8_head: bool = False
    wider: int = 0
    max_tokens: int | None = None
    n_states: int | None = None

    def widest(self, worker: Worker) -> int:
        """Return the largest number of tokens that a step verifies per request."""
        return max(self.block_size, self.wider) if worker is Worker.PLUGIN else self.block_size


class States(NamedTuple):
    """Sizes of the recurrent pools."""

    n_slots: int  # state slots, without the one for padding
    n_requests: int  # number of requests for which there are enough state slots
    persistent_bytes: float  # memory of all state slots, padding included
    block_bytes: float  # memory that verifies write: records, or with SGLang's worker a state per token


@dataclass(frozen=True)
class Capacity:
    """Capacity of one card, per rank.

    Attributes:
        slack_bytes: bytes left for graphs, activations and everything that SGLang does not count.
        request_block_bytes: bytes for one request's block in addition to its states.
        limits: number of requests at once that each bound allows.
    """

    worker: Worker
    target_weights: float
    draft_weights: float
    head_copy: float
    image_bytes: int
    slack_bytes: float
    n_states: int
    state_bytes: float
    request_block_bytes: int
    block_bytes: float
    ring_bytes: float
    text_bytes: float
    n_tokens: int
    target_bytes_per_token: int
    draft_bytes_per_token: int
    limits: Mapping[Bound, int]

    @property
    def requests(self) -> int:
        return min(self.limits.values())

    @property
    def bound(self) -> Bound:
        return min(self.limits, key=lambda bound: self.limits[bound])


def capacity(target: TargetSizes, draft: DraftSizes, serving: Serving, card_gib: float, worker: Worker) -> Capacity:
    """Divide the memory of one card.

    Args:
        card_gib: GiB that are free before the model loads.
    Raises:
        ValueError: a model's heads cannot be split over the ranks, or the window is shorter than a block.
    """
    _check(target, draft, serving)
    tp_size, card = serving.tp_size, card_gib * GIB
    copied = draft.copied_bytes(target, fp8=serving.fp8_head) if worker is Worker.PLUGIN else 0
    weights = target.weight_bytes / tp_size, draft.split_bytes / tp_size + draft.whole_bytes, copied / tp_size
    image_bytes = IMAGE_CACHE_BYTES if target.image_width else 0
    rest = card * serving.mem_fraction - sum(weights) - image_bytes
    states = _states(target.recurrent, serving, rest, worker)
    n_requests = min(serving.max_requests, states.n_requests)
    per_token = target.attention.bytes_per_token(tp_size)
    draft_per_token = draft.attention.bytes_per_token(tp_size)
    ring_bytes, window = 0, kept_window(serving.window, draft.window)
    if window is not None and worker is Worker.PLUGIN:
        # There is one more ring buffer, for padding, as in SGLang's pools.
        ring_bytes = (n_requests + 1) * ring_slots(window, serving.widest(worker), serving.page_size) * draft_per_token
        draft_per_token = 0
    texts = _text_bytes(target, serving, worker)
    left = rest - states.persistent_bytes - states.block_bytes - ring_bytes - texts
    n_tokens = _kv_tokens(left, per_token + draft_per_token, serving)
    limits = {
        # A step reserves KV slots for its own block and for the block of the step in flight.
        Bound.TOKENS: n_tokens // round_up(serving.context + 2 * serving.widest(worker), serving.page_size),
        Bound.FLAG: serving.max_requests,
    }
    if target.recurrent:
        limits = {Bound.STATE: states.n_requests} | limits
    if rest <= 0:
        limits = {Bound.WEIGHTS: 0}
    return Capacity(
        worker,
        *weights,
        image_bytes=image_bytes,
        slack_bytes=card * (1 - serving.mem_fraction),
        n_states=states.n_slots,
        state_bytes=states.persistent_bytes,
        request_block_bytes=_request_block_bytes(target.recurrent, serving, worker),
        block_bytes=states.block_bytes,
        ring_bytes=ring_bytes,
        text_bytes=texts,
        n_tokens=n_tokens,
        target_bytes_per_token=per_token,
        draft_bytes_per_token=draft_per_token,
        limits=limits,
    )


def heads(target: TargetSizes, draft: DraftSizes) -> dict[str, int]:
    """Return the numbers of heads that tensor parallelism must split evenly, by the name of the model or layers."""
    counts = {target.name: target.n_heads, draft.name: draft.n_heads}
    if target.recurrent:
        counts[f"{target.name}'s recurrent layers"] = target.recurrent.n_key_heads
    return counts


def _check(target: TargetSizes, draft: DraftSizes, serving: Serving) -> None:
    counts = heads(target, draft)
    for name, n_heads in counts.items():
        if n_heads % serving.tp_size:
            raise ValueError(
                f"{name}: {n_heads} heads cannot be split over --tp-size {serving.tp_size}; give a divisor of "
                f"{gcd(*counts.values())}"
            )
    if serving.window is not None and serving.window < serving.block_size:
        raise ValueError(
            f"--window {serving.window} is smaller than the block of {serving.block_size}; "
            f"give at least {serving.block_size}"
        )


def _kv_tokens(n_bytes: float, per_token: int, serving: Serving) -> int:
    """Return the number of tokens of K and V in whole pages."""
    n_tokens = max(0, int(n_bytes)) // per_token
    if serving.max_tokens is not None:
        n_tokens = min(n_tokens, serving.max_tokens)
    return n_tokens // serving.page_size * serving.page_size


def _text_bytes(target: TargetSizes, serving: Serving, worker: Worker) -> int:
    kept = serving.copies and worker is Worker.PLUGIN
    return text_bytes(serving.max_requests, target.context_length) if kept else 0


def _request_block_bytes(recurrent: RecurrentSizes | None, serving: Serving, worker: Worker) -> int:
    if recurrent is None:
        return 0
    rank = recurrent.shard(serving.tp_size)
    n_tokens = serving.widest(worker)
    return rank.record_bytes(n_tokens) if worker is Worker.PLUGIN else rank.snapshot_bytes(n_tokens)


def _states(recurrent: RecurrentSizes | None, serving: Serving, rest: float, worker: Worker) -> States:
    """Size the recurrent pools as SGLang's `KVCacheConfigurator._handle_max_mamba_cache` does."""
    if recurrent is None:
        return States(0, serving.max_requests, 0, 0)
    state = recurrent.shard(serving.tp_size).state_bytes
    block = _request_block_bytes(recurrent, serving, worker) / state  # a block's memory, as a multiple of a state's
    n_slots = serving.max_requests if serving.n_states is None else serving.n_states
    if serving.n_states is None and serving.radix is not RadixStates.OFF:
        budget = rest * serving.mamba_ratio / (1 + serving.mamba_ratio)
        # One slot of each pool is for padding.
        n_slots = max(0, int((budget - state * (1 + block)) // (state * (1 + block / serving.radix))))
    n_requests = n_slots // serving.radix
    n_rows = min(serving.max_requests, n_requests) + 1
    return States(n_slots, n_requests, (n_slots + 1) * state, n_rows * block * state)
