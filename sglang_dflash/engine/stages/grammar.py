"""Masks of the tokens that grammars allow at every slot of a step.

SGLang's `build_grammar_vocab_mask` advances each grammar along its request's drafts. If one grammar raises an error,
SGLang ends the scheduler, and with it all requests. Here, as without speculation, the error ends only the request with
this grammar, with status 500.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from functools import partial
from http import HTTPStatus

import torch
from sglang.srt.managers.schedule_batch import FINISH_ABORT, Req, ScheduleBatch
from sglang.srt.speculative.spec_utils import (
    GrammarMask,
    GrammarTree,
    build_grammar_vocab_mask,
    generate_token_bitmask,
)

logger = logging.getLogger(__name__)

BROKEN = (ValueError, RuntimeError)  # errors that a failed grammar raises


def allowed(
    batch: ScheduleBatch, tree: GrammarTree, device: torch.device, barrier: Callable[[], None] | None
) -> GrammarMask | None:
    """Return a mask of the tokens that grammars allow at every slot. The host computes it while a GPU verifies.

    Args:
        tree: the drafts of every request, one chain each.
        barrier: function that advances the grammars by the previous step's tokens; None: they are already advanced.
    Returns:
        Mask to apply to the logits [B * N, V]; None if no request has a grammar.
    """
    build = partial(
        build_grammar_vocab_mask, reqs=batch.reqs, tree=tree, sampling_info=batch.sampling_info, device=device
    )
    try:
        return build(barrier=barrier)
    except BROKEN:
        end_broken(batch.reqs, tree, batch.sampling_info.vocab_size)
        return build(barrier=None)


def end_broken(reqs: Sequence[Req], tree: GrammarTree, vocab_size: int) -> None:
    """End each request whose grammar fails, with status 500, and remove the request's grammar."""
    chains = tree.resolve()
    for i, req in enumerate(reqs):
        if req.grammar is None:
            continue
        try:
            generate_token_bitmask([req], *(chain_BN[i : i + 1] for chain_BN in chains), vocab_size)
        except BROKEN as error:
            logger.error("the grammar of request %s failed: %s", req.rid, error)
            req.grammar = None
            req.to_finish = FINISH_ABORT(
                f"the request's grammar failed: {error}; change it, or start the server with another --grammar-backend",
                HTTPStatus.INTERNAL_SERVER_ERROR,
                "InternalServerError",
            )
