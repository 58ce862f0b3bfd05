"""Our kernels by themselves: they need torch and Triton, and nothing of SGLang.

In rehearsal the ops are told to run their kernels on CPU tensors too, in Triton's interpreter (`Place.child_env`), so
these checks belong into a process of their own.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from sglang_dflash.prove.machine import Place
from sglang_dflash.prove.record import Finding, Once, require

if TYPE_CHECKING:
    from sglang_dflash_kernels.cases.sizes import Case

N_ROUNDS, N_ROUNDS_SHORT = 100, 20
N_SHOWN = 3
BUSY = "B=8 N=16"  # of the cases that are named in a line
EXPECTED = "H200: copy_draft alone 6 us at 32k tokens (predicted; bound 40)"
# What data sheets say, bytes per us; a copy reaches nine tenths of it.
PUBLISHED = {"H200": 4.8e6, "H100": 3.35e6, "B200": 8.0e6}


def make(place: Place) -> list[Case]:
    if place.gpu is None:
        interpret()
    from sglang_dflash_kernels.cases import make as kernel_cases
    from sglang_dflash_kernels.cases import sizes as case

    if place.gpu is None:
        return kernel_cases.make_cases(case.SMALL, "cpu")
    return kernel_cases.make_cases(case.QWEN_27B, "cuda")


def interpret() -> None:
    """Run kernels on CPU tensors, in Triton's interpreter."""
    from sglang_dflash_kernels.dispatch import override

    override(lambda forms: forms.on_gpu)


cases = Once(make)


def definitions(place: Place) -> Finding:
    made, wrong = cases(place), {}
    for case in made:
        try:
            case.check()
        except (AssertionError, RuntimeError, ValueError, TypeError) as error:
            wrong[f"{case.op} {case.shape}"] = str(error)
    sizes = "small sizes, interpreted" if place.gpu is None else "sizes of a 27B target"
    text = f"{len(made) - len(wrong)} of {len(made)} cases agree with their definitions, {sizes}"
    if wrong:
        text += "; " + "; ".join(f"{name}: {why}" for name, why in list(wrong.items())[:N_SHOWN])
    return require(not wrong, text, {"cases": [f"{case.op} {case.shape}" for case in made], "wrong": wrong})


def bandwidth(place: Place) -> Finding:
    """Microseconds of each case, and its share of the bandwidth of a copy. A kernel that is wrong is timed too: the
    check before this one names it."""
    from sglang_dflash_kernels.cases.times import timed

    assert place.gpu is not None, "times are a GPU's"
    bytes_per_us, rows = timed(cases(place), N_ROUNDS_SHORT if place.short else N_ROUNDS)
    published = next((rate for name, rate in PUBLISHED.items() if name in place.gpu.name), None)
    of_sheet = f", {bytes_per_us / published:.0%} of the data sheet's" if published else ""
    shown = [
        f"{row['op']} {row['us']:.1f} us {row['share_of_floor']:.0%}" for row in rows if row["shape"].startswith(BUSY)
    ]
    alone = [f"{row['us']:.1f} us" for row in rows if row["op"] == "copy_draft" and row["shape"].startswith("B=1 N=16")]
    text = (
        f"a copy reaches {bytes_per_us / 1e6:.2f} TB/s{of_sheet}; copy_draft alone {', '.join(alone)}; "
        f"{BUSY}: {', '.join(shown)}"
    )
    return Finding(text, {"copy_bytes_per_us": bytes_per_us, "data_sheet": published, "cases": rows})
