"""Training objective of DFlash (arXiv 2602.06036): predict the tokens after random anchors, a block at a time.

A block is the anchor and mask tokens. A slot's label is the target's argmax after the text before this slot. One
forward pass over the text gives all labels. Labels are valid up to and including the first label that differs from the
text: later labels depend on the text's token, which the target would not have chosen. Slots are weighted by
exp(-(slot - 1) / gamma), because a wrong draft also rejects all later drafts.

A DFlash 2 draft has a second loss: the cross entropy of the selector's choice among a slot's candidates, given the
previous slot's label. A label that is not a candidate replaces the worst candidate, so that every slot contributes.
A Domino draft also has a second loss: the cross entropy of the logits with their corrections, given all labels before.
If the draft has a reduced vocabulary, slots have no loss when their label is outside that vocabulary.

Shapes: R rows of L tokens, A anchors per row, N slots per block, D = N - 1 drafts, K candidates.
"""

from typing import Any, NamedTuple, cast

import torch
import torch.nn.functional as F
from torch import nn
from transformers import PreTrainedModel

from sglang_dflash.reference.torch import DraftModel
from sglang_dflash.reference.torch.domino import Domino
from sglang_dflash.reference.torch.second import CandidateSelector
from sglang_dflash.train.tokens import Rows

# fp32 logits that exist at once. A CPU computes fastest if they fit its cache: 25 MB, for 128 slots and a vocabulary of
# 49,152 tokens. A GPU needs large products, and each part costs dozens of launches: 1.6 GB, for 8,192 slots.
LOGITS_ON_CPU = 128 * 49_152
LOGITS_ON_GPU = 8192 * 49_152


class Blocks(NamedTuple):
    """Blocks to predict, each from the context before its anchor."""

    anchor_RA: torch.Tensor  # int64, position of the anchor, equal to the number of context tokens
    tokens_RAN: torch.Tensor  # int64, anchor, mask, mask, ...
    labels_RAD: torch.Tensor  # int64, the target's argmax for slots 1..D
    # bool: the text from the anchor to this slot is a response, and all labels before this slot equal the text.
    is_valid_RAD: torch.Tensor

    @property
    def before_RAD(self) -> torch.Tensor:
        """Return for each of slots 1..D the label of the slot before it, int64; for slot 1 the anchor."""
        return torch.cat([self.tokens_RAN[..., :1], self.labels_RAD[..., :-1]], dim=-1)


def default_gamma(block_size: int) -> float:
    """Return the paper's gamma for blocks of 8, 10 and 16 tokens; for other sizes 0.45 times the size, at least 1."""
    return {8: 4.0, 10: 5.0, 16: 7.0}.get(block_size, max(1.0, 0.45 * block_size))


def random_anchors(is_response_RL: torch.Tensor, n_anchors: int, generator: torch.Generator) -> torch.Tensor:
    """Draw up to `n_anchors` different positions per row, int64 [R, A]: response tokens followed by a response token.

    If a row has fewer such positions, others are added. `make_blocks` marks their labels as invalid.
    """
    follows_RL = is_response_RL & torch.cat([is_response_RL[:, 1:], torch.zeros_like(is_response_RL[:, :1])], dim=1)
    score_RL = torch.rand(is_response_RL.shape, generator=generator).to(is_response_RL.device)
    n_anchors = min(n_anchors, is_response_RL.shape[1])
    return (score_RL + follows_RL).topk(n_anchors, dim=1).indices


def make_blocks(
    rows: Rows,
    choices_RL: torch.Tensor,
    anchor_RA: torch.Tensor,
    *,
    block_size: int,
    mask_token_id: int,
    n_drafts: int | None = None,
) -> Blocks:
    """Return the blocks at the anchors.

    Args:
        choices_RL: int64, the target's argmax after each token of the rows.
        block_size: slots of a block.
        n_drafts: drafts of a block; None: one per slot after the anchor's.
    """
    L, D = rows.ids_RL.shape[1], block_size - 1 if n_drafts is None else n_drafts
    tokens_RAN = torch.full((*anchor_RA.shape, block_size), mask_token_id, device=anchor_RA.device)
    tokens_RAN[..., 0] = rows.ids_RL.gather(1, anchor_RA)

    position_RAD = anchor_RA[..., None] + torch.arange(1, D + 1, device=anchor_RA.device)
    inside_RAD = position_RAD < L
    flat_RX = position_RAD.clamp(max=L - 1).flatten(1)
    labels_RAD = choices_RL.gather(1, flat_RX - 1).view_as(position_RAD)
    text_RAD = rows.ids_RL.gather(1, flat_RX).view_as(position_RAD)
    response_RAD = inside_RAD & rows.is_response_RL.gather(1, flat_RX).view_as(position_RAD)

    anchored_RA1 = rows.is_response_RL.gather(1, anchor_RA)[..., None]
    agreed_before_RAD = F.pad((labels_RAD == text_RAD)[..., :-1], (1, 0), value=True)
    is_valid_RAD = (anchored_RA1 & response_RAD & agreed_before_RAD).long().cumprod(-1).bool()
    return Blocks(anchor_RA, tokens_RAN, labels_RAD, is_valid_RAD)


