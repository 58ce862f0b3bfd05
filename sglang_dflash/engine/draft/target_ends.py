"""Embedding and head of the target ("ends"), which the draft uses.

Dimensions: T rows (the drafted slots of all requests' blocks), H hidden, V vocabulary (this rank's shard of it), K
candidates, R tensor-parallel ranks.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from sglang.srt.distributed.parallel_state import GroupCoordinator
from sglang.srt.layers.logits_processor import should_apply_lm_head_quant_method
from sglang.srt.layers.quantization.unquant import UnquantizedEmbeddingMethod
from sglang.srt.lora.layers import unwrap_lora_layer
from sglang.srt.runtime_context import get_parallel
from torch import nn

from sglang_dflash.engine.draft.head_copy import Fp8Head, HeadCopy
from sglang_dflash.errors import STOCK, NotSupported

# Method of a target that SGLang's own worker calls if the target has it. No model in SGLang 0.5.23 has this method.
SCALE = "get_dflash_noise_embedding_scale"

ROWS = 64  # rows of logits that are converted to fp32 at a time
Embed = Callable[[torch.Tensor], torch.Tensor]  # token ids -> hidden
# (values, k) -> the k largest values of the last dimension and their indices, largest first.
TopK = Callable[[torch.Tensor, int], tuple[torch.Tensor, torch.Tensor]]


class TargetEnds(NamedTuple):
    """Embedding and head of the target. They are modules, not weights, so weight updates also apply to the draft."""

    embed: Embed
    head: Any  # module with .weight [V, H]; a quantized head may lack the weight
    n_vocab: int  # number of tokens in this rank's shard of the head; further rows are padding
    first_token: int  # token id of the first row of this rank's shard
    tp_group: GroupCoordinator | None  # ranks that split the head; None: each rank has the whole head
    top_k: TopK = torch.topk
    by_method: bool = False  # head.quant_method computes the logits: the weights are quantized, or packed for a CPU
    copy: HeadCopy | None = None  # used for the draft's blocks instead of `head`
    token_D: torch.Tensor | None = None  # int64, token ids of the copy's rows; None: consecutive from `first_token`


def target_ends(model: Any, *, fp8_head: bool = False) -> TargetEnds:
    """Return the embedding and head of `model` without LoRA adapters, which the draft never uses.

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
            f"SGLANG_DFLASH_DRAFT_HEAD=fp8 cannot copy the head of {type(model).__name__}, which is "
            f"{'a plain torch embedding' if isinstance(head, nn.Embedding) else 'quantized'}; set "
            "SGLANG_DFLASH_DRAFT_HEAD=full"
        )
    if isinstance(head, nn.Embedding):  # Gemma: the head is the embedding, and every rank has all rows
        return TargetEnds(embed, head, n_vocab=head.num_embeddings, first_token=0, tp_group=None, top_k=top_k)
    if get_parallel().attn_dp_enabled and embed.tp_size > 1 and head.tp_group is not embed.tp_group:
        raise NotSupported(
            f"{type(model).__name__} splits its embedding over all ranks and its head over those that share requests, "
            "and the draft reads both; drop --attn-dp-size, or --enable-dp-attention with its --dp-size"
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
        by_method=uses_method(head),
    )


def with_copy(ends: TargetEnds, d2t_D: torch.Tensor | None, *, fp8: bool) -> TargetEnds:
    """Return `ends` with the copy of the head's rows that this draft needs, if any.

    Args:
        d2t_D: for each token of a reduced vocabulary, its id in the target's vocabulary minus its index, int64. Ids
            increase. None: the draft has the whole vocabulary.
        fp8: round the rows to fp8.
    Raises:
        ValueError: the ids do not increase or are outside the target's vocabulary.
        NotSupported: this rank has no row of the reduced vocabulary.
    """
    if d2t_D is None:
        return ends._replace(copy=Fp8Head(ends.head)) if fp8 else ends
    token_D = d2t_D + torch.arange(len(d2t_D), device=d2t_D.device)
    if bool((token_D[1:] <= token_D[:-1]).any()) or int(token_D[0]) < 0:
        raise ValueError("the draft's d2t gives no increasing token ids; fetch the draft again")
    first = ends.first_token
    token_D = token_D[(token_D >= first) & (token_D < first + ends.n_vocab)]
    if not len(token_D):
        raise NotSupported(
            f"the draft's reduced vocabulary has no token of the {ends.n_vocab} whose head this rank has; lower "
            "--tp-size"
        )
    copy = (
        Fp8Head(ends.head, token_D - first) if fp8 else HeadCopy(ends.head, token_D - first, by_method=ends.by_method)
    )
    return ends._replace(copy=copy, token_D=token_D, n_vocab=len(token_D))


def with_own_mask(embed: Embed, mask_token_id: int, row_H: torch.Tensor) -> Embed:
    """Return the embedding with `row_H` in place of the mask token's row."""
    return lambda token_T: torch.where((token_T == mask_token_id)[..., None], row_H, embed(token_T))


