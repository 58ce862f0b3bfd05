"""Attention backends that may run a draft. The rules are plain functions, so they are tested for every GPU on a CPU."""

import itertools
from dataclasses import replace

import pytest
import torch

from sglang_dflash.engine.host.arguments import device_of
from sglang_dflash.engine.host.backends import BACKENDS, Needs, resolve, why_not
from sglang_dflash.errors import STOCK, NotSupported

SOME_FULL, ALL_SLIDING = True, False
DEVICES = ["cpu", "sm80", "sm89", "sm90", "sm100", "sm110", "sm120"]
E4M3 = "fp8_e4m3"
AUTO = "--speculative-draft-kv-cache-dtype auto"


@pytest.mark.parametrize(
    ("name", "device", "kv_dtype", "fits"),
    [
        # fa3 and fa4. An H200 (sm90) runs both.
        ("fa3", "sm90", "auto", True),
        ("fa3", "sm90", E4M3, True),
        ("fa3", "sm80", "auto", True),
        ("fa3", "sm100", "auto", False),
        ("fa4", "sm100", "auto", True),
        ("fa4", "sm80", "auto", False),
        ("fa4", "sm120", "auto", True),
        # Backends other than fa3 and fa4.
        ("trtllm_mha", "sm90", "auto", True),
        ("trtllm_mha", "sm100", "auto", True),
        ("trtllm_mha", "sm100", E4M3, True),
        ("flashinfer", "sm120", "auto", True),
        ("triton", "sm100", "auto", True),
        ("triton", "cpu", "auto", False),
        ("torch_native", "cpu", "auto", True),
        ("torch_native", "cpu", E4M3, False),
        ("torch_native", "sm90", "auto", False),
        ("flex_attention", "sm90", "auto", False),
        # An fp8 KV cache must have type e4m3, and needs compute capability 8.9 or higher. With fa3 it needs sm90. With
        # fa4 the flag has no effect, because SGLang keeps the draft's cache in the draft's dtype.
        *((name, "sm80", E4M3, False) for name in BACKENDS),
        ("fa3", "sm89", E4M3, False),
        ("flashinfer", "sm89", E4M3, True),
        ("triton", "sm89", E4M3, True),
        *((name, "sm90", "fp8_e5m2", name == "fa4") for name in BACKENDS),
        *((name, "sm100", "mxfp8", name == "fa4") for name in BACKENDS),
        ("fa4", "sm100", E4M3, True),
        ("flashinfer", "sm80", "bf16", True),
    ],
)
def test_backends_fit_devices_and_kv_dtypes(name, device, kv_dtype, fits):
    for whole_blocks in (SOME_FULL, ALL_SLIDING):
        assert (why_not(name, Needs(whole_blocks, device, kv_dtype)) == "") is fits


@pytest.mark.parametrize("name", BACKENDS)
def test_sinks_are_used_or_refused(name):
    needs = Needs(SOME_FULL, BACKENDS[name].devices[-1], sinks=True)
    refused = "it has no attention sinks, which this draft has"
    assert why_not(name, needs) == (refused if name in ("flashinfer", "torch_native") else "")


@pytest.mark.parametrize(("page_size", "fits"), [(1, False), (16, True), (64, True), (128, True), (256, False)])
def test_trtllm_needs_its_page_sizes(page_size, fits):
    for name in BACKENDS:
        needs = Needs(ALL_SLIDING, BACKENDS[name].devices[-1], page_size=page_size)
        assert (why_not(name, needs) == "") is (fits or name != "trtllm_mha")
    assert why_not("trtllm_mha", Needs(ALL_SLIDING, "sm100", page_size=None)) == ""


@pytest.mark.parametrize(
    ("asked", "target", "device", "whole_blocks", "page_size", "chosen"),
    [
        (None, "fa3", "sm90", SOME_FULL, 1, "fa3"),  # the default on an H200
        ("triton", "fa3", "sm90", SOME_FULL, 1, "triton"),
        (None, "trtllm_mha", "sm90", SOME_FULL, 64, "fa3"),
        # trtllm_mha, the target's default on a B200, would read the context once per slot in a full layer.
        (None, "trtllm_mha", "sm100", SOME_FULL, 64, "fa4"),
        (None, "trtllm_mha", "sm100", ALL_SLIDING, 64, "trtllm_mha"),
        ("trtllm_mha", "fa4", "sm100", SOME_FULL, 128, "trtllm_mha"),
        (None, "trtllm_mha", "sm120", SOME_FULL, 64, "fa4"),
        (None, "flashinfer", "sm120", SOME_FULL, 1, "flashinfer"),
        (None, "flashinfer", "sm80", SOME_FULL, 1, "flashinfer"),
        (None, "flex_attention", "sm90", SOME_FULL, 1, "fa3"),
        (None, None, "cpu", SOME_FULL, 1, "torch_native"),
    ],
)
def test_resolve(asked, target, device, whole_blocks, page_size, chosen):
    assert resolve(asked=asked, target=target, needs=Needs(whole_blocks, device, page_size=page_size)) == chosen