class Slots(NamedTuple):
    """Slots with a valid label, from all blocks: one tensor row per slot."""

    hidden: torch.Tensor  # [valid, H], the draft's hidden states; with Domino [valid, H + G], also the GRU's states
    before: torch.Tensor  # int64 [valid], label of the previous slot; for slot 1 the anchor
    labels: torch.Tensor  # int64 [valid]
    weights: torch.Tensor  # fp32 [valid]
    is_first: torch.Tensor  # bool [valid], the draft is the first of its block

    def part(self, span: slice) -> "Slots":
        return Slots(*(tensor[span] for tensor in self))


def block_hidden(
    draft: DraftModel, target: PreTrainedModel, features_RLC: torch.Tensor, blocks: Blocks
) -> torch.Tensor:
    """Return the draft's hidden states that predict drafts, [R, A, D, H]."""
    context = draft.context_kv(features_RLC.to(draft.dtype))
    embeddings_RANH = draft.embeddings(blocks.tokens_RAN, target.get_input_embeddings())
    return draft.predicting(draft(embeddings_RANH, context, blocks.anchor_RA))


def valid_slots(hidden_RADH: torch.Tensor, blocks: Blocks, gamma: float) -> Slots:
    """Return the slots with a valid label, weighted by their index in the block."""
    D, valid = blocks.labels_RAD.shape[-1], blocks.is_valid_RAD
    decay_D = torch.exp(-torch.arange(D, device=hidden_RADH.device) / gamma)
    weights = decay_D.expand_as(blocks.labels_RAD)[valid]
    is_first = (torch.arange(D, device=valid.device) == 0).expand_as(blocks.labels_RAD)[valid]
    return Slots(hidden_RADH[valid], blocks.before_RAD[valid], blocks.labels_RAD[valid], weights, is_first)


def with_states(draft: DraftModel, target: PreTrainedModel, hidden_RADH: torch.Tensor, blocks: Blocks) -> torch.Tensor:
    """Append a Domino draft's GRU states to hidden states: [R, A, D, H + G]. Other drafts' are returned unchanged.

    A slot's GRU state is the state after the GRU has read the anchor and the labels of the slots before.
    """
    if draft.domino is None:
        return hidden_RADH
    before_RAD = blocks.before_RAD
    states = draft.domino.states(
        before_RAD.flatten(0, 1), lambda tokens: draft.embeddings(tokens, target.get_input_embeddings())
    )
    return torch.cat([hidden_RADH, states.view(*before_RAD.shape, -1)], dim=-1)


class Head(NamedTuple):
    """Frozen output head of the target, or only its rows for some tokens."""

    weight_VH: torch.Tensor
    bias_V: torch.Tensor | None
    tokens_V: torch.Tensor | None  # int64, sorted, token ids of the head's rows; None: the whole vocabulary

    def logits(self, hidden: torch.Tensor) -> torch.Tensor:
        """Return logits [..., V] for `hidden` [..., H].

        With the whole vocabulary they equal the logits of `reference.torch.generate.draft_logits`.
        """
        return F.linear(hidden.to(self.weight_VH.dtype), self.weight_VH, self.bias_V)

    def rows(self, tokens: torch.Tensor) -> torch.Tensor:
        """Return the row indices of `tokens`, int64. Every token must have a row in this head."""
        return tokens if self.tokens_V is None else torch.searchsorted(self.tokens_V, tokens)

    def tokens(self, rows: torch.Tensor) -> torch.Tensor:
        """Return the token ids of the row indices `rows`, int64."""
        return rows if self.tokens_V is None else self.tokens_V[rows]


def head_of(target: PreTrainedModel, tokens: torch.Tensor | None = None) -> Head:
    """Return the target's head; with `tokens` (int64, possibly repeated) only the rows of these tokens."""
    head = target.get_output_embeddings()
    if tokens is None:
        return Head(head.weight, head.bias, None)
    tokens = tokens.unique()
    return Head(head.weight.index_select(0, tokens), None if head.bias is None else head.bias[tokens], tokens)


