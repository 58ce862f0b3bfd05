"""Training objective: labels, weights and losses. Training inputs must equal those of inference."""

import math

import pytest
import torch

from sglang_dflash.reference.torch import DraftModel
from sglang_dflash.reference.torch.generate import draft_logits
from sglang_dflash.reference.torch.target import TargetReader
from sglang_dflash.train import objective
from sglang_dflash.train.draft import Second, draft_config_for
from sglang_dflash.train.features import read_rows
from sglang_dflash.train.objective import (
    Blocks,
    Head,
    Slots,
    block_hidden,
    block_loss,
    candidate_scores,
    head_of,
    make_blocks,
    random_anchors,
    slots_loss,
    valid_slots,
)
from sglang_dflash.train.start import initialised
from sglang_dflash.train.tokens import Rows
from tests.unit.reference.torch.test_generate import VOCAB, hybrid, qwen3

MASK = VOCAB - 1
SECOND = Second(conv_kernel_size=2, conv_group_size=8, selector_rank=6, selector_top_k=3)


def make_pair(make_target, second=None):
    torch.manual_seed(0)
    target = make_target().eval().requires_grad_(False)
    sizes = {"n_layers": 2, "block_size": 5, "mask_token_id": MASK, "target_layer_ids": (0, 1, 2)}
    config = draft_config_for(target, **sizes, second=second)
    draft = initialised(DraftModel(config), std=0.3)
    for name, parameter in draft.named_parameters():
        if "_conv." in name or "codebook" in name:  # `initialised` gives these no effect
            torch.nn.init.normal_(parameter, std=0.3)
    return draft, target


def rows(text: str, responses: str) -> Rows:
    """Return one row. Letters are tokens (a = 0). A dot marks a prompt token, a bar a response token."""
    ids, is_response = [[ord(c) - ord("a") for c in text]], [[c == "|" for c in responses]]
    return Rows(torch.tensor(ids), torch.tensor(is_response), torch.tensor([-1]))


def tokens(text: str) -> list[int]:
    return [MASK if c == "#" else ord(c) - ord("a") for c in text]


@pytest.mark.parametrize("second", [None, SECOND], ids=["dflash", "dflash2"])
@pytest.mark.parametrize("make_target", [qwen3, hybrid])
def test_training_inputs_equal_inference_inputs(make_target, second):
    """Training drafts many blocks in one pass over whole rows.

    Each block's logits equal those of a separate drafting step that has read only the tokens before its anchor.
    """
    draft, target = make_pair(make_target, second)
    draft, target = draft.double(), target.double()
    batch = Rows(torch.randint(0, MASK, (2, 24)), torch.ones(2, 24, dtype=torch.bool), torch.tensor([-1, -1]))
    choices_RL, features_RLC = read_rows(target, batch, draft.config.target_layer_ids)
    anchor_RA = random_anchors(batch.is_response_RL, 6, torch.Generator().manual_seed(0))
    blocks = make_blocks(batch, choices_RL, anchor_RA, block_size=5, mask_token_id=MASK)
    trained = draft_logits(block_hidden(draft, target, features_RLC, blocks), target)
    for r, a in torch.cartesian_prod(torch.arange(2), torch.arange(6)).tolist():
        anchor = int(anchor_RA[r, a])
        if anchor == 0:
            continue
        reader = TargetReader(target, draft.config.target_layer_ids)
        features = reader.read(batch.ids_RL[r : r + 1, :anchor]).features_1SC
        block = torch.tensor([batch.ids_RL[r, anchor], MASK, MASK, MASK, MASK])
        embeddings = target.get_input_embeddings()(block)[None, None]
        hidden = draft(embeddings, draft.context_kv(features), torch.tensor([[anchor]]))
        torch.testing.assert_close(trained[r, a], draft_logits(hidden[0, 0, 1:], target), atol=1e-6, rtol=0)


