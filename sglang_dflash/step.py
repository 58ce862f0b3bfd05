"""The vocabulary of one decode step: what each stage hands to the next.

A step EMITS n_accepted + 1 tokens (drafts 1..n, then the bonus) and KEEPS n_accepted + 1 rows (the anchor, then drafts
1..n). The count is the same, the rows are shifted by one: the bonus has no K/V and no features until the next step,
whose anchor it is. Knows tensors only; nothing of requests, models or kernels.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from sglang.srt.layers.logits_processor import LogitsProcessorOutput
from sglang.srt.mem_cache.kv_loc_plan import KVLocPlan
from sglang.srt.model_executor.model_runner import ModelRunnerOutput
from sglang.srt.speculative.spec_utils import GrammarTree


class Block(NamedTuple):
    """N tokens of every request, from the anchor on: the block, or the part of it that is verified."""

    tokens_BN: torch.Tensor  # int64, slot 0 the anchor, the rest mask tokens
    positions_BN: torch.Tensor  # int64, absolute
    slots_BN: torch.Tensor  # int64, KV slots in the target's pool
    # Attention backends plan on the host with an upper bound of prefix_len + N. It comes from what the scheduler has
    # reserved, so no length has to leave the device.
    bound_B_cpu: torch.Tensor
    bound_sum: int
    kv: KVLocPlan  # the same slots, as SGLang's pools and backends want to be told


class Plan(NamedTuple):
    """Positions and KV slots of every request's block, and how much of it is verified."""

    drafted: Block | None  # the whole block; None: nothing is drafted, the anchor alone is verified
    verified: Block  # its first `width` tokens; the same one where that is all
    prefix_len_B: torch.Tensor  # int64, tokens committed before this step
    rows_B: torch.Tensor  # int64, the requests' rows in req_to_token
    rows_B_cpu: torch.Tensor  # the same on the host

    @property
    def n_requests(self) -> int:
        """Return B."""
        return self.rows_B.shape[0]

    @property
    def width(self) -> int:
        """Return how many tokens of each block are verified."""
        return self.verified.tokens_BN.shape[1]


class Target(NamedTuple):
    """The target's output for a verified block."""

    run: ModelRunnerOutput  # as SGLang's runner returns it: the logits, and what flags ask for of each row
    features_TC: torch.Tensor  # [B * N, C]; a graph's buffer: gone with the next target forward
    grammar_tree: GrammarTree | None  # the drafts on their way to the host, when a request has a grammar

    @property
    def output(self) -> LogitsProcessorOutput:
        """`.next_token_logits` [B * N, V]"""
        return self.run.logits_output
