"""Embedding and head of the target, which the draft uses.

Dimensions: T rows, the drafted slots of all requests' blocks; H hidden, V vocabulary (this rank's shard of it), K
candidates, R tensor-parallel ranks.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple

import torch
from sglang.srt.distributed.parallel_state import GroupCoordinator
from sglang.srt.layers.logits_processor import should_apply_lm_head_quant_method
from sglang.srt.lora.layers import unwrap_lora_layer
from sglang.srt.runtime_context import get_parallel
from torch import nn

from sglang_dflash.draft.fp8_head import Fp8Head
from sglang_dflash.errors import STOCK, NotSupported

SCALE = "get_dflash_noise_embedding_scale"  # method that SGLang's own worker looks up; no model of SGLang has it

TopK = Callable[[torch.Tensor, int], tuple[torch.Tensor, torch.Tensor]]  # top-k of the last dimension, best first


class TargetEnds(NamedTuple):
    """Embedding and head of the target, as modules rather than weights, so that weight updates apply to the draft."""

    embed: nn.Module  # token ids -> hidden
    head: Any  # module with .weight [V or its shard, H], possibly quantized
    n_vocab: int  # rows of the head (of this rank's shard) that are tokens, without padding
    first_token: int  # token id of this shard's first row
    tp_group: GroupCoordinator | None  # ranks that share the head; None: each rank has the whole head
    top_k: TopK = torch.topk
    quantized: bool = False
    fp8_head: Fp8Head | None = None  # used for the draft's blocks instead of `head`


def target_ends(model: Any, *, fp8_head: bool = False) -> TargetEnds:
    """Return the embedding and head of the base model; the draft never uses LoRA adapters.

    Raises:
        NotSupported: the target scales draft embeddings, ranks split embedding and head differently, or `fp8_head` is
            set and the head cannot be copied.
    """
    if SCALE in dir(model):
        raise NotSupported(f"{type(model).__name__}.{SCALE} is not applied to what the draft embeds; {STOCK}")
    head, embed = unwrap_lora_layer(model.lm_head), unwrap_lora_layer(model.get_input_embeddings())
    top_k = top_k_on(next(embed.parameters()).device)
    if fp8_head and (isinstance(head, nn.Embedding) or is_quantized(head)):
        raise NotSupported(
            f"SGLANG_DFLASH_DRAFT_HEAD=fp8 copies plain heads only, and that of {type(model).__name__} is "
            f"{'its embedding' if isinstance(head, nn.Embedding) else 'quantized'}; set it to full"
        )
    if isinstance(head, nn.Embedding):  # Gemma: the head is the embedding itself, whole on every rank
        return TargetEnds(embed, head, n_vocab=head.num_embeddings, first_token=0, tp_group=None, top_k=top_k)
    if get_parallel().attn_dp_enabled and embed.tp_size > 1 and head.tp_group is not embed.tp_group:
        raise NotSupported(
            f"{type(model).__name__} splits its embedding over all ranks and its head over those that share requests, "
            "and the draft reads both; drop --enable-dp-attention, or use --dp-size replicas"
        )
    tp_group = head.tp_group if head.tp_size > 1 else None
    shard = head.shard_indices
    return TargetEnds(
        embed=embed,
        head=head,
        n_vocab=head.org_vocab_size if tp_group is None else shard.num_org_elements,
        first_token=shard.org_vocab_start_index,
        tp_group=tp_group,
        top_k=top_k,
        quantized=is_quantized(head),
        fp8_head=Fp8Head(head) if fp8_head else None,
    )


def is_quantized(head: nn.Module) -> bool:
    """Return whether a head is quantized, by SGLang's own criterion."""
    return "weight" not in dict(head.named_parameters()) or should_apply_lm_head_quant_method(head, head.quant_method)


def top_k_on(device: torch.device) -> TopK:
    """Return a top-k for a device: FlashInfer's radix selection on a GPU, where torch sorts the whole vocabulary."""
    if device.type != "cuda":
        return torch.topk
    import flashinfer

    return partial(flashinfer.top_k, sorted=True, deterministic=True)


def likeliest(hidden_TH: torch.Tensor, ends: TargetEnds) -> torch.Tensor:
    """Return the argmax of the target's head for every row, int64 [T].

    With tensor parallelism every rank returns the same tokens, and ties go to the lowest id.
    """
    logits_TV = head_logits(hidden_TH, ends)
    if ends.tp_group is None:
        return logits_TV.argmax(dim=-1)
    best_T, token_T = logits_TV.max(dim=-1)
    return first_best(best_T, token_T + ends.first_token, ends.tp_group)


def first_best(best_T: torch.Tensor, token_T: torch.Tensor, group: GroupCoordinator) -> torch.Tensor:
    """Return, for every row, the token of the rank with the largest value, int64 [T]; the first rank on ties.

    Ranks exchange 2 T numbers each instead of their shards.

    Args:
        best_T: largest value in this rank's shard of the vocabulary.
        token_T: int64, token id of this value in the whole vocabulary.
    """
    best_RT = group.all_gather(best_T[None], dim=0)  # R ranks
    token_RT = group.all_gather(token_T[None], dim=0)
    return token_RT.gather(0, best_RT.argmax(dim=0, keepdim=True))[0]


def best_candidates(hidden_TH: torch.Tensor, ends: TargetEnds, k: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the K best tokens of every row, int64 [T, K], best first, and their logits, fp32 [T, K].

    All ranks return the same. They exchange K logits and ids per row instead of their shards of the vocabulary.
    """
    logits_TK, token_TK = ends.top_k(head_logits(hidden_TH, ends), k)
    logits_TK, token_TK = logits_TK.float(), token_TK.long() + ends.first_token
    if ends.tp_group is None:
        return token_TK, logits_TK
    all_logits = ends.tp_group.all_gather(logits_TK.contiguous(), dim=-1)  # [T, R K]
    all_tokens = ends.tp_group.all_gather(token_TK.contiguous(), dim=-1)
    logits_TK, place_TK = all_logits.topk(k, dim=-1)
    return all_tokens.gather(-1, place_TK), logits_TK


def head_logits(hidden_TH: torch.Tensor, ends: TargetEnds) -> torch.Tensor:
    """Return the logits of this rank's shard of the vocabulary, [T, V].

    `hidden_TH` must be packed: for a strided [B, D, H] PyTorch would expand the head and read it once per request. A
    quantized head computes as for the target. An fp8 copy rounds weights and hidden states.
    """
    if ends.fp8_head is not None:
        return ends.fp8_head.logits(hidden_TH)[:, : ends.n_vocab]
    if ends.quantized:
        return ends.head.quant_method.apply(ends.head, hidden_TH)[:, : ends.n_vocab]
    weight_VH = ends.head.weight[: ends.n_vocab]
    return hidden_TH.to(weight_VH.dtype) @ weight_VH.T