@pytest.mark.parametrize(
    ("device", "kv_dtype", "chosen"),
    [("sm80", "auto", "fa3"), ("sm89", "auto", "fa3"), ("sm120", "auto", "fa4"), ("sm89", E4M3, "triton")],
)
def test_sliding_layers_do_not_follow_a_target_on_flashinfer(device, kv_dtype, chosen):
    """With windows FlashInfer's plan waits for the GPU at every step. Its flag still selects it."""
    needs = Needs(SOME_FULL, device, kv_dtype, slides=True)
    assert resolve(asked=None, target="flashinfer", needs=needs) == chosen
    assert resolve(asked="flashinfer", target="flashinfer", needs=replace(needs, kv_dtype="auto")) == "flashinfer"


def test_an_fp8_target_on_a_b200_keeps_its_fa4_draft():
    needs = Needs(SOME_FULL, "sm100", kv_dtype=E4M3, page_size=64)
    assert resolve(asked="fa4", target="trtllm_mha", needs=needs) == "fa4"
    assert resolve(asked=None, target="trtllm_mha", needs=needs) == "fa4"


@pytest.mark.parametrize("device", DEVICES)
def test_resolved_backends_fit(device):
    for whole_blocks, kv_dtype, page_size in itertools.product(
        (SOME_FULL, ALL_SLIDING), ("auto", E4M3, "fp8_e5m2"), (1, 64)
    ):
        needs = Needs(whole_blocks, device, kv_dtype, page_size)
        for target in (*BACKENDS, "hpc_ops", None):
            try:
                chosen = resolve(asked=None, target=target, needs=needs)
            except NotSupported:
                assert all(why_not(name, needs) for name in BACKENDS)
            else:
                assert why_not(chosen, needs) == ""


def test_an_explicit_backend_is_never_replaced():
    with pytest.raises(
        NotSupported,
        match=r"^--speculative-draft-attention-backend trtllm_mha: it needs a --page-size of 16 or 32 or 64 or 128, "
        "not 1; use fa4 or flashinfer or triton$",
    ):
        resolve(asked="trtllm_mha", target="trtllm_mha", needs=Needs(SOME_FULL, "sm100", page_size=1))


@pytest.mark.parametrize("device", ["sm80", "cpu"])
def test_the_error_names_the_flag_where_nothing_reads_fp8(device):
    with pytest.raises(NotSupported, match=rf"KV cache of {E4M3} on {device}; set {AUTO}$"):
        resolve(asked=None, target="flashinfer", needs=Needs(SOME_FULL, device, kv_dtype=E4M3))


@pytest.mark.parametrize(
    ("asked", "device", "kv_dtype", "cure"),
    [
        ("fa4", "sm80", "auto", "use fa3 or flashinfer or triton"),
        ("fa3", "sm90", "fp8_e5m2", f"use fa4, or set {AUTO}"),
        ("fa3", "sm80", E4M3, f"set {AUTO}"),
        ("triton", "cpu", E4M3, f"use torch_native with {AUTO}"),
        ("triton", "rocm", "auto", f"no backend of this plugin runs on rocm, so {STOCK}"),
        ("triton", "rocm", E4M3, f"no backend of this plugin runs on rocm, so {STOCK}"),
        (None, "sm70", "auto", STOCK),
        (None, "sm70", E4M3, STOCK),
    ],
)
def test_the_cure_helps_on_the_device(asked, device, kv_dtype, cure):
    with pytest.raises(NotSupported) as refusal:
        resolve(asked=asked, target=None, needs=Needs(SOME_FULL, device, kv_dtype))
    assert str(refusal.value).partition("; ")[2] == cure


@pytest.mark.parametrize(
    ("capability", "device"),
    [((8, 0), "sm80"), ((8, 6), "sm80"), ((8, 9), "sm89"), ((9, 0), "sm90"), ((10, 3), "sm100"), ((12, 1), "sm120")],
)
def test_devices(capability, device, monkeypatch):
    monkeypatch.setattr(torch.version, "cuda", "12.9")
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda: capability)
    assert device_of("cuda") == device
    assert device_of("cuda:1") == device
