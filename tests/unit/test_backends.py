"""Which backend may run which draft. The rules are pure, so every GPU is tested here, on a CPU."""

import itertools

import pytest

from sglang_dflash.backends import BACKENDS, resolve, why_not
from sglang_dflash.checkpoint import Layer
from sglang_dflash.errors import NotSupported

FULL, SLIDING = Layer(None, causal=False), Layer(2048, causal=True)
CAUSAL, BLIND_WINDOW = Layer(None, causal=True), Layer(2048, causal=False)
ALL_FULL, MIXED, ALL_SLIDING = (FULL,) * 5, (SLIDING,) * 4 + (FULL,), (SLIDING,) * 5


@pytest.mark.parametrize(
    ("name", "device", "layers", "fp8_kv", "fits"),
    [
        # An H200: fa3 everywhere, whatever the layers; fa4 too.
        ("fa3", "sm90", ALL_FULL, False, True),
        ("fa3", "sm90", MIXED, True, True),
        ("fa3", "sm80", ALL_FULL, False, True),
        ("fa3", "sm100", ALL_FULL, False, False),
        ("fa4", "sm100", MIXED, False, True),
        ("fa4", "sm100", MIXED, True, False),
        ("fa4", "sm80", ALL_FULL, False, False),
        # trtllm_mha masks later slots of a block: right for causal layers only.
        ("trtllm_mha", "sm100", ALL_SLIDING, False, True),
        ("trtllm_mha", "sm100", (CAUSAL,) * 2, False, True),
        ("trtllm_mha", "sm100", MIXED, False, False),
        ("trtllm_mha", "sm100", ALL_FULL, False, False),
        # All layers slide, and yet the mask is wrong: SGLang lets this one pass.
        ("trtllm_mha", "sm100", (BLIND_WINDOW,) * 5, False, False),
        ("flashinfer", "sm120", MIXED, False, True),
        ("triton", "sm100", MIXED, False, True),
        ("triton", "cpu", ALL_FULL, False, False),
        ("torch_native", "cpu", MIXED, False, True),
        ("torch_native", "cpu", MIXED, True, False),
        ("torch_native", "sm90", ALL_FULL, False, False),
        ("flex_attention", "sm90", ALL_FULL, False, False),
    ],
)
def test_fits(name: str, device: str, layers: tuple[Layer, ...], fp8_kv: bool, fits: bool) -> None:
    assert (why_not(name, layers=layers, device=device, fp8_kv=fp8_kv) == "") is fits


@pytest.mark.parametrize(
    ("asked", "target", "device", "layers", "chosen"),
    [
        (None, "fa3", "sm90", ALL_FULL, "fa3"),  # the default on an H200
        ("triton", "fa3", "sm90", ALL_FULL, "triton"),
        (None, "trtllm_mha", "sm100", ALL_FULL, "fa4"),  # a B200's default target backend cannot run this draft
        (None, "trtllm_mha", "sm100", ALL_SLIDING, "trtllm_mha"),
        (None, "trtllm_mha", "sm120", ALL_FULL, "flashinfer"),
        (None, "flex_attention", "sm90", MIXED, "fa3"),
        (None, None, "cpu", ALL_FULL, "torch_native"),
    ],
)
def test_resolve(asked: str | None, target: str | None, device: str, layers: tuple[Layer, ...], chosen: str) -> None:
    assert resolve(asked=asked, target=target, layers=layers, device=device, fp8_kv=False).name == chosen


@pytest.mark.parametrize("device", ["cpu", "sm80", "sm90", "sm100", "sm110", "sm120"])
def test_what_is_resolved_fits(device: str) -> None:
    layer_kinds = (ALL_FULL, MIXED, ALL_SLIDING, (BLIND_WINDOW,) * 5)
    for layers, fp8_kv, target in itertools.product(layer_kinds, (False, True), (*BACKENDS, "hpc_ops", None)):
        try:
            choice = resolve(asked=None, target=target, layers=layers, device=device, fp8_kv=fp8_kv)
        except NotSupported:
            assert all(why_not(name, layers=layers, device=device, fp8_kv=fp8_kv) for name in BACKENDS)
        else:
            assert why_not(choice.name, layers=layers, device=device, fp8_kv=fp8_kv) == ""


def test_a_backend_that_was_asked_for_is_never_replaced() -> None:
    with pytest.raises(
        NotSupported,
        match=r"^--speculative-draft-attention-backend trtllm_mha: it masks .*; use fa4 or flashinfer or triton$",
    ):
        resolve(asked="trtllm_mha", target="trtllm_mha", layers=MIXED, device="sm100", fp8_kv=False)
