"""Logits of a verify if tensor-parallel ranks share the head: each rank keeps its shard.

SGLang's forward ends by gathering, casting and storing every rank's shard of the vocabulary on every rank. A greedy
batch needs only the largest logit of each row. So a verify, captured or not, ends with the shards. If the batch is
greedy, ranks exchange their best values and token ids. Otherwise SGLang gathers the logits as its forward would have.

`verified_logits` selects `Whole` or `Shards` before the target's graphs are captured.
"""

from __future__ import annotations

import logging
from types import SimpleNamespace

import torch
from sglang.srt.layers.logits_processor import LogitsMetadata, LogitsProcessor
from sglang.srt.model_executor.model_runner import ModelRunner
from sglang.srt.utils.async_probe import sanitize_nan_logits

from sglang_dflash.draft.target_ends import TargetEnds, first_best
from sglang_dflash.stages.ranks import OneGroup

logger = logging.getLogger(__name__)

CHECKED = "DFLASH verify logits"  # label in SGLang's check for NaN


def argmax(logits_TV: torch.Tensor) -> torch.Tensor:
    """Return the id of the largest logit of every row, int64 [T], after SGLang's check for NaN; any float dtype."""
    sanitize_nan_logits(logits_TV, CHECKED)
    return logits_TV.argmax(dim=-1)


class Whole:
    """Kind of verify that ends with the logits of the whole vocabulary, on every rank."""

    def likeliest(self, logits_TV: torch.Tensor) -> torch.Tensor:
        """Return the argmax of every row, int64 [T]; the lowest id on ties."""
        return argmax(logits_TV)

    def whole(self, logits_TV: torch.Tensor) -> torch.Tensor:
        """Return the logits of the whole vocabulary, fp32 [T, V]."""
        return logits_TV


class Shards(Whole):
    """Kind of verify that ends with this rank's shard of the logits, in the head's dtype.

    A cast to fp32 keeps order and ties, so the argmax in the head's dtype is the same.
    """

    def __init__(self, runner: ModelRunner, processor: LogitsProcessor, ends: TargetEnds) -> None:
        self.runner, self.processor, self.ends = runner, processor, ends
        keep_shards(processor)

    def likeliest(self, logits_TV: torch.Tensor) -> torch.Tensor:
        """Return the argmax of every row, int64 [T]. Ranks exchange two numbers per row."""
        ends = self.ends
        assert ends.tp_group is not None
        real_TV = logits_TV[:, : ends.n_vocab]
        sanitize_nan_logits(real_TV, CHECKED)
        best_T, token_T = real_TV.max(dim=-1)
        return first_best(best_T, token_T + ends.first_token, ends.tp_group)

    def whole(self, logits_TV: torch.Tensor) -> torch.Tensor:
        """Gather and cast the shards as SGLang's forward does, into the same buffer, which may contain the shards."""
        gathered = self.processor._logits_gatherer(logits_TV)
        metadata = SimpleNamespace(next_token_logits_buffer=self._buffer(len(logits_TV)))
        return self.processor._copy_logits_to_buffer(gathered, metadata)  # type: ignore[arg-type]

    def _buffer(self, n_rows: int) -> torch.Tensor | None:
        """Return SGLang's buffer for logits of captured forwards; None if it is too small or nothing is captured."""
        shared = self.runner.graph_shared_output
        if shared is None or n_rows > shared.max_rows:
            return None
        return shared.get_logits_buffer(self.runner.model_config.vocab_size, rows=n_rows)


def keep_shards(processor: LogitsProcessor) -> None:
    """Make `processor` end a verify with the shard. Call this before graphs are captured.

    SGLang's processor has methods that finish the logits of some soft-capped heads. `why_whole` excludes such heads, so
    these methods are replaced.
    """

    def is_verify(logits: object, hidden_states: object, head: object, metadata: LogitsMetadata) -> bool:
        return metadata.forward_mode.is_target_verify()

    def finish(shard_TV: torch.Tensor, metadata: LogitsMetadata, use_buffer: bool) -> torch.Tensor:
        """Write the shard into SGLang's logits buffer, so that the outputs of all graphs share this memory."""
        buffer = metadata.next_token_logits_buffer
        if buffer is None:
            return shard_TV
        return buffer.view(shard_TV.dtype).flatten()[: shard_TV.numel()].view_as(shard_TV).copy_(shard_TV)

    processor._can_gather_softcap_fused = is_verify  # type: ignore[method-assign, assignment]
    processor._gather_softcap_fused = finish  # type: ignore[method-assign, assignment]


def verified_logits(runner: ModelRunner, ends: TargetEnds, ranks: OneGroup) -> Whole:
    """Return the kind of logits that the target's verifies return, and set it up."""
    if ends.tp_group is None:
        return Whole()
    processors = [module for module in runner.model.modules() if isinstance(module, LogitsProcessor)]
    if why := why_whole(processors, ends, ranks):
        logger.info("every verify gathers the logits of all ranks, greedy or not: %s", why)
        return Whole()
    return Shards(runner, processors[0], ends)


def why_whole(processors: list[LogitsProcessor], ends: TargetEnds, ranks: OneGroup) -> str:
    """Return the reason why verifies must gather the logits of all ranks; "" if ranks may keep their shards."""
    if ranks.meet:
        return "ranks of attention data parallelism exchange rows as well as shards"
    if len(processors) != 1:
        return f"the target computes its logits in {len(processors)} places"
    processor = processors[0]
    if processor.final_logit_softcapping:
        return "soft-capped logits may be equal where the shards' are not"
    if processor.use_attn_tp_group or not processor.do_tensor_parallel_all_gather:
        return "SGLang does not gather them over the ranks that share the head"
    if processor.vocab_size != ends.head.org_vocab_size:
        return "the head's vocabulary differs from the target's configuration"
    return ""
