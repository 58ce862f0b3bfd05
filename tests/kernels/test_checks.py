"""Ops must refuse arguments that do not fit, and choose CPU form or GPU form (Triton kernel) by the tensors' device."""

import pytest
import torch
from sglang_dflash_kernels import accept as accept_module
from sglang_dflash_kernels.accept import accept
from sglang_dflash_kernels.append_context import ContextCaches, KeyTransform, append_context
from sglang_dflash_kernels.checks import Shapes
from sglang_dflash_kernels.dispatch import Forms, override
from sglang_dflash_kernels.plan_block import plan_block

INT64 = torch.int64


def block(B: int, N: int) -> torch.Tensor:
    return torch.zeros(B, N, dtype=INT64)


def test_shapes_learns_sizes():
    shapes = Shapes()
    shapes.check(INT64, tokens_BN=block(3, 4), prefix_len_B=block(3, 1)[:, 0])
    assert (shapes["B"], shapes["N"]) == (3, 4)


@pytest.mark.parametrize(
    ("second", "message"),
    [
        (block(3, 5), r"other_BN has shape \(3, 5\)"),
        (block(2, 4), r"other_BN has shape \(2, 4\)"),
        (block(3, 4)[0], r"other_BN has shape \(4,\)"),
        (block(3, 1)[:, 0], r"other_BN has shape \(3,\)"),
        (block(3, 4)[None], r"other_BN has shape \(1, 3, 4\)"),
        (block(3, 4).int(), r"other_BN is torch.int32; pass torch.int64"),
        (block(4, 3).t(), r"other_BN has strides \(1, 3\)"),
        (block(3, 4).to("meta"), r"other_BN is on meta, the others on cpu"),
    ],
)
def test_shapes_refuses(second, message):
    with pytest.raises(ValueError, match=message):
        Shapes().check(INT64, tokens_BN=block(3, 4), other_BN=second)


def test_cpu_tensors_run_the_cpu_form(monkeypatch):
    monkeypatch.setattr(accept_module, "ACCEPT", Forms(accept_module.accept_torch, None))  # no kernel to call
    assert accept(block(1, 2), block(1, 2), block(1, 1)[0]).n_accepted_B.tolist() == [1]


def test_other_tensors_run_the_kernel():
    assert Forms(on_cpu=min, on_gpu=max).form_for(torch.zeros(1, device="meta")) is max


def test_forms_are_overridden_for_all_ops(monkeypatch):
    monkeypatch.setattr(Forms, "_override", None)  # so that pytest undoes the override when the test ends
    override(lambda forms: forms.on_gpu)
    assert Forms(on_cpu=min, on_gpu=max).form_for(torch.zeros(1)) is max


def test_accept_refuses_a_slice_of_a_wider_block():
    with pytest.raises(ValueError, match=r"pass tokens_BN\.contiguous"):
        accept(block(2, 8)[:, :4], block(2, 4), block(2, 1)[:, 0])


def test_plan_block_refuses_another_table_dtype():
    row_B = block(1, 2)[:, 0]
    with pytest.raises(ValueError, match=r"req_to_token_QM is torch.int64; pass torch.int32"):
        plan_block(row_B, row_B, row_B, block(4, 9), mask_token_id=0, n_tokens=2)


def append(**changes) -> None:
    """Call `append_context` on two requests of two rows, one layer, and two heads of 8; `changes` replace arguments."""
    cache_L = [torch.zeros(5, 2, 8)]
    args = {
        "k_TLGE": torch.zeros(4, 1, 2, 8), "v_TLGE": torch.zeros(4, 1, 2, 8),
        "positions_T": torch.zeros(4, dtype=INT64), "slots_T": torch.arange(4),
        "caches": ContextCaches.build(cache_L, cache_L), "key": KeyTransform(torch.zeros(3, 8), torch.ones(1, 8), 1e-6),
        "n_kept_B": torch.ones(2, dtype=torch.int32),
    }  # fmt: skip
    append_context(**(args | changes))


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"v_TLGE": torch.zeros(4, 1, 2, 8).half()}, "v_TLGE is torch.float16; pass torch.float32"),
        ({"v_TLGE": torch.zeros(4, 2, 2, 8)[:, ::2]}, "lay out both alike"),
        ({"k_TLGE": torch.zeros(4, 1, 8, 2).mT, "v_TLGE": torch.zeros(4, 1, 8, 2).mT}, "heads side by side"),
        ({"slots_T": torch.arange(3)}, r"slots_T has shape \(3,\)"),
        ({"slots_T": torch.arange(4).int()}, "slots_T is torch.int32"),
        ({"key": KeyTransform(torch.zeros(3, 10), None, 0.0)}, "rotary width 10 with heads of 8"),
        ({"key": KeyTransform(torch.zeros(3, 5), None, 0.0)}, "rotary width 5 with heads of 8"),
        ({"key": KeyTransform(torch.zeros(3, 8), torch.ones(2, 8), 0.0)}, "k_norm_LE has shape"),
        ({"n_kept_B": torch.ones(3, dtype=torch.int32)}, "4 rows cannot be shared by 3 requests"),
        ({"n_kept_B": torch.ones(0, dtype=torch.int32)}, "4 rows cannot be shared by 0 requests"),
        ({"n_kept_B": torch.ones(2, dtype=INT64)}, "n_kept_B is torch.int64"),
        ({"caches": ContextCaches.build([torch.zeros(5, 2, 4)], [torch.zeros(5, 2, 4)])}, "cache_SGE has shape"),
        ({"caches": ContextCaches.build([torch.zeros(5, 2, 8)] * 2, [torch.zeros(5, 2, 8)] * 2)}, "k_address_L has"),
    ],
)
def test_append_context_refuses(changes, message):
    append()
    with pytest.raises(ValueError, match=message):
        append(**changes)


@pytest.mark.parametrize(
    ("k_L", "v_L", "message"),
    [
        ([], [], "0 K caches and 0 V caches"),
        ([torch.zeros(5, 2, 8)], [], "1 K caches and 0 V caches"),
        ([torch.zeros(5, 2, 8)], [torch.zeros(6, 2, 8)], r"cache_SGE has shape \(6, 2, 8\)"),
        ([torch.zeros(5, 2, 8)], [torch.zeros(5, 2, 8).half()], "cache layers differ"),
        ([torch.zeros(5, 2, 8)], [torch.zeros(5, 4, 8)[:, :2]], "cache layers differ"),
        ([torch.zeros(5, 8, 2).mT] * 2, [torch.zeros(5, 8, 2).mT] * 2, "NHD layout"),
        ([torch.zeros(5, 2, 8, dtype=torch.uint8)], [torch.zeros(5, 2, 8, dtype=torch.uint8)], "torch.uint8; pass"),
        ([torch.zeros(81)[1:].view(5, 2, 8)] * 2, [torch.zeros(5, 2, 8)] * 2, "16-byte boundary"),
        ([torch.zeros(5, 2, 8)] * 2, [torch.zeros(5, 2, 8), torch.zeros(81)[1:].view(5, 2, 8)], "16-byte boundary"),
    ],
)
def test_context_caches_refuse(k_L, v_L, message):
    with pytest.raises(ValueError, match=message):
        ContextCaches.build(k_L, v_L)
