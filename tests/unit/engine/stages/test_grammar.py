"""Grammars of a step must mask tokens as in SGLang. A grammar that fails must end only its own request."""

from array import array
from http import HTTPStatus
from types import SimpleNamespace

import pytest
import torch
from sglang.srt.constrained.base_grammar_backend import BaseGrammarObject
from sglang.srt.managers.schedule_batch import Req
from sglang.srt.sampling.sampling_params import SamplingParams
from sglang.srt.speculative.spec_utils import GrammarTree

from sglang_dflash.engine.stages.grammar import allowed

V, N = 32, 4


class Counts(BaseGrammarObject):
    """A grammar that allows only the last token plus one. A last token >= `breaks_at` raises ValueError."""

    def __init__(self, breaks_at: int = V) -> None:
        super().__init__()
        self.taken, self.breaks_at = [0], breaks_at

    def accept_token(self, token: int) -> None:
        self.taken.append(token)

    def rollback(self, k: int) -> None:
        del self.taken[len(self.taken) - k :]

    def fill_vocab_mask(self, vocab_mask: torch.Tensor, idx: int) -> None:
        if self.taken[-1] >= self.breaks_at:
            raise ValueError("the matcher is in error")
        vocab_mask[idx] = 1 << (self.taken[-1] + 1)

    def allocate_vocab_mask(self, vocab_size: int, batch_size: int, device: str) -> torch.Tensor:
        return torch.full((batch_size, 1), -1, dtype=torch.int32)

    @staticmethod
    def apply_vocab_mask(logits: torch.Tensor, vocab_mask: torch.Tensor) -> None:
        allowed_TV = (vocab_mask[:, :1] >> torch.arange(V, dtype=torch.int32)) & 1
        logits.masked_fill_(allowed_TV == 0, float("-inf"))


def masked(grammars: list[Counts | None], drafts: list[list[int]]) -> tuple[list[Req], torch.Tensor]:
    """Return the requests after a step, and whether each token is allowed at each slot, bool [B * N, V]."""
    reqs = [Req(str(i), "", array("q", [1]), SamplingParams(), vocab_size=V) for i in range(len(grammars))]
    for req, one in zip(reqs, grammars, strict=True):
        req.grammar = one
    chain = torch.tensor([*range(1, N), -1]).expand(len(drafts), N)
    tree = GrammarTree.from_host(chain, torch.full((len(drafts), N), -1), torch.tensor(drafts))
    batch = SimpleNamespace(reqs=reqs, sampling_info=SimpleNamespace(vocab_size=V, grammar_mask=None))
    mask, logits_TV = allowed(batch, tree, torch.device("cpu"), None), torch.zeros(len(drafts) * N, V)
    if mask is not None:
        mask.apply(logits_TV)
    return reqs, logits_TV == 0


def test_failed_grammar_ends_its_own_request() -> None:
    reqs, allowed_TV = masked([Counts(), Counts(breaks_at=2), None, Counts()], [[9, 1, 2, 3]] * 4)
    assert [req.grammar is not None for req in reqs] == [True, False, False, True]
    assert [req.to_finish is not None for req in reqs] == [False, True, False, False]
    assert reqs[1].to_finish.status_code == HTTPStatus.INTERNAL_SERVER_ERROR
    assert "the matcher is in error" in reqs[1].to_finish.message
    allowed_BNV = allowed_TV.view(4, N, V)
    assert [row.nonzero().flatten().tolist() for row in allowed_BNV[3]] == [[1], [2], [3], [4]]
    assert torch.equal(allowed_BNV[0], allowed_BNV[3])
    assert allowed_BNV[1:3].all(), "no grammar, no mask"


def test_no_grammar_is_no_mask() -> None:
    assert masked([None], [[9, 1, 2, 3]])[1].all()


def test_other_errors_are_not_hidden(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Counts, "allocate_vocab_mask", lambda *args, **options: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        masked([Counts()], [[9, 1, 2, 3]])


def test_grammars_accept_the_previous_step_first() -> None:
    """The barrier, the last argument of `allowed`, accepts the previous step's tokens, on which the masks depend."""
    grammar = Counts()
    req = Req("0", "", array("q", [1]), SamplingParams(), vocab_size=V)
    req.grammar = grammar
    chain, drafts = torch.tensor([[1, -1]]), torch.tensor([[4, 5]])
    batch = SimpleNamespace(reqs=[req], sampling_info=SimpleNamespace(vocab_size=V, grammar_mask=None))
    tree = GrammarTree.from_host(chain, torch.full((1, 2), -1), drafts)
    mask = allowed(batch, tree, torch.device("cpu"), lambda: grammar.accept_token(4))
    logits_TV = torch.zeros(2, V)
    mask.apply(logits_TV)
    assert (logits_TV == 0).nonzero().tolist() == [[0, 5], [1, 6]]
