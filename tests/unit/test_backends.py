"""Which backend may run which draft. The rules are pure, so every GPU is tested here, on a CPU."""

import itertools

import pytest
import torch

from sglang_dflash.draft.checkpoint import Layer
from sglang_dflash.errors import NotSupported
from sglang_dflash.host.arguments import device_of
from sglang_dflash.host.backends import BACKENDS, Needs, resolve, why_not

FULL, SLIDING = Layer(None, causal=False), Layer(2048, causal=True)
CAUSAL, BLIND_WINDOW = Layer(None, causal=True), Layer(2048, causal=False)
ALL_FULL, MIXED, ALL_SLIDING = (FULL,) * 5, (SLIDING,) * 4 + (FULL,), (SLIDING,) * 5
DEVICES = ["cpu", "sm80", "sm89", "sm90", "sm100", "sm110", "sm120"]
E4M3 = "fp8_e4m3"


@pytest.mark.parametrize(
    ("name", "device", "layers", "kv_dtype", "fits"),
    [
        # An H200: fa3 everywhere, whatever the layers; fa4 too.
        ("fa3", "sm90", ALL_FULL, "auto", True),
        ("fa3", "sm90", MIXED, E4M3, True),
        ("fa3", "sm80", ALL_FULL, "auto", True),
        ("fa3", "sm100", ALL_FULL, "auto", False),
        ("fa4", "sm100", MIXED, "auto", True),
        ("fa4", "sm80", ALL_FULL, "auto", False),
        ("fa4", "sm120", MIXED, "auto", True),
        # The published mixes, on the mission's GPUs.
        ("trtllm_mha", "sm90", MIXED, "auto", True),
        ("trtllm_mha", "sm100", ALL_SLIDING, "auto", True),
        ("trtllm_mha", "sm100", (CAUSAL,) * 2, "auto", True),
        ("trtllm_mha", "sm100", MIXED, "auto", True),
        ("trtllm_mha", "sm100", ALL_FULL, E4M3, True),
        # All layers slide, and yet the mask is wrong: SGLang lets this one pass.
        ("trtllm_mha", "sm100", (BLIND_WINDOW,) * 5, "auto", False),
        ("flashinfer", "sm120", MIXED, "auto", True),
        ("triton", "sm100", MIXED, "auto", True),
        ("triton", "cpu", ALL_FULL, "auto", False),
        ("torch_native", "cpu", MIXED, "auto", True),
        ("torch_native", "cpu", MIXED, E4M3, False),
        ("torch_native", "sm90", ALL_FULL, "auto", False),
        ("flex_attention", "sm90", ALL_FULL, "auto", False),
        # fp8: no kernel below 8.9, fa3 on Hopper alone; one of the two fp8 types is written.
        *((name, "sm80", MIXED, E4M3, False) for name in BACKENDS),
        ("fa3", "sm89", MIXED, E4M3, False),
        ("flashinfer", "sm89", MIXED, E4M3, True),
        ("triton", "sm89", MIXED, E4M3, True),
        *((name, "sm90", MIXED, "fp8_e5m2", name == "fa4") for name in BACKENDS),
        *((name, "sm100", MIXED, "mxfp8", name == "fa4") for name in BACKENDS),
        # SGLang gives an fa4 draft a cache of its own.
        ("fa4", "sm100", MIXED, E4M3, True),
        ("flashinfer", "sm80", MIXED, "bf16", True),
    ],
)
def test_fits(name: str, device: str, layers: tuple[Layer, ...], kv_dtype: str, fits: bool) -> None:
    assert (why_not(name, Needs(layers, device, kv_dtype)) == "") is fits


@pytest.mark.parametrize(("page_size", "fits"), [(1, False), (16, True), (64, True), (128, True), (256, False)])
def test_pages(page_size: int, fits: bool) -> None:
    for name in BACKENDS:
        needs = Needs(ALL_SLIDING, BACKENDS[name].devices[-1], page_size=page_size)
        assert (why_not(name, needs) == "") is (fits or name != "trtllm_mha")
    assert why_not("trtllm_mha", Needs(ALL_SLIDING, "sm100", page_size=None)) == ""


