"""Kernels run on the GPU if there is one, else in Triton's interpreter; uninitialised memory is poisoned.

Triton decides at import whether to interpret, so without a GPU these tests need a process of their own. The interpreter
shows values only: no races, alignment, registers or speed. It truncates to bf16 and misrounds to fp8, where hardware
rounds to nearest, so comparisons of bf16 and fp8 results need a GPU.
"""

import importlib
import os
import sys
from collections.abc import Callable
from typing import Any

import pytest
import torch

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
if DEVICE == "cpu":
    if "triton" in sys.modules and os.environ.get("TRITON_INTERPRET") != "1":
        raise pytest.UsageError("Triton is already imported, uninterpreted; run `pytest tests/kernels` by itself")
    os.environ["TRITON_INTERPRET"] = "1"

import triton  # noqa: E402  (after the variable that Triton reads at import)


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    if DEVICE == "cpu":
        for item in items:
            if item.get_closest_marker("gpu"):
                item.add_marker(pytest.mark.skip(reason="needs a CUDA device"))


@pytest.fixture
def device() -> str:
    return DEVICE


@pytest.fixture(autouse=True)
def poisoned_empty(monkeypatch: pytest.MonkeyPatch) -> None:
    """Fill memory of `torch.empty` and `empty_like` with -7 (integers) or NaN.

    So a comparison fails if a kernel leaves an element unwritten.
    """

    def poisoned(allocate: Callable[..., torch.Tensor]) -> Callable[..., torch.Tensor]:
        def allocate_poison(*args: object, **kwargs: object) -> torch.Tensor:
            memory = allocate(*args, **kwargs)
            return memory.fill_(float("nan") if memory.is_floating_point() else -7)

        return allocate_poison

    monkeypatch.setattr(torch, "empty", poisoned(torch.empty))
    monkeypatch.setattr(torch, "empty_like", poisoned(torch.empty_like))


@pytest.fixture
def bfloat16_dots(monkeypatch: pytest.MonkeyPatch) -> None:
    """Make the interpreter's `tl.dot` convert bf16 inputs to fp32, in which a product of two bf16 numbers is exact.

    The interpreter stores a bf16 number as the integer of its bits, and would multiply these integers.
    """
    if DEVICE != "cpu":
        return
    interpreter = importlib.import_module("triton.runtime.interpreter")
    stock = interpreter.InterpreterBuilder.create_dot

    def create_dot(builder: Any, a: Any, b: Any, *others: Any) -> Any:
        def numbers(x: Any) -> Any:
            return builder.cast_impl(x, triton.language.float32) if x.dtype == triton.language.bfloat16 else x

        return stock(builder, numbers(a), numbers(b), *others)

    monkeypatch.setattr(interpreter.InterpreterBuilder, "create_dot", create_dot)