def candidate_scores(
    selector: CandidateSelector, head: Head, logits: torch.Tensor, slots: Slots
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return each slot's candidate scores, fp32 [valid, K], and the label's index among the K, int64 [valid]."""
    labels = head.rows(slots.labels)
    candidates, _ = selector.candidates(logits.detach())
    is_label = candidates == labels[:, None]
    candidates[:, -1] = torch.where(is_label.any(1), candidates[:, -1], labels)
    unary = selector.unary(logits.gather(1, candidates))
    scores = unary + selector.edges(slots.before, slots.hidden, head.tokens(candidates)).float()
    return scores, (candidates == labels[:, None]).int().argmax(1)


def correction(domino: Domino, head: Head, slots: Slots) -> torch.Tensor:
    """Return Domino's corrections of the logits of the head's rows, [valid, V]; 0 for the first draft of a block."""
    last = cast(nn.Linear, domino.embed_proj[2]).weight
    rows = last if head.tokens_V is None else last[head.tokens_V]
    return F.linear(domino.embed_proj[:2](slots.hidden), rows) * ~slots.is_first[:, None]


def slots_loss(choosing: CandidateSelector | Domino | None, head: Head, slots: Slots) -> torch.Tensor:
    """Return the weighted sum of cross entropies, an fp32 scalar: the head's, plus the selector's or Domino's."""
    own = slots._replace(hidden=slots.hidden[:, : head.weight_VH.shape[1]])
    logits, labels = head.logits(own.hidden), head.rows(slots.labels)
    loss = F.cross_entropy(logits.float(), labels, reduction="none")
    if isinstance(choosing, CandidateSelector):
        loss = loss + F.cross_entropy(*candidate_scores(choosing, head, logits, own), reduction="none")
    elif choosing is not None:
        corrected = logits + correction(choosing, head, slots)
        loss = loss + F.cross_entropy(corrected.float(), labels, reduction="none")
    return (loss * slots.weights).sum()


class _Known(torch.autograd.Function):
    """Scalar with precomputed gradients: `apply(value, gradients, *inputs)`."""

    @staticmethod
    def forward(ctx: Any, value: torch.Tensor, gradients: list[torch.Tensor], *inputs: torch.Tensor) -> torch.Tensor:
        ctx.gradients = gradients
        return value.clone()

    @staticmethod
    def backward(ctx: Any, *grad_outputs: torch.Tensor) -> tuple[Any, ...]:
        return None, None, *(gradient * grad_outputs[0] for gradient in ctx.gradients)


def slots_at_once(head: Head) -> int:
    """Return the number of slots whose logits a head computes at once."""
    n_logits = LOGITS_ON_CPU if head.weight_VH.device.type == "cpu" else LOGITS_ON_GPU
    return max(1, n_logits // len(head.weight_VH))


def block_loss(
    draft: DraftModel,
    target: PreTrainedModel,
    features_RLC: torch.Tensor,
    blocks: Blocks,
    gamma: float,
    *,
    tokens: torch.Tensor | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the weighted sum of the valid slots' losses, and the sum of the weights: fp32 scalars.

    The batch's loss is their quotient, after both are summed over all processes. Logits exist for `slots_at_once` slots
    at a time. Gradients are computed in the forward pass, so the backward pass needs no logits.

    Args:
        tokens: int64, tokens to score besides the labels; None: the whole vocabulary.
    """
    hidden_RADH = block_hidden(draft, target, features_RLC, blocks)
    slots = valid_slots(with_states(draft, target, hidden_RADH, blocks), blocks, gamma)
    if draft.config.draft_vocab_size:
        tokens = draft.token_ids()
        is_listed = torch.isin(slots.labels, tokens)
        slots = Slots(*(tensor[is_listed] for tensor in slots))
    head = head_of(target, None if tokens is None else torch.cat([tokens, slots.labels]))
    selector = draft.candidate_selector or draft.domino
    n = slots_at_once(head)
    spans = [slice(first, first + n) for first in range(0, len(slots.labels), n)]
    total = torch.zeros((), device=slots.hidden.device)
    if not torch.is_grad_enabled():
        for part in map(slots.part, spans):
            total = total + slots_loss(selector, head, part)
        return total, slots.weights.sum()
    # The GRU learns through the hidden states.
    learned = list((selector if draft.domino is None else draft.domino.embed_proj).parameters()) if selector else []
    of_hidden, of_learned = torch.zeros_like(slots.hidden), [torch.zeros_like(p) for p in learned]
    for span in spans:
        part = slots.part(span)
        part = part._replace(hidden=part.hidden.detach().requires_grad_())
        loss = slots_loss(selector, head, part)
        of_hidden[span], *more = torch.autograd.grad(loss, [part.hidden, *learned])
        for gradient, of_part in zip(of_learned, more, strict=True):
            gradient += of_part
        total += loss.detach()
    return _Known.apply(total, [of_hidden, *of_learned], slots.hidden, *learned), slots.weights.sum()