def test_labels_by_hand():
    """The target's choices are the tokens of the text `abcdefg`, except after `d`: there it chooses `x`, not `e`."""
    batch = rows("abcdefg", "..|||||")
    choices = torch.tensor([tokens("bcdxfgz")])
    blocks = make_blocks(batch, choices, torch.tensor([[2, 4, 6, 1]]), block_size=4, mask_token_id=MASK)
    assert blocks.tokens_RAN[0].tolist() == [tokens(t) for t in ("c###", "e###", "g###", "b###")]
    assert blocks.labels_RAD[0, :2].tolist() == [tokens("dxf"), tokens("fgg")]
    assert blocks.is_valid_RAD[0].tolist() == [
        [True, True, False],  # the label `x` is the target's choice after `abcd`; later labels follow `e`, not `x`
        [True, True, False],  # the text ends after `g`
        [False, False, False],  # no token follows `g`
        [False, False, False],  # the anchor is not a response
    ]
    batch, choices = rows("abcdef", "|||.||"), torch.tensor([tokens("bcdefg")])
    blocks = make_blocks(batch, choices, torch.tensor([[0]]), block_size=6, mask_token_id=MASK)
    assert blocks.is_valid_RAD[0, 0].tolist() == [True, True, False, False, False], "it ends with the response"


def test_anchors_are_distinct_response_tokens_with_a_successor():
    batch = rows("abcdefghij", "..|||..|||")
    for seed in range(20):
        anchors = random_anchors(batch.is_response_RL, 4, torch.Generator().manual_seed(seed))[0].tolist()
        assert sorted(anchors) == [2, 3, 7, 8]
    responses = torch.ones(2, 50, dtype=torch.bool)
    first, again, other = (random_anchors(responses, 8, torch.Generator().manual_seed(seed)) for seed in (1, 1, 2))
    assert torch.equal(first, again)
    assert not torch.equal(first, other), "they depend on the seed alone"


def one_block(n_valid: int) -> Blocks:
    return Blocks(
        anchor_RA=torch.tensor([[0]]),
        tokens_RAN=torch.zeros(1, 1, 4, dtype=torch.long),
        labels_RAD=torch.tensor([[[1, 2, 3]]]),
        is_valid_RAD=torch.tensor([[[i < n_valid for i in range(3)]]]),
    )


def test_loss_by_hand():
    """The labels have probability 1/2, 1/4 and 1/8. The loss sums their log losses, weighted by 1, e^-1/2 and e^-1."""
    logits = torch.full((3, 4), -1e9)
    for slot, (label, p) in enumerate(((1, 1 / 2), (2, 1 / 4), (3, 1 / 8))):
        logits[slot, label], logits[slot, 0] = math.log(p), math.log(1 - p)
    weights = [1.0, math.exp(-0.5), math.exp(-1.0)]
    for n_valid in (3, 1):
        slots = valid_slots(torch.zeros(1, 1, 3, 2), one_block(n_valid), gamma=2.0)
        want = sum(w * k for w, k in zip(weights[:n_valid], (1, 2, 3), strict=False)) * math.log(2)
        assert slots.weights.tolist() == pytest.approx(weights[:n_valid], rel=1e-6)
        head = Head(logits[:n_valid].T, None, None)  # hidden states are unit vectors, which select rows of `logits`
        assert slots_loss(None, head, slots._replace(hidden=torch.eye(n_valid))).item() == pytest.approx(want, rel=1e-6)


