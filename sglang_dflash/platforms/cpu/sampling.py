"""Sampled verification of a drafted chain for SGLang's own DFLASH worker (temperature > 0).

Without this function SGLang would log one warning and verify greedily. Then SGLang's worker would look faster than an
exact worker. This plugin's worker does not use this function.

Dimension key: B requests, N tokens per block (slot 0 the anchor), D = N - 1 drafts, V vocabulary.
"""

import torch

from sglang_dflash.platforms.cpu.refuse import refuse


def tree_speculative_sampling_target_only(
    predicts: torch.Tensor,
    accept_index: torch.Tensor,
    accept_token_num: torch.Tensor,
    candidates: torch.Tensor,
    retrive_index: torch.Tensor,
    retrive_next_token: torch.Tensor,
    retrive_next_sibling: torch.Tensor,
    uniform_samples: torch.Tensor,
    uniform_samples_for_final_sampling: torch.Tensor,
    target_probs: torch.Tensor,
    draft_probs: torch.Tensor,
    threshold_single: float = 1.0,
    threshold_acc: float = 1.0,
    deterministic: bool = True,
) -> None:
    """Accept drafts by rejection sampling, and draw one more token from the remaining distribution; results in place.

    For the draft after slot i, coin is uniform_samples[b, i], and p is the draft's probability in target_probs[b, i].
    A draft is accepted if all drafts before it are, and if coin <= p / threshold_acc or p >= threshold_single. Slots of
    the anchor and of accepted drafts are kept. The last token is drawn from the target's distribution after the last
    kept slot. If the draft after this slot was rejected, draft_probs is first subtracted from this distribution.
    Negative values become 0, and so does the probability of the rejected draft.

    candidates int64 [B, N]; retrive_index, retrive_next_token, retrive_next_sibling int [B, N]; target_probs,
    draft_probs fp32 [B, N, V]; uniform_samples fp32 [B, N]; uniform_samples_for_final_sampling fp32 [B]. Outputs:

        predicts          int32 [B * N]: the token after each kept slot, at the slot's retrive_index
        accept_index      int32 [B, >= N]: retrive_index of the kept slots
        accept_token_num  int32 [B]: number of accepted drafts

    Output cells of other slots are unchanged.

    Raises:
        NotImplementedError: the drafts form a tree.
    """
    B, N = candidates.shape
    child_N = torch.arange(1, N + 1).where(torch.arange(N) < N - 1, -1)  # next slot in a chain, -1 after the last
    is_chain = (retrive_next_token == child_N).all() & (retrive_next_sibling == -1).all()
    refuse("tree_speculative_sampling_target_only", {"a tree in retrive_next_token or _sibling": not is_chain})
    draft_BD1 = candidates[:, 1:, None]
    p_BD = target_probs[:, :-1].gather(2, draft_BD1).squeeze(2)
    accepted_BD = (uniform_samples[:, : N - 1] <= p_BD / threshold_acc) | (p_BD >= threshold_single)
    n_accepted_B = accepted_BD.long().cumprod(dim=1).sum(dim=1)

    row_B = torch.arange(B)
    rest_BV = target_probs[row_B, n_accepted_B]
    rejected = (n_accepted_B < N - 1).nonzero().flatten()
    n_before = n_accepted_B[rejected]
    rest_BV[rejected] = (rest_BV[rejected] - draft_probs[rejected, n_before]).clamp(min=0)
    rest_BV[rejected, candidates[rejected, n_before + 1]] = 0
    closing_B = _draw(rest_BV, uniform_samples_for_final_sampling)

    slot_N = torch.arange(N)
    after_BN = candidates.roll(-1, dims=1)
    after_BN[row_B, n_accepted_B] = closing_B
    kept_BN = slot_N <= n_accepted_B[:, None]
    predicts[retrive_index[kept_BN].long()] = after_BN[kept_BN].to(predicts.dtype)
    accept_index[:, :N][kept_BN] = retrive_index[kept_BN].to(accept_index.dtype)
    accept_token_num.copy_(n_accepted_B)


def _draw(weight_BV: torch.Tensor, coin_B: torch.Tensor) -> torch.Tensor:
    """Return each request's first token whose cumulative weight exceeds coin * total, int64 [B]."""
    cumulative_BV = weight_BV.double().cumsum(dim=1)
    threshold_B1 = coin_B[:, None].double() * cumulative_BV[:, -1:]
    return torch.searchsorted(cumulative_BV, threshold_B1, right=True).squeeze(1).clamp(max=weight_BV.shape[1] - 1)


def best(scores: torch.Tensor, k: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the `k` largest values of the last dimension and their indices, largest first. Replaces `_radix_topk`."""
    largest, where = torch.topk(scores, k, dim=-1)
    return largest, where
