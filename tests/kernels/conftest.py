"""Kernels run on the GPU where there is one, else in Triton's interpreter on CPU; uninitialised memory is poison.

Triton decides while it is imported whether it interprets, so without a GPU these tests need a process of their own.
The interpreter computes what a kernel says. About races, alignment, registers and speed it says nothing, and it
truncates to bf16 and misrounds to fp8 where hardware rounds to nearest: those comparisons wait for a GPU.
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

import triton  # noqa: E402, as that says


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Tests marked `gpu` are skipped without one."""
    if DEVICE == "cpu":
        for item in items:
            if item.get_closest_marker("gpu"):
                item.add_marker(pytest.mark.skip(reason="needs a CUDA device"))


@pytest.fixture
def device() -> str:
    return DEVICE


@pytest.fixture(autouse=True)
def poisoned_empty(monkeypatch: pytest.MonkeyPatch) -> None:
    """Uninitialised memory is -7 or NaN, so a kernel that leaves a cell unwritten fails its comparison."""

    def poisoned(allocate: Callable[..., torch.Tensor]) -> Callable[..., torch.Tensor]:
        def allocate_poison(*args: object, **kwargs: object) -> torch.Tensor:
            memory = allocate(*args, **kwargs)
            return memory.fill_(float("nan") if memory.is_floating_point() else -7)

        return allocate_poison

    monkeypatch.setattr(torch, "empty", poisoned(torch.empty))
    monkeypatch.setattr(torch, "empty_like", poisoned(torch.empty_like))


@pytest.fixture
def bfloat16_dots(monkeypatch: pytest.MonkeyPatch) -> None:
    """The interpreter keeps bf16 numbers as the integers of their bits, and multiplies those. Here it multiplies the
    numbers, as fp32, in which a product of two is exact."""
    if DEVICE != "cpu":
        return
    interpreter = importlib.import_module("triton.runtime.interpreter")
    stock = interpreter.InterpreterBuilder.create_dot

    def create_dot(builder: Any, a: Any, b: Any, *others: Any) -> Any:
        def numbers(x: Any) -> Any:
            return builder.cast_impl(x, triton.language.float32) if x.dtype == triton.language.bfloat16 else x

        return stock(builder, numbers(a), numbers(b), *others)

    monkeypatch.setattr(interpreter.InterpreterBuilder, "create_dot", create_dot)
