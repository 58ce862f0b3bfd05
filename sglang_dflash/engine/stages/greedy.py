"""Logits of a verify if the head is split over tensor-parallel ranks: each rank keeps its shard.

In SGLang a forward ends by gathering, casting and storing every rank's shard of the vocabulary on every rank. A greedy
batch needs only the largest logit of each token row. So with `Shards` a verify, captured or not, ends with the shards.
If the batch is greedy, ranks then exchange their best values and token ids. Otherwise SGLang's own functions gather the
logits.

`verified_logits` selects `Whole` or `Shards` before the target's graphs are captured.
"""

from __future__ import annotations

import logging
from types import SimpleNamespace

import torch
from sglang.srt.layers.logits_processor import LogitsMetadata, LogitsProcessor
from sglang.srt.model_executor.model_runner import ModelRunner
from sglang.srt.utils.async_probe import sanitize_nan_logits

from sglang_dflash.engine.draft.target_ends import TargetEnds, first_best
from sglang_dflash.engine.stages.ranks import OneGroup

logger = logging.getLogger(__name__)

CHECKED = "DFLASH verify logits"  # label in SGLang's check for NaN


def argmax(logits_TV: torch.Tensor) -> torch.Tensor:
    """Run SGLang's check for NaN, then return the index of the largest logit of every row, int64 [T]."""
    sanitize_nan_logits(logits_TV, CHECKED)
    return logits_TV.argmax(dim=-1)


def logits_buffer(runner: ModelRunner, n_rows: int) -> torch.Tensor | None:
    """Return SGLang's logits buffer for captured forwards; None if there is no graph or the buffer is too small."""
    shared = runner.graph_shared_output
    if shared is None or n_rows > shared.max_rows:
        return None
    return shared.get_logits_buffer(runner.model_config.vocab_size, rows=n_rows)


class Whole:
    """Form of a verify's logits: the whole vocabulary on every rank."""

    agreed = False  # whether `likeliest` returns equal tokens on all ranks, so that no broadcast is needed

    def likeliest(self, logits_TV: torch.Tensor) -> torch.Tensor:
        """Return the token id of the largest logit of every row, int64 [T]; the lowest id on ties."""
        return argmax(logits_TV)

    def whole(self, logits_TV: torch.Tensor) -> torch.Tensor:
        """Return the logits of the whole vocabulary, fp32 [T, V]."""
        return logits_TV


class Shards(Whole):
    """Form of a verify's logits: this rank's shard of the vocabulary, in the head's dtype.

    A cast to fp32, as in SGLang's forward, keeps order and ties. So the argmax in the head's dtype equals that in fp32.
    """

    agreed = True  # every rank chooses among the same values, those of all ranks

    def __init__(self, runner: ModelRunner, processor: LogitsProcessor, ends: TargetEnds) -> None:
        self.runner, self.processor, self.ends = runner, processor, ends
        keep_shards(processor)

    def likeliest(self, logits_TV: torch.Tensor) -> torch.Tensor:
        """Return the token id of the largest logit of every row, int64 [T]. Ranks exchange two numbers per row."""
        ends = self.ends
        assert ends.tp_group is not None
        real_TV = logits_TV[:, : ends.n_vocab]
        sanitize_nan_logits(real_TV, CHECKED)
        best_T, token_T = real_TV.max(dim=-1)
        return first_best(best_T, token_T + ends.first_token, ends.tp_group)

    def whole(self, logits_TV: torch.Tensor) -> torch.Tensor:
        """Return the logits of the whole vocabulary, fp32 [T, V], in SGLang's buffer if there is one.

        As in SGLang's forward, the shards are gathered and cast. `logits_TV` may be in this buffer.
        """
        gathered = self.processor._logits_gatherer(logits_TV)
        metadata = SimpleNamespace(next_token_logits_buffer=logits_buffer(self.runner, len(logits_TV)))
        return self.processor._copy_logits_to_buffer(gathered, metadata)  # type: ignore[arg-type]


def keep_shards(processor: LogitsProcessor) -> None:
    """Change `processor` so that a verify ends with this rank's shard. Call this before graphs are captured.

    SGLang's processor has two methods that gather soft-capped logits. `why_whole` excludes soft-capped heads, so these
    methods have no other use. This function replaces them.
    """

    def is_verify(logits: object, hidden_states: object, head: object, metadata: LogitsMetadata) -> bool:
        return metadata.forward_mode.is_target_verify() or metadata.forward_mode.is_decode()

    def finish(shard_TV: torch.Tensor, metadata: LogitsMetadata, use_buffer: bool) -> torch.Tensor:
        """Write the shard into SGLang's logits buffer if there is one, so that all graphs share the buffer's memory."""
        buffer = metadata.next_token_logits_buffer
        if buffer is None:
            return shard_TV
        return buffer.view(shard_TV.dtype).flatten()[: shard_TV.numel()].view_as(shard_TV).copy_(shard_TV)

    processor._can_gather_softcap_fused = is_verify  # type: ignore[method-assign, assignment]
    processor._gather_softcap_fused = finish  # type: ignore[method-assign, assignment]


def verified_logits(runner: ModelRunner, ends: TargetEnds, ranks: OneGroup) -> Whole:
    """Return the form of the logits that the target's verifies return, and prepare the target for this form."""
    if ends.tp_group is None:
        return Whole()
    processors = [module for module in runner.model.modules() if isinstance(module, LogitsProcessor)]
    if why := why_whole(processors, ends, ranks):
        logger.info("verify gathers whole logits, also for greedy requests, because %s", why)
        return Whole()
    return Shards(runner, processors[0], ends)


def why_whole(processors: list[LogitsProcessor], ends: TargetEnds, ranks: OneGroup) -> str:
    """Return the reason why a verify must gather the logits of all ranks; "" if ranks may keep their shards."""
    if ranks.meet:
        return "attention is data parallel"
    if len(processors) != 1:
        return f"the target has {len(processors)} LogitsProcessor modules, not one"
    processor = processors[0]
    if processor.final_logit_softcapping:
        return "the soft cap can round different logits to the same value"
    if processor.use_attn_tp_group or not processor.do_tensor_parallel_all_gather:
        return "the head's ranks are not those that SGLang gathers over"
    if processor.vocab_size != ends.head.org_vocab_size:
        return "the head's vocabulary differs from the target's configuration"
    return ""
