"""DFlash 2's convolution and selector must equal their definitions."""

import pytest
import torch

from sglang_dflash.reference.torch.second import CandidateSelector, convolve
from tests.unit.reference.torch.test_draft import make_draft

SECOND = {"conv_kernel_size": 2, "conv_group_size": 8, "selector_rank": 6, "selector_top_k": 4}


@pytest.mark.parametrize(("n_slots", "n_taps"), [(5, 1), (5, 2), (4, 4), (1, 3), (3, 5)])
def test_a_slot_is_mixed_with_earlier_ones_only(n_slots: int, n_taps: int) -> None:
    torch.manual_seed(0)
    hidden, kernel = torch.randn(2, n_slots, 6), torch.randn(2, n_slots, n_taps, 6)
    want = torch.zeros_like(hidden)
    for b in range(2):
        for n in range(n_slots):
            for s in range(min(n + 1, n_taps)):
                want[b, n] += kernel[b, n, s] * hidden[b, n - s]
    torch.testing.assert_close(convolve(hidden, kernel), want)


def selector(**fields) -> CandidateSelector:
    draft = make_draft(**SECOND, **fields)
    return draft.candidate_selector


def defined_walk(selector: CandidateSelector, hidden_DH, logits_DV, anchor: int) -> list[int]:
    previous, path = anchor, []
    for hidden, logits in zip(hidden_DH, logits_DV, strict=True):
        wanted = selector.predecessor_codebook[previous] * (selector.hidden_projection.weight @ hidden)
        scores = {}
        for token in logits.topk(4).indices.tolist():
            own = logits[token] * selector.multiplier
            own = own if selector.cap is None else selector.cap * torch.tanh(own / selector.cap)
            scores[token] = float(own + wanted @ selector.successor_codebook[token])
        previous = max(scores, key=scores.__getitem__)
        path.append(previous)
    return path


@pytest.mark.parametrize("fields", [{}, {"output_multiplier": 0.2, "final_logit_softcapping": 1.5}], ids=str)
def test_the_walk_equals_the_definition(fields: dict[str, float]) -> None:
    chosen = selector(**fields)
    torch.manual_seed(1)
    hidden_XDH, logits_XDV, anchor_X = torch.randn(8, 3, 32), torch.randn(8, 3, 50), torch.randint(0, 50, (8,))
    got = chosen.walk(hidden_XDH, logits_XDV, anchor_X).tolist()
    want = [defined_walk(chosen, *row) for row in zip(hidden_XDH, logits_XDV, anchor_X.tolist(), strict=True)]
    assert got == want
    assert got != logits_XDV.argmax(-1).tolist(), "the selector changed nothing"
    assert make_draft().candidate_selector is None