def unscaled(embed: Any) -> Embed:
    """Return the embedding without the factor that some targets (Gemma) apply to its rows.

    The trainer `speculators` trains on unscaled rows, z-lab on scaled ones.
    """
    if "embed_scale" not in dir(embed):
        return embed
    return lambda token_T: F.embedding(token_T, embed.weight)


def is_quantized(head: nn.Module) -> bool:
    """Return whether the weights of a head are quantized. Weights that are only packed for a CPU are not."""
    unquantized = isinstance(head.quant_method, UnquantizedEmbeddingMethod)
    return not has_weight(head) or (uses_method(head) and not unquantized)


def uses_method(head: nn.Module) -> bool:
    """Return whether SGLang computes a head's logits with the head's quant_method."""
    return not has_weight(head) or should_apply_lm_head_quant_method(head, head.quant_method)


def has_weight(head: nn.Module) -> bool:
    return "weight" in dict(head.named_parameters())


def top_k_on(device: torch.device) -> TopK:
    """Return the top-k function for a device.

    On a GPU this is FlashInfer's radix selection, because `torch.topk` sorts the whole vocabulary there.
    """
    if device.type != "cuda":
        return torch.topk
    import flashinfer

    return partial(flashinfer.top_k, sorted=True, deterministic=True)


def likeliest(hidden_TH: torch.Tensor, ends: TargetEnds) -> torch.Tensor:
    """Return the token with the largest logit of the target's head for every row, int64 [T].

    With tensor parallelism every rank returns the same tokens. On ties the lowest token id is returned.
    """
    logits_TV = head_logits(hidden_TH, ends)
    if ends.tp_group is None:
        row_T = logits_TV.argmax(dim=-1)
        return row_T if ends.token_D is None else ends.token_D[row_T]
    best_T, row_T = logits_TV.max(dim=-1)
    token_T = row_T + ends.first_token if ends.token_D is None else ends.token_D[row_T]
    return first_best(best_T, token_T, ends.tp_group)


def first_best(best_T: torch.Tensor, token_T: torch.Tensor, group: GroupCoordinator) -> torch.Tensor:
    """Return, for every row, the token of the rank with the largest value, int64 [T].

    On ties the lowest rank's token is returned. Each rank sends 2 T numbers instead of its shard of the logits.

    Args:
        best_T: largest value in this rank's shard of the vocabulary.
        token_T: int64, token id of this value in the whole vocabulary.
    """
    best_RT = group.all_gather(best_T[None], dim=0)  # R ranks
    token_RT = group.all_gather(token_T[None], dim=0)
    return token_RT.gather(0, best_RT.argmax(dim=0, keepdim=True))[0]


def best_candidates(hidden_TH: torch.Tensor, ends: TargetEnds, k: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the K tokens with the largest logits of every row, int64 [T, K], and these logits, fp32 [T, K].

    The largest logit comes first. All ranks return equal results. Each rank sends K logits and token ids per row
    instead of its shard of the logits.
    """
    return best_of(head_logits(hidden_TH, ends), ends, k)


def most_probable(hidden_TH: torch.Tensor, ends: TargetEnds, k: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the same tokens as `best_candidates`, and their log-probabilities over the whole vocabulary, fp32."""
    logits_TV = head_logits(hidden_TH, ends)
    token_TK, logits_TK = best_of(logits_TV, ends, k)
    total_T = torch.cat([part.float().logsumexp(-1) for part in logits_TV.split(ROWS)])  # fp32 for a part at a time
    if ends.tp_group is not None:
        total_T = ends.tp_group.all_gather(total_T[None], dim=0).logsumexp(0)
    return token_TK, logits_TK - total_T[:, None]


def best_of(logits_TV: torch.Tensor, ends: TargetEnds, k: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the candidates of `best_candidates` for the logits of this rank's shard."""
    # FlashInfer needs contiguous logits, and a padded head's are not after `head_logits`.
    logits_TK, token_TK = ends.top_k(logits_TV.contiguous(), k)
    logits_TK, token_TK = logits_TK.float(), token_TK.long() + ends.first_token
    if ends.tp_group is None:
        return token_TK, logits_TK
    all_logits = ends.tp_group.all_gather(logits_TK.contiguous(), dim=-1)  # [T, R K]
    all_tokens = ends.tp_group.all_gather(token_TK.contiguous(), dim=-1)
    logits_TK, place_TK = all_logits.topk(k, dim=-1)
    return all_tokens.gather(-1, place_TK), logits_TK


def head_logits(hidden_TH: torch.Tensor, ends: TargetEnds) -> torch.Tensor:
    """Return the logits of this rank's shard of the vocabulary, [T, V].

    `hidden_TH` must be contiguous. For a strided [B, D, H], PyTorch would expand the head and read it once per request.
    If the head is quantized or packed, its `quant_method` computes the logits, as for the target. A copy of the head's
    rows replaces the head.
    """
    if ends.copy is not None:
        return ends.copy.logits(hidden_TH)[:, : ends.n_vocab]
    if ends.by_method:
        return ends.head.quant_method.apply(ends.head, hidden_TH)[:, : ends.n_vocab]
    weight_VH = ends.head.weight[: ends.n_vocab]
    return hidden_TH.to(weight_VH.dtype) @ weight_VH.T
