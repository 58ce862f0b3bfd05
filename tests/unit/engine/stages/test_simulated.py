"""Simulated acceptance: the committed tokens, and the mean number of them per step."""

import pytest
import torch
from sglang_dflash_kernels.accept import accept_ref

from sglang_dflash.engine.stages.simulated import FIXED_TOKEN, SimulatedAccept
from sglang_dflash.flags import Simulated

TOKENS_BN = torch.tensor([[7, 1, 2, 3], [8, 4, 5, 6]])
TARGET_BN = torch.tensor([[11, 12, 13, 14], [21, 22, 23, 24]])
PREFIX_LEN_B = torch.tensor([30, 40])


def simulated(length: float, *, method: str = "match-expected", tokens: str = "real-draft-token") -> SimulatedAccept:
    return SimulatedAccept(Simulated(length, method, tokens))


@pytest.mark.parametrize(
    ("length", "committed"),
    [
        (1, [[11, 0, 0, 0], [21, 0, 0, 0]]),
        (3, [[1, 2, 13, 0], [4, 5, 23, 0]]),
        (4, [[1, 2, 3, 14], [4, 5, 6, 24]]),
        (9, [[1, 2, 3, 14], [4, 5, 6, 24]]),
    ],
)
def test_drafts_are_committed_then_a_token_of_the_target(length: float, committed: list[list[int]]) -> None:
    """A step commits what `accept` commits if the target's tokens agree with exactly these drafts."""
    accepted = simulated(length)(TOKENS_BN, TARGET_BN, PREFIX_LEN_B, 3)
    assert accepted.committed_BN.tolist() == committed
    n = min(int(length), 4)
    agreeing_BN = torch.cat([TOKENS_BN[:, 1:n], TARGET_BN[:, n - 1 :]], dim=1)
    expected = accept_ref(TOKENS_BN, agreeing_BN, PREFIX_LEN_B, 3)
    for found, wanted in zip(accepted, expected, strict=True):
        assert torch.equal(found, wanted)
        assert found.dtype == wanted.dtype
        assert found.is_contiguous()


def test_the_fixed_token_replaces_all_committed_ones() -> None:
    accepted = simulated(2, tokens="fixed")(TOKENS_BN, TARGET_BN, PREFIX_LEN_B)
    assert accepted.committed_BN.tolist() == [[FIXED_TOKEN, FIXED_TOKEN, 0, 0]] * 2
    assert accepted.anchor_B.tolist() == [FIXED_TOKEN] * 2
    assert accepted.next_prefix_len_B.tolist() == [32, 42]


@pytest.mark.parametrize(("length", "width", "mean"), [(5.5, 16, 5.5), (5.5, 5, 5.0), (0.4, 16, 1.0), (2.3, 8, 2.3)])
def test_the_mean_is_the_asked_length_within_the_width(length: float, width: int, mean: float) -> None:
    accept = simulated(length)
    lengths = [accept.next_length(width) for _ in range(1000)]
    assert set(lengths) <= {int(mean), int(mean) + 1}
    assert sum(lengths) / 1000 == pytest.approx(mean, abs=0.0011)


def test_normally_distributed_lengths_stay_within_the_block() -> None:
    one, other = simulated(2.5, method="multinomial"), simulated(2.5, method="multinomial")
    lengths = [one.next_length(4) for _ in range(1000)]
    assert lengths == [other.next_length(4) for _ in range(1000)], "ranks would commit different numbers"
    assert set(lengths) == {1, 2, 3, 4}
    assert sum(lengths) / 1000 == pytest.approx(2.5, abs=0.1)
