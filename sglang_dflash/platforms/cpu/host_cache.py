"""Copies between the device pool and the host pool of a hierarchical cache. Here both pools are in host memory.

SGLang imports these functions from `sgl_kernel` only on a GPU. A device pool stores one tensor [tokens, ...] per layer.
A host pool stores the same, or pages of all layers [pages, layers, tokens of a page, ...].
"""

from collections.abc import Sequence
from importlib import import_module
from typing import Any

import torch

from sglang_dflash.platforms.cpu.pinned import torch_with

Layers = Sequence[torch.Tensor]


def transfer_kv_direct(
    src_layers: Layers, dst_layers: Layers, src_indices: torch.Tensor, dst_indices: torch.Tensor, page_size: int
) -> None:
    """Copy rows `src_indices` of each source tensor to rows `dst_indices` of the corresponding target tensor.

    The indices are integers [tokens]. `page_size` is not used.
    """
    for source, target in zip(src_layers, dst_layers, strict=True):
        target[dst_indices.long()] = source[src_indices.long()]


def transfer_kv_per_layer_direct_pf_lf(
    src_ptrs: Layers,
    dst_ptrs: Layers,
    src_indices: torch.Tensor,
    dst_indices: torch.Tensor,
    layer_id: int,
    page_size: int,
) -> None:
    """Copy one layer from the host's pages to the device."""
    at = src_indices.long()
    for pages, layer in zip(src_ptrs, dst_ptrs, strict=True):
        layer[dst_indices.long()] = pages[at // page_size, layer_id, at % page_size]


def transfer_kv_all_layer_direct_lf_pf(
    src_ptrs: Layers, dst_ptrs: Layers, src_indices: torch.Tensor, dst_indices: torch.Tensor, page_size: int
) -> None:
    """Copy all layers of the device pool to the host's pages. `src_ptrs` has the layers' keys, then their values."""
    at, n_layers = dst_indices.long(), len(src_ptrs) // len(dst_ptrs)
    for i, layer in enumerate(src_ptrs):
        dst_ptrs[i // n_layers][at // page_size, i % n_layers, at % page_size] = layer[src_indices.long()]


def install() -> None:
    """Set these functions in the modules that import them on a GPU.

    Also disables pinning, the registration of host memory with CUDA, and the check for a reserve of free host memory.
    """
    copies = (transfer_kv_direct, transfer_kv_per_layer_direct_pf_lf, transfer_kv_all_layer_direct_lf_pf)
    for module in ("mha", "mamba"):
        _names(module).update({copy.__name__: copy for copy in copies}, torch=torch_with(lambda tensor: tensor))
    _names("base").update(HICACHE_HOST_MEMORY_RESERVE_BYTES=0)
    _names("common").update(_cuda_host_register=lambda buffer, granularity=None: None)


def _names(module: str) -> dict[str, Any]:
    return vars(import_module(f"sglang.srt.mem_cache.pool_host.{module}"))
