"""The fastest dtype is bf16 on processors with instructions for it, and fp32 on all others."""

from pathlib import Path

import pytest
import torch

from sglang_dflash.pairs.smollm2.processor import fastest_dtype


@pytest.mark.parametrize(
    ("flags", "dtype"),
    [
        ("avx2 avx512f avx512_bf16", torch.bfloat16),
        ("avx512f amx_bf16 amx_tile", torch.bfloat16),
        ("asimd bf16", torch.bfloat16),
        ("avx2 avx512f", torch.float32),
    ],
)
def test_dtype_follows_the_instructions(tmp_path: Path, flags: str, dtype: torch.dtype) -> None:
    cpuinfo = tmp_path / "cpuinfo"
    cpuinfo.write_text(f"processor\t: 0\nflags\t\t: fpu {flags}\nbogomips\t: 2\n")
    assert fastest_dtype(cpuinfo) == dtype


def test_a_system_without_the_file_computes_in_fp32(tmp_path: Path) -> None:
    assert fastest_dtype(tmp_path / "cpuinfo") == torch.float32
