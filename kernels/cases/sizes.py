"""Case (one op at one shape), the sizes of cases, and comparisons of an op's result with that of its definition.

There are two sets of sizes: those of Qwen3.5-27B, and small ones.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import NamedTuple

import torch
from sglang_dflash_kernels.record import record_width

ROUNDING = 1e-5  # allowed error of fp32 sums in another order, relative to the largest value


class Recurrent(NamedTuple):
    """Sizes of a target's recurrent layers: L layers, H value heads, G key heads, V value width, K key width."""

    L: int
    H: int
    G: int
    V: int
    K: int

    @property
    def state_bytes(self) -> int:
        """Return the number of bytes of one request's fp32 state in one layer."""
        return 4 * self.H * self.V * self.K

    @property
    def record_bytes(self) -> int:
        """Return the number of bytes of one token's record in one layer."""
        return 4 * record_width(self.H, self.V, self.G, self.K)


class Second(NamedTuple):
    """Sizes of DFlash 2. Convolution: S taps, H channels, J groups. Selector: K candidates, rank R of the tables."""

    S: int
    H: int
    J: int
    K: int
    R: int


@dataclass(frozen=True)
class Sizes:
    """Sizes of the cases.

    Attributes:
        recurrent: sizes of the target's recurrent layers.
        second: sizes of DFlash 2.
        n_layers, n_heads, head_dim: number of draft layers, number of KV heads per layer, and width of a head.
        n_slots: number of KV slots.
        n_positions: largest number of positions of a request.
        n_vocab: number of tokens in the vocabulary.
        batches: numbers of requests in a step.
        blocks: numbers of tokens per block.
        prefills: numbers of prompt tokens in a prefill.
        dtype: dtype of weights and activations.
    """

    recurrent: Recurrent
    second: Second
    n_layers: int
    n_heads: int
    head_dim: int
    n_slots: int
    n_positions: int
    n_vocab: int
    batches: tuple[int, ...]
    blocks: tuple[int, ...]
    prefills: tuple[int, ...]
    dtype: torch.dtype


# Sizes of Qwen3.5-27B and its draft. DFlash 2 has the sizes of z-lab/Qwen3.8-27B-DFlash2.
QWEN_27B = Sizes(
    Recurrent(L=48, H=48, G=16, V=128, K=128),
    Second(S=2, H=5120, J=320, K=16, R=256),
    n_layers=5,
    n_heads=8,
    head_dim=128,
    n_slots=32768,
    n_positions=40960,
    n_vocab=248320,
    batches=(1, 8, 32, 64),
    blocks=(8, 16),
    prefills=(2048, 8192),
    dtype=torch.bfloat16,
)
SMALL = Sizes(  # for Triton's interpreter
    Recurrent(L=2, H=4, G=2, V=16, K=16),
    Second(S=2, H=96, J=6, K=5, R=12),
    n_layers=2,
    n_heads=2,
    head_dim=16,
    n_slots=256,
    n_positions=128,
    n_vocab=2000,
    batches=(1, 3),
    blocks=(5, 16),
    prefills=(40,),
    dtype=torch.float32,
)


class Case(NamedTuple):
    """One op at one shape."""

    op: str
    shape: str
    n_bytes: int  # least number of bytes to move: every input is read once, and every output written once
    launch: Callable[[], object]
    check: Callable[[], None]  # raises AssertionError if the op's result differs from the definition's


def assert_equal(got: tuple[torch.Tensor, ...], want: tuple[torch.Tensor, ...]) -> None:
    for i, (got_field, want_field) in enumerate(zip(got, want, strict=True)):
        assert torch.equal(got_field, want_field), f"result {i} differs from the definition's"


def assert_close(got: torch.Tensor, want: torch.Tensor, *, within: float) -> None:
    error = (got - want).abs().max().item() / want.abs().max().item()
    assert error <= within, f"off from the definition by {error:.1e} of the largest value, above {within:.1e}"
