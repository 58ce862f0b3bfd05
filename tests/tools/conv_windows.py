"""Compile SGLang's convolution of a verify for an absent GPU, with the window strips of this package and of SGLang.

    python -m tests.tools.conv_windows

A JSON document on stdout has for each pool the number of stores to global memory, by bytes that a thread writes at
once. Neighbouring threads write neighbouring bytes only if channels are contiguous.
"""

import json
from collections import Counter

from tests.tools.compile_kernels import Driver, empty  # first, because it removes TRITON_INTERPRET

# isort: split
import torch
from sglang.kernels.ops.mamba import causal_conv1d_triton as convolution
from sglang.srt.mem_cache.memory_pool import MambaPool
from triton.runtime.driver import driver

from sglang_dflash.engine.memory import records
from tests.fixtures.recurrent import make_pool
from tests.tools import sass

ARCH, B, N = 90, 8, 16
BYTES = {"U8": 1, "U16": 2, "64": 8, "128": 16}  # suffix of a store; without one it writes 4 bytes


def stores(windows: torch.Tensor, conv_state: torch.Tensor) -> dict[int, int]:
    """Return the number of store instructions by bytes, for a verify that writes `windows` [rows, N, C, P] of a layer.

    Each thread stores two channels. Of the 2-byte stores, 8 belong to SGLang's persistent states [slots, C, P].
    """
    device = Driver(ARCH)
    driver.set_active(device)
    n_channels, n_kept = conv_state.shape[1:]
    indices = empty(B, dtype=torch.int32)
    kernel = convolution._causal_conv1d_update_kernel
    kernel.device_caches.clear()
    convolution.causal_conv1d_update(
        empty(B * N, n_channels).view(B, N, n_channels).transpose(1, 2), conv_state, empty(n_channels, n_kept + 1),
        None, "silu", conv_state_indices=indices, intermediate_conv_window=windows, intermediate_state_indices=indices,
    )  # fmt: skip
    (binary,) = kernel.device_caches[0][0].values()
    suffixes = [i.op.split(".")[-1] for i in sass.read(binary.asm["cubin"]).instructions if i.name == "STG"]
    return dict(Counter(BYTES.get(suffix, 4) for suffix in suffixes))


def main() -> None:
    records.get_cuda_graph_max_batch_size = lambda n_requests: n_requests
    pools = {"plugin": records.RecordPool, "SGLang": MambaPool}
    caches = {name: make_pool(kind, B, N).mamba_cache for name, kind in pools.items()}
    print(json.dumps({name: stores(x.intermediate_conv_window[0][0], x.conv[0][0]) for name, x in caches.items()}))


if __name__ == "__main__":
    main()
