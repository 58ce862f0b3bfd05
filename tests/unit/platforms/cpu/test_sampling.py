"""Sampled verification of a draft chain must equal a test of one draft after another.

The emitted tokens must have the target's distribution.
"""

from typing import NamedTuple

import pytest
import torch

from sglang_dflash.platforms.cpu.sampling import tree_speculative_sampling_target_only


class Verified(NamedTuple):
    n_accepted: list[int]
    tokens: list[list[int]]  # per request: the accepted drafts, then the token sampled after them


def verify(candidates: torch.Tensor, probs: torch.Tensor, coins: torch.Tensor, last_coins: torch.Tensor, **rule):
    B, N = candidates.shape
    index = torch.arange(B * N).view(B, N)
    children = torch.cat([torch.arange(1, N), torch.tensor([-1])]).expand(B, N)
    predicts = torch.full((B * N,), -7, dtype=torch.int32)
    accept_index = torch.full((B, N), -7, dtype=torch.int32)
    n_accepted = torch.full((B,), -7, dtype=torch.int32)
    chain = {"retrive_next_token": children, "retrive_next_sibling": torch.full((B, N), -1)}
    tree_speculative_sampling_target_only(
        predicts=predicts,
        accept_index=accept_index,
        accept_token_num=n_accepted,
        candidates=candidates,
        retrive_index=index,
        uniform_samples=coins,
        uniform_samples_for_final_sampling=last_coins,
        target_probs=probs,
        **({"draft_probs": torch.zeros_like(probs)} | chain | rule),
    )
    tokens = []
    for b, n in enumerate(n_accepted.tolist()):
        assert accept_index[b].tolist() == [*range(b * N, b * N + n + 1), *[-7] * (N - n - 1)]
        tokens.append(predicts[accept_index[b, : n + 1]].tolist())
    return Verified(n_accepted.tolist(), tokens)


def test_hand_worked():
    probs = torch.tensor([[0.1, 0.6, 0.3], [0.5, 0.2, 0.3], [0.2, 0.2, 0.6]]).expand(4, 3, 3).contiguous()
    candidates = torch.tensor([[0, 1, 0]]).expand(4, 3).contiguous()  # anchor, then drafts of probability .6 and .5
    coins = torch.tensor([[0.5, 0.4, 0], [0.5, 0.6, 0], [0.7, 0, 0], [0.7, 0, 0]])
    got = verify(candidates, probs, coins, torch.tensor([0.3, 0.39, 0.2, 0.5]))
    # The last token is the first whose cumulative weight (weights in brackets) exceeds the last coin times their sum:
    #   request 0 keeps both drafts, .3 in [.2 .2 .6] gives 1
    #   request 1 keeps one draft, .39 * .5 in [0 .2 .3] gives 1
    #   requests 2 and 3 keep none, .2 * .4 and .5 * .4 in [.1 0 .3] give 0 and 2
    assert got == Verified([2, 1, 0, 0], [[1, 0, 1], [1, 1], [0], [2]])


def sequential(candidates, probs, coins, last_coin, threshold_single, threshold_acc) -> list[int]:
    tokens = []
    for slot in range(len(candidates) - 1):
        draft = candidates[slot + 1]
        p = float(probs[slot, draft])
        if not (coins[slot] <= p / threshold_acc or p >= threshold_single):
            rest = probs[slot].clone()
            rest[draft] = 0
            break
        tokens.append(draft)
    else:
        rest = probs[len(candidates) - 1]
    target, total = last_coin * float(rest.double().sum()), 0.0
    for token, p in enumerate(rest.double().tolist()):
        total += p
        if total > target:
            return [*tokens, token]
    return [*tokens, len(rest) - 1]


@pytest.mark.parametrize("thresholds", [(1.0, 1.0), (0.4, 0.7)])
def test_verification_equals_the_sequential_rule(thresholds: tuple[float, float]):
    torch.manual_seed(0)
    B, N, V = 64, 5, 6
    probs = torch.softmax(2 * torch.randn(B, N, V), dim=-1)
    candidates, coins, last = torch.randint(0, V, (B, N)), torch.rand(B, N) ** 2, torch.rand(B)
    got = verify(candidates, probs, coins, last, threshold_single=thresholds[0], threshold_acc=thresholds[1])
    want = [sequential(candidates[b].tolist(), probs[b], coins[b], float(last[b]), *thresholds) for b in range(B)]
    assert got.tokens == want
    assert {0, 1, 2} <= set(got.n_accepted)


def test_emitted_tokens_follow_the_target():
    """The first token has distribution p1, and after a kept draft the second has p2, within 5 standard errors."""
    torch.manual_seed(0)
    runs, V = 100_000, 4
    probs_NV = torch.softmax(torch.randn(3, V), dim=-1)
    got = verify(
        torch.tensor([[0, 2, 1]]).expand(runs, 3).contiguous(),
        probs_NV.expand(runs, 3, V).contiguous(),
        torch.rand(runs, 3),
        torch.rand(runs),
    )
    second = [tokens[1] for tokens in got.tokens if len(tokens) > 1]
    for p_V, drawn in ((probs_NV[0], [tokens[0] for tokens in got.tokens]), (probs_NV[1], second)):
        n = len(drawn)
        error_V = (torch.bincount(torch.tensor(drawn), minlength=V) / n - p_V) / (p_V * (1 - p_V) / n).sqrt()
        assert error_V.abs().max() < 5


def test_a_rejected_drafts_distribution_is_subtracted():
    probs = torch.tensor([[[0.5, 0.3, 0.2], [0.5, 0.3, 0.2]]])
    draft_probs = torch.tensor([[[0.0, 0.3, 0.1], [0.5, 0.3, 0.0]]])
    rejected = verify(torch.tensor([[0, 0]]), probs, torch.ones(1, 2), torch.tensor([0.0]), draft_probs=draft_probs)
    assert rejected == Verified([0], [[2]])  # weights: 0 for the rejected draft 0, .3 - .3 for 1, .2 - .1 for 2
    kept = verify(torch.tensor([[0, 0]]), probs, torch.zeros(1, 2), torch.tensor([0.0]), draft_probs=draft_probs)
    assert kept == Verified([1], [[0, 0]])


@pytest.mark.parametrize("argument", ["retrive_next_token", "retrive_next_sibling"])
def test_a_tree_is_refused(argument: str):
    with pytest.raises(NotImplementedError, match="tree"):
        verify(
            torch.tensor([[0, 1]]), torch.full((1, 2, 2), 0.5), torch.ones(1, 2), torch.ones(1),
            **{argument: torch.tensor([[1, 1]])},
        )  # fmt: skip
