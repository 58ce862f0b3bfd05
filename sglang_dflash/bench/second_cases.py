"""The kernels of a DFlash 2 draft: its convolution and its selector."""

import torch
from sglang_dflash_kernels.block_conv import block_conv, block_conv_ref
from sglang_dflash_kernels.select_path import select_path, select_path_ref

from sglang_dflash.bench.case import ROUNDING, Case, Sizes, assert_close, assert_equal


def block_conv_case(B: int, N: int, sizes: Sizes, device: str) -> Case:
    """One side of one sublayer; a draft of L layers has 4 L of these."""
    S, H, J, _, _ = sizes.second
    change_T2SJ, base_2SH = torch.randn(B * N, 2, S, J, device=device), torch.randn(2, S, H, device=device)
    x_TH = torch.randn(B * N, H, device=device).to(sizes.dtype)
    args = x_TH, change_T2SJ.to(sizes.dtype)[:, 1], base_2SH.to(sizes.dtype)[1]

    def launch() -> torch.Tensor:
        return block_conv(*args, block_size=N)

    def check() -> None:
        exact = block_conv_ref(*(tensor.float() for tensor in args), block_size=N)
        bound = ROUNDING if sizes.dtype == torch.float32 else 2**-8  # rounded to bf16
        assert_close(launch().float(), exact, within=bound)

    n_values = B * N * (2 * H + S * J) + S * H
    return Case("block_conv", f"B={B} N={N}, a side", n_values * x_TH.element_size(), launch, check)


def select_path_case(B: int, N: int, sizes: Sizes, device: str) -> Case:
    """Small whole numbers, so that sums are exact and the paths must be the definition's, ties and all."""
    (_, _, _, K, R), V, D = sizes.second, sizes.n_vocab, N - 1

    def values(*size: int) -> torch.Tensor:
        return torch.randint(-1, 2, size, device=device, dtype=torch.int8).to(sizes.dtype)

    candidates_BDK = torch.randint(V, (B, D, K), device=device)
    args = candidates_BDK, values(B, D, K).float(), values(B, D, R), torch.randint(V, (B,), device=device)
    predecessor_VR, successor_VR = values(V, R), values(V, R)

    def launch() -> torch.Tensor:
        return select_path(*args, predecessor_VR=predecessor_VR, successor_VR=successor_VR)

    def check() -> None:
        want = select_path_ref(*args, predecessor_VR=predecessor_VR, successor_VR=successor_VR)
        assert_equal((launch(),), (want,))

    n_bytes = B * D * (R * (K + 2) * successor_VR.element_size() + 12 * K + 8) + 8 * B
    return Case("select_path", f"B={B} N={N}", n_bytes, launch, check)
