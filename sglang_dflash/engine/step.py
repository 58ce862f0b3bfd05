"""Types that the stages of a decode step exchange.

With n accepted drafts, a step EMITS n + 1 tokens: drafts 1..n, then the bonus. It KEEPS n + 1 token rows: the anchor,
then drafts 1..n. The numbers are equal, but the rows are shifted by one. The bonus has no K/V and no features until the
next step, when it is the anchor. These types contain no requests, models or kernels.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from sglang.srt.layers.logits_processor import LogitsProcessorOutput
from sglang.srt.mem_cache.kv_loc_plan import KVLocPlan
from sglang.srt.model_executor.model_runner import ModelRunnerOutput
from sglang.srt.speculative.spec_utils import GrammarTree


class Block(NamedTuple):
    """Tokens of every request from the anchor on: the whole block, or the tokens to verify."""

    tokens_BN: torch.Tensor  # int64, slot 0 the anchor, the rest mask tokens
    positions_BN: torch.Tensor  # int64, absolute
    slots_BN: torch.Tensor  # int64, KV slots in the target's pool
    end_B: torch.Tensor  # int64, prefix_len + N
    # Upper bound of `end_B` on the host, for attention backends that plan on the host. If a backend needs
    # exact lengths, the bound is exact. Otherwise it is computed from the KV slots that the scheduler has reserved, so
    # no length is copied from the device.
    bound_B_cpu: torch.Tensor
    bound_sum: int  # sum of `bound_B_cpu`
    kv: KVLocPlan  # `slots_BN` in the form that SGLang's pools and attention backends read


class Plan(NamedTuple):
    """Positions and KV slots of every request's block, and of the tokens to verify."""

    drafted: Block | None  # the block's slots; None: only the anchor is verified, without drafts
    verified: Block  # `width` tokens from the anchor on; the same object as `drafted` if there are as many slots
    prefix_len_B: torch.Tensor  # int64, number of tokens before the anchor, prompt included
    rows_B: torch.Tensor  # int64, row of each request in SGLang's req_to_token
    rows_B_cpu: torch.Tensor  # `rows_B` on the host

    @property
    def n_requests(self) -> int:
        return self.rows_B.shape[0]

    @property
    def width(self) -> int:
        """Return the number of verified tokens per request."""
        return self.verified.tokens_BN.shape[1]


class Target(NamedTuple):
    """Output of the target for a verified block."""

    run: ModelRunnerOutput  # output of SGLang's runner: logits, and other outputs that server flags enable
    features_TC: torch.Tensor  # [B * N, C]; the next target forward may overwrite it
    grammar_tree: GrammarTree | None  # drafts, being copied to the host; None if no request has a grammar

    @property
    def output(self) -> LogitsProcessorOutput:
        """Return the output with `.next_token_logits` [B * N, V]."""
        return self.run.logits_output