@pytest.mark.parametrize(
    ("asked", "target", "device", "layers", "page_size", "chosen"),
    [
        (None, "fa3", "sm90", ALL_FULL, 1, "fa3"),  # the default on an H200
        ("triton", "fa3", "sm90", ALL_FULL, 1, "triton"),
        (None, "trtllm_mha", "sm90", MIXED, 64, "fa3"),
        # A B200's default target backend reads the context of a full layer once for every slot.
        (None, "trtllm_mha", "sm100", ALL_FULL, 64, "fa4"),
        (None, "trtllm_mha", "sm100", ALL_SLIDING, 64, "trtllm_mha"),
        ("trtllm_mha", "fa4", "sm100", ALL_FULL, 128, "trtllm_mha"),
        (None, "trtllm_mha", "sm120", ALL_FULL, 64, "fa4"),
        (None, "flashinfer", "sm120", MIXED, 1, "flashinfer"),
        (None, "flashinfer", "sm80", MIXED, 1, "flashinfer"),
        (None, "flex_attention", "sm90", MIXED, 1, "fa3"),
        (None, None, "cpu", ALL_FULL, 1, "torch_native"),
    ],
)
def test_resolve(
    asked: str | None, target: str | None, device: str, layers: tuple[Layer, ...], page_size: int, chosen: str
) -> None:
    assert resolve(asked=asked, target=target, needs=Needs(layers, device, page_size=page_size)).name == chosen


def test_an_fp8_target_on_a_b200_keeps_its_fa4_draft() -> None:
    needs = Needs(MIXED, "sm100", kv_dtype=E4M3, page_size=64)
    assert resolve(asked="fa4", target="trtllm_mha", needs=needs).name == "fa4"
    assert resolve(asked=None, target="trtllm_mha", needs=needs).name == "fa4"


@pytest.mark.parametrize("device", DEVICES)
def test_what_is_resolved_fits(device: str) -> None:
    layer_kinds = (ALL_FULL, MIXED, ALL_SLIDING, (BLIND_WINDOW,) * 5)
    for layers, kv_dtype, page_size in itertools.product(layer_kinds, ("auto", E4M3, "fp8_e5m2"), (1, 64)):
        needs = Needs(layers, device, kv_dtype, page_size)
        for target in (*BACKENDS, "hpc_ops", None):
            try:
                choice = resolve(asked=None, target=target, needs=needs)
            except NotSupported:
                assert all(why_not(name, needs) for name in BACKENDS)
            else:
                assert why_not(choice.name, needs) == ""


def test_a_backend_that_was_asked_for_is_never_replaced() -> None:
    with pytest.raises(
        NotSupported,
        match=r"^--speculative-draft-attention-backend trtllm_mha: it needs --page-size 16, 32, 64, 128, not 1; "
        "use fa4 or flashinfer or triton$",
    ):
        resolve(asked="trtllm_mha", target="trtllm_mha", needs=Needs(MIXED, "sm100", page_size=1))


@pytest.mark.parametrize("device", ["sm80", "cpu"])
def test_where_nothing_reads_fp8_the_flag_that_mends_it_is_named(device: str) -> None:
    with pytest.raises(NotSupported, match=rf"on {device} with a KV cache of {E4M3}; .* auto keeps its own"):
        resolve(asked=None, target="flashinfer", needs=Needs(MIXED, device, kv_dtype=E4M3))


@pytest.mark.parametrize(
    ("capability", "device"),
    [((8, 0), "sm80"), ((8, 6), "sm80"), ((8, 9), "sm89"), ((9, 0), "sm90"), ((10, 3), "sm100"), ((12, 1), "sm120")],
)
def test_devices(capability: tuple[int, int], device: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.version, "cuda", "12.9")
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda: capability)
    assert device_of("cuda") == device
    assert device_of("cuda:1") == device
