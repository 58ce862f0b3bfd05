"""The target's embedding and head, found and checked once, to be lent to the draft."""

from __future__ import annotations

from sglang.srt.layers.quantization.unquant import UnquantizedEmbeddingMethod
from sglang.srt.runtime_context import get_parallel
from torch import nn

from sglang_dflash.draft_model import TargetEnds


def target_ends(model: nn.Module) -> TargetEnds:
    """
    Raises:
        ValueError: the target's head is quantized, so its rows are no plain vectors to score drafts with.
    """
    head = model.lm_head
    if not isinstance(head.quant_method, UnquantizedEmbeddingMethod):
        raise ValueError(
            f"DFLASH: the target's lm_head is quantized ({type(head.quant_method).__name__}) and the draft borrows it; "
            "use a checkpoint with a plain lm_head, or SGLANG_DFLASH_WORKER=stock"
        )
    tp_group = get_parallel().tp_group
    shard = head.shard_indices
    return TargetEnds(
        embed=model.get_input_embeddings(),
        head=head,
        n_vocab=head.org_vocab_size if tp_group.world_size == 1 else shard.num_org_elements,
        first_token=shard.org_vocab_start_index,
        tp_group=tp_group,
    )
