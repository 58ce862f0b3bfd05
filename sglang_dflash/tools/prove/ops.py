"""Checks of single kernels of `sglang_dflash_kernels`: agreement with their torch definitions, and bandwidth.

In the GPU emulation kernels run in Triton's interpreter, at small sizes.
"""

import pytest
from sglang_dflash_kernels.cases.make import make_cases
from sglang_dflash_kernels.cases.sizes import QWEN_27B, SMALL, Case
from sglang_dflash_kernels.cases.times import timed
from sglang_dflash_kernels.dispatch import override
from triton.errors import TritonError

from sglang_dflash.tools.prove.machine import Place
from sglang_dflash.tools.prove.plugin import Finding, Found, check

N_ROUNDS, N_ROUNDS_SHORT = 100, 20
N_SHOWN = 3  # number of failed cases that the finding's text names at most
BUSY, ALONE = "B=8 N=16", "B=1 N=16"  # shapes that the finding's text mentions
# Memory bandwidths of the data sheets, in bytes per us. A copy reaches about nine tenths.
PUBLISHED = {"NVIDIA H200": 4.8e6, "NVIDIA H100 80GB HBM3": 3.35e6, "NVIDIA B200": 8.0e6}


@pytest.fixture(scope="module")
def cases(place: Place) -> list[Case]:
    override(lambda forms: forms.on_gpu)
    return make_cases(SMALL, "cpu") if place.gpu is None else make_cases(QWEN_27B, "cuda")


@check("kernels", "each kernel computes its definition", 4, short=True)
def check_kernels(place: Place, cases: list[Case], found: Found) -> None:
    wrong = {}
    for case in cases:
        try:
            case.check()
        except (AssertionError, RuntimeError, ValueError, TypeError, TritonError) as error:
            wrong[f"{case.op} {case.shape}"] = str(error)
    sizes = "small sizes, interpreted" if place.gpu is None else "sizes of a 27B target"
    text = f"{len(cases) - len(wrong)} of {len(cases)} cases agree with their definitions, {sizes}"
    shown = [f"{name}: {why}" for name, why in wrong.items()][:N_SHOWN]
    numbers = {"cases": [f"{case.op} {case.shape}" for case in cases], "wrong": wrong}
    found(Finding("; ".join([text, *shown]), numbers, not wrong))


@check("bandwidth", "time of each kernel, and its share of the bandwidth", 3, short=True, gpu=True,
       expected="seen on an H200: copy_draft alone 11 us at 32k tokens")  # fmt: skip
def check_bandwidth(place: Place, cases: list[Case], found: Found) -> None:
    """Time each case. Each round also times a plain copy. Kernels that fail the check `kernels` are timed too."""
    assert place.gpu is not None
    bytes_per_us, rows = timed(cases, N_ROUNDS_SHORT if place.short else N_ROUNDS)
    published = PUBLISHED.get(place.gpu.name)
    of_sheet = f", {bytes_per_us / published:.0%} of the data sheet's {published / 1e6:g}" if published else ""
    busy = [row for row in rows if row["shape"].startswith(BUSY)]
    shown = ", ".join(f"{row['op']} {row['us']:.1f} us {row['share_of_floor']:.0%}" for row in busy)
    alone = [row["us"] for row in rows if row["op"] == "copy_draft" and row["shape"].startswith(ALONE)]
    text = f"a copy reaches {bytes_per_us / 1e6:.2f} TB/s{of_sheet}; copy_draft alone "
    text += f"{', '.join(f'{us:.1f} us' for us in alone)}; {BUSY}: {shown}"
    numbers = {"copy_bytes_per_us": bytes_per_us, "data_sheet": published, "cases": rows}
    found(Finding(text, numbers))