@pytest.mark.parametrize("second", [None, SECOND], ids=["dflash", "dflash2"])
@pytest.mark.parametrize("scored", [None, torch.tensor([3, 20, 3, 0])], ids=["all-tokens", "some-tokens"])
def test_the_loss_in_parts_equals_the_loss_of_all_logits(monkeypatch, second, scored):
    """`block_loss` computes the logits of some slots at a time.

    Loss and gradients equal those from all logits in one tensor, up to fp32 rounding. A selector adds its own loss.
    """
    draft, target = make_pair(qwen3, second)
    draft, target = draft.double(), target.double()
    batch = rows("abcdefghijkl", "..||||||||||")
    _, features_RLC = read_rows(target, batch, draft.config.target_layer_ids)
    blocks = make_blocks(batch, batch.ids_RL.roll(-1, 1), torch.tensor([[2, 5, 8]]), block_size=5, mask_token_id=MASK)
    slots = valid_slots(block_hidden(draft, target, features_RLC, blocks), blocks, 2.0)
    logits = draft_logits(slots.hidden, target)
    if scored is not None:
        others = torch.ones(VOCAB, dtype=torch.bool).index_fill(0, torch.cat([scored, slots.labels]), value=False)
        logits = logits.masked_fill(others, -torch.inf)
    losses = torch.nn.functional.cross_entropy(logits.float(), slots.labels, reduction="none")
    if second:
        scores = candidate_scores(draft.candidate_selector, head_of(target), logits, slots)
        losses = losses + torch.nn.functional.cross_entropy(*scores, reduction="none")
    want = (losses * slots.weights).sum()
    (want * 3).backward()
    gradients = {name: p.grad.clone() for name, p in draft.named_parameters()}
    for n in (3, 128):
        monkeypatch.setattr(objective, "slots_at_once", lambda head, n=n: n)
        draft.zero_grad()
        loss, weight = block_loss(draft, target, features_RLC, blocks, 2.0, tokens=scored)
        (loss * 3).backward()
        with torch.no_grad():
            without_gradient, _ = block_loss(draft, target, features_RLC, blocks, 2.0, tokens=scored)
        assert [loss.item(), without_gradient.item()] == pytest.approx([want.item()] * 2, rel=1e-6)
        assert weight.item() == pytest.approx(slots.weights.sum().item())
        for name, parameter in draft.named_parameters():
            torch.testing.assert_close(parameter.grad, gradients[name], rtol=1e-4, atol=1e-6)


def test_a_gpu_scores_more_slots_at_once():
    """The memory of the logits is bounded for every vocabulary."""

    def n_slots(device: str, vocabulary: int) -> int:
        return objective.slots_at_once(Head(torch.empty(vocabulary, 1, device=device), None, None))

    assert [n_slots(device, 49_152) for device in ("cpu", "meta")] == [128, 8192]
    assert [n_slots("meta", vocabulary) for vocabulary in (49_152 * 4, 10**10)] == [2048, 1]


def test_the_selector_learns_from_the_right_previous_token():
    """The labels are the best candidate, the third best, and a token that is none. It replaces the third best."""
    draft, _ = make_pair(qwen3, SECOND)
    selector = draft.candidate_selector
    logits, hidden = torch.zeros(3, VOCAB), torch.randn(3, 32)
    for slot in logits:
        slot[5], slot[6], slot[7] = 3.0, 2.0, 1.0
    before, labels = torch.tensor([1, 2, 3]), torch.tensor([5, 7, 9])
    head = Head(torch.empty(VOCAB, 32), None, None)
    scores, right = candidate_scores(
        selector, head, logits, Slots(hidden, before, labels, torch.ones(3), torch.zeros(3, dtype=torch.bool))
    )
    assert right.tolist() == [0, 2, 2]
    for i, tokens in enumerate([[5, 6, 7], [5, 6, 7], [5, 6, 9]]):
        want = logits[i, tokens] + selector.edges(before[i], hidden[i], torch.tensor(tokens))
        torch.testing.assert_close(scores[i], want)


def learned(batch: Rows, anchor: int, second: Second | None) -> tuple[DraftModel, torch.Tensor, torch.Tensor]:
    """Return a draft with the gradients of one block's loss, the loss, and the sum of the slots' weights."""
    draft, target = make_pair(qwen3, second)
    choices_RL, features_RLC = read_rows(target, batch, draft.config.target_layer_ids)
    blocks = make_blocks(batch, choices_RL, torch.tensor([[anchor]]), block_size=5, mask_token_id=MASK)
    loss, weight = block_loss(draft, target, features_RLC, blocks, 2.0)
    loss.backward()
    return draft, loss, weight


def test_every_part_of_a_dflash_2_draft_learns():
    draft, *_ = learned(rows("abcdefgh", "||||||||"), 1, SECOND)
    assert [name for name, p in draft.named_parameters() if p.grad is None or not p.grad.any()] == []


def test_a_batch_with_nothing_to_learn_has_no_loss_and_no_gradient():
    draft, loss, weight = learned(rows("aaaaaaaa", "........"), 2, None)
    assert (loss.item(), weight.item()) == (0, 0)
    assert all(p.grad is None or not p.grad.any() for p in draft.parameters())


def test_default_gamma_is_the_papers():
    assert [objective.default_gamma(n) for n in (8, 10, 16)] == [4.0, 5.0, 7.0]
