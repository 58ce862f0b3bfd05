"""KV slots: look-ups and updates of the requests' KV slots in req_to_token, and copies of the contents of KV slots.

Dimension key: B requests, N tokens per block, T new tokens of all requests.
"""

import ctypes

import torch


def block_cache_locs(
    *,
    req_pool_indices: torch.Tensor,
    req_to_token: torch.Tensor,
    start_offset: torch.Tensor,
    end_offset: torch.Tensor,
    batch_size: int,
    draft_token_num: int,
    device: torch.device,
) -> torch.Tensor:
    """Return the KV slots of N positions from `start_offset` on, for every request: int64 [B * N]."""
    positions_BN = start_offset.long()[:, None] + torch.arange(draft_token_num, device=device)
    return req_to_token[req_pool_indices.long()[:, None], positions_BN].long().flatten()


def assign_req_to_token_pool_func(
    req_pool_indices: torch.Tensor,
    req_to_token: torch.Tensor,
    start_offset: torch.Tensor,
    end_offset: torch.Tensor,
    out_cache_loc: torch.Tensor,
    batch_size: int,
) -> None:
    """Write T new KV slots (packed `out_cache_loc`, [T]) to positions [start, end) of each request's row, in place."""
    n_new_B = (end_offset - start_offset).long()
    # Within a request, packed index minus position is constant.
    shift_B = n_new_B.cumsum(0) - end_offset
    n_new = int(n_new_B.sum())
    position_T = torch.arange(n_new) - shift_B.repeat_interleave(n_new_B, output_size=n_new)
    row_T = req_pool_indices.long().repeat_interleave(n_new_B, output_size=n_new)
    req_to_token[row_T, position_T] = out_cache_loc[:n_new].to(req_to_token.dtype)


def copy_all_layer_kv_cache_func(
    data_ptrs: torch.Tensor,
    strides: torch.Tensor,
    tgt_loc: torch.Tensor,
    src_loc: torch.Tensor,
    num_locs: int,
    num_locs_upper: int,
    kv_copy_config: dict,
) -> None:
    """Copy KV slots `src_loc` to KV slots `tgt_loc` in every buffer; `strides`: bytes per KV slot of each buffer.

    All sources are read before any slot is written, because the lists may overlap. SGLang moves KV slots only for tree
    drafts. Without trees it calls this function only once, at start-up.
    """
    sources, targets = src_loc[:num_locs].tolist(), tgt_loc[:num_locs].tolist()
    for signed_base, n_bytes in zip(data_ptrs.tolist(), strides.tolist(), strict=True):
        base = signed_base % 2**64  # SGLang stores unsigned addresses in a signed tensor
        rows = [ctypes.string_at(base + source * n_bytes, n_bytes) for source in sources]
        for target, row in zip(targets, rows, strict=True):
            ctypes.memmove(base + target * n_bytes, row, n_bytes)
