"""Index buffers of captured graphs, shared by the engines of all widths.

The indices of a batch state where its K/V lie: page tables, or lists of KV slots. For captured graphs, SGLang's
attention backends keep the indices in buffers for the largest batch and the longest context. In some backends each
token of a block has room for a list. With a long context this can be more than a gigabyte per width. So the graphs of
all widths use the buffers of the widest.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from sglang.srt.layers.attention.base_attn_backend import AttentionBackend
from sglang.srt.layers.attention.hybrid_attn_backend import HybridAttnBackend
from sglang.srt.layers.attention.hybrid_linear_attn_backend import HybridLinearAttnBackend
from sglang.srt.layers.attention.verify_mask import VerifyMask

# Attributes of backends with indices, or with scratch memory of a kernel.
BUFFERS = (
    "cuda_graph_kv_indices",  # flashinfer (a list), triton
    "cuda_graph_custom_mask",  # flashinfer
    "cuda_graph_window_kv_indices",  # these and the next: triton
    "cuda_graph_attn_logits",
    "cuda_graph_swa_attn_logits",
    "cuda_graph_attn_lse",
    "cuda_graph_lean_Mp",
    "cuda_graph_lean_Lp",
    "cuda_graph_lean_Op",
    "_verify_mask",
    "_multi_ctas_kv_counter_buffer",  # trtllm_mha: counters that are zero before and after each launch
)
# Attributes that are dictionaries. The first three are of fa3, fa4 and trtllm_mha, and hold page tables. The last is of
# flashinfer for latent attention, and holds buffers of decode steps. TABLES: the entries that widths can share.
METADATA = ("decode_cuda_graph_metadata", "target_verify_metadata", "draft_extend_metadata", "fast_decode_kwargs")
TABLES = (
    "page_table",
    "swa_page_table",
    "page_table_draft_decode",
    "swa_page_table_draft_decode",
    "strided_indices",
    "kv_indices",  # the same buffer as `cuda_graph_kv_indices`
)


def share_buffers(backend: AttentionBackend, widest: AttentionBackend) -> None:
    """Make the graphs of `backend`, not captured yet, use the index buffers of `widest`, which is captured.

    SGLang first allocates the buffers of `backend`. They are replaced, and so freed, before the first capture.
    """
    allocate = backend.init_cuda_graph_state

    def allocate_and_replace(max_bs: int, max_num_tokens: int) -> None:
        allocate(max_bs, max_num_tokens)
        # A graph must not read indices that were written for another graph. This holds, because every replay's indices
        # are written on the stream of the replays, after the previous replay: by SGLang's forward right before the
        # replay, or by the graph itself. No step plans its verify earlier (`defer_metadata_init` in `Verifier.verify`).
        # With DFLASH, SGLang's overlap plan stream only reserves KV slots. No verify is planned while the draft runs.
        for narrow, wide in zip(parts(backend), parts(widest), strict=True):
            replace(narrow, wide, BUFFERS)
            for name in METADATA:
                replace(narrow.get(name, {}), wide.get(name, {}), TABLES)

    backend.init_cuda_graph_state = allocate_and_replace  # type: ignore[method-assign]


def parts(backend: AttentionBackend) -> Iterator[dict[str, Any]]:
    """Yield the attributes of the backends for full attention of which `backend` is composed."""
    match backend:
        case HybridLinearAttnBackend():
            yield from parts(backend.full_attn_backend)
        case HybridAttnBackend():
            yield from parts(backend.decode_backend)
            yield from parts(backend.prefill_backend)
        case _:
            yield vars(backend)


def replace(narrow: dict[str, Any], wide: dict[str, Any], names: tuple[str, ...]) -> None:
    """Replace the buffers `names` of a narrower width by those of the widest, if both have them."""
    for name in names:
        if name in narrow and name in wide:
            narrow[name] = larger(narrow[name], wide[name])


def larger(narrow: Any, wide: Any) -> Any:
    """Return the widest width's buffers if they are large enough for a narrower width, else the narrower width's."""
    match narrow, wide:
        case list(), list():
            return [larger(*pair) for pair in zip(narrow, wide, strict=True)]
        case VerifyMask(), VerifyMask():
            fits = narrow.buffer.numel() <= wide.buffer.numel()
        case torch.Tensor(), torch.Tensor():
            fits = narrow.dtype == wide.dtype and len(narrow) <= len(wide) and narrow.shape[1:] == wide.shape[1:]
        case _:
            fits = False
    return wide if fits else narrow
