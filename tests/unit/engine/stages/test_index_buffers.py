"""Index buffers of captured graphs: narrower widths use those of the widest, and nothing else of its backend."""

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from sglang.srt.layers.attention import verify_mask
from sglang.srt.layers.attention.flashinfer_backend import FlashInferAttnBackend
from sglang.srt.layers.attention.hybrid_attn_backend import HybridAttnBackend
from sglang.srt.layers.attention.hybrid_linear_attn_backend import HybridLinearAttnBackend
from sglang.srt.layers.attention.triton_backend import TritonAttnBackend
from sglang.srt.layers.attention.trtllm_mha_backend import TRTLLMHAAttnBackend
from sglang.srt.layers.attention.verify_mask import VerifyMask
from sglang.srt.speculative.eagle_utils import TreeMaskMode

from sglang_dflash.engine.stages.index_buffers import larger, parts, share_buffers
from sglang_dflash.platforms.rehearsal.buffers import NotShared, require_shared

CONTEXT, WIDEST = 32, 16


class Lists:
    """Backend like flashinfer and triton: KV slots of a batch in a list, for each token of a block."""

    def __init__(self, width: int, max_bs: int = 4) -> None:
        self.width, self.max_bs = width, max_bs

    def init_cuda_graph_state(self, max_bs: int, max_num_tokens: int) -> None:
        self.cuda_graph_kv_indices = [torch.zeros(max_num_tokens * CONTEXT) for _ in range(2)]
        self.cuda_graph_custom_mask = torch.zeros(max_num_tokens * CONTEXT, dtype=torch.uint8)
        self.cuda_graph_qo_indptr = torch.arange(max_bs + 1) * self.width

    def buffers(self) -> list[torch.Tensor]:
        return [*self.cuda_graph_kv_indices, self.cuda_graph_custom_mask]

    def own(self) -> list[torch.Tensor]:
        return [self.cuda_graph_qo_indptr]


class Tables(Lists):
    """Backend like fa3, fa4 and trtllm_mha: page tables, beside lengths that depend on the width."""

    def init_cuda_graph_state(self, max_bs: int, max_num_tokens: int) -> None:
        self.decode_cuda_graph_metadata = {"page_table": torch.zeros(max_bs, CONTEXT), "swa_page_table": None}
        self.target_verify_metadata: dict[Any, Any] = {
            "page_table": torch.zeros(max_bs, CONTEXT),
            "cu_seqlens_q": torch.arange(max_bs + 1) * self.width,
        }

    def buffers(self) -> list[torch.Tensor]:
        return [held["page_table"] for held in (self.decode_cuda_graph_metadata, self.target_verify_metadata)]

    def own(self) -> list[torch.Tensor]:
        return [self.target_verify_metadata["cu_seqlens_q"]]


class Latent(Lists):
    """Backend like flashinfer for latent attention, which keeps the list of a decode step under two names."""

    def init_cuda_graph_state(self, max_bs: int, max_num_tokens: int) -> None:
        self.cuda_graph_kv_indices = torch.zeros(max_bs * CONTEXT)  # type: ignore[assignment]
        self.cuda_graph_qo_indptr = torch.arange(max_bs + 1) * self.width
        self.fast_decode_kwargs = {"kv_indices": self.cuda_graph_kv_indices, "qo_indptr_cpu": self.cuda_graph_qo_indptr}

    def buffers(self) -> list[torch.Tensor]:
        return [self.cuda_graph_kv_indices, self.fast_decode_kwargs["kv_indices"]]  # type: ignore[list-item]

    def own(self) -> list[torch.Tensor]:
        return [self.fast_decode_kwargs["qo_indptr_cpu"]]


def allocated(backend: Any, max_bs: int = 4) -> Any:
    backend.init_cuda_graph_state(max_bs, max_bs * backend.width)
    return backend


def pointers(tensors: list[torch.Tensor]) -> list[int]:
    return [tensor.data_ptr() for tensor in tensors]


@pytest.mark.parametrize("kind", [Lists, Tables, Latent])
def test_a_narrower_width_uses_the_widest_widths_buffers(kind: type[Lists]) -> None:
    widest, narrow = allocated(kind(WIDEST)), kind(4)
    if kind is Tables:
        widest.target_verify_metadata[2] = "metadata of graphs for two requests"
    share_buffers(narrow, widest)
    allocated(narrow)
    assert pointers(narrow.buffers()) == pointers(widest.buffers())
    assert [tensor.tolist() for tensor in narrow.own()] == [[0, 4, 8, 12, 16]], "offsets of the queries"
    assert kind is not Tables or 2 not in narrow.target_verify_metadata


@pytest.mark.parametrize("kind", [Lists, Tables, Latent])
def test_a_buffer_that_is_too_small_is_not_used(kind: type[Lists]) -> None:
    widest, narrow = allocated(kind(WIDEST), max_bs=2), kind(12)
    share_buffers(narrow, widest)
    allocated(narrow)
    assert not {*pointers(narrow.buffers())} & {*pointers(widest.buffers())}


def test_buffers_of_other_shapes_and_types_are_not_used() -> None:
    narrow = torch.zeros(2, 8, dtype=torch.int32)
    for wide in (torch.zeros(2, 8, dtype=torch.int64), torch.zeros(4, 9, dtype=torch.int32), None):
        assert larger(narrow, wide) is narrow
    assert larger(narrow, wide := torch.zeros(3, 8, dtype=torch.int32)) is wide
    assert larger(None, wide) is None


@pytest.mark.parametrize(("n_wide", "is_shared"), [(9, True), (7, False)])
def test_the_mask_of_trees_is_shared(n_wide: int, is_shared: bool) -> None:
    narrow, wide = (VerifyMask(torch.zeros(n), TreeMaskMode.FULL_MASK, max_bs=2) for n in (8, n_wide))
    assert larger(narrow, wide) is (wide if is_shared else narrow)


def test_all_backends_for_full_attention_are_found() -> None:
    """A hybrid target's backend has one for full attention, which may differ for prompts and for verifies."""
    prompts, verifies = SimpleNamespace(name="prompts"), SimpleNamespace(name="verifies")
    both, hybrid = (kind.__new__(kind) for kind in (HybridAttnBackend, HybridLinearAttnBackend))
    both.prefill_backend, both.decode_backend = prompts, verifies
    hybrid.full_attn_backend, hybrid.linear_attn_backend = both, SimpleNamespace(name="recurrent")
    assert [part["name"] for part in parts(hybrid)] == ["verifies", "prompts"]
    assert [part["name"] for part in parts(prompts)] == ["prompts"]


def triton_backend(width: int) -> TritonAttnBackend:
    backend = TritonAttnBackend.__new__(TritonAttnBackend)
    sizes = {"num_head": 2, "max_kv_splits": 3, "v_head_dim": 4, "swa_v_head_dim": 4, "max_context_len": CONTEXT}
    lean = {"lean_total_programs": 16, "lean_block_m": 8}
    modes = {"device": "cpu", "skip_prefill": False, "is_draft_runner": False, "dllm_attention": None}
    window = {"sliding_window_size": CONTEXT, "use_sliding_window_kv_pool": False}
    vars(backend).update(sizes | lean | modes | window, num_draft_tokens=width)
    return backend


def flashinfer_backend(width: int) -> FlashInferAttnBackend:
    backend = FlashInferAttnBackend.__new__(FlashInferAttnBackend)
    sizes = {"max_context_len": CONTEXT, "num_wrappers": 2, "kv_indptr": [torch.zeros(5) for _ in range(2)]}
    vars(backend).update(sizes, use_sliding_window_kv_pool=False, skip_prefill=False)
    return backend


def trtllm_backend(width: int) -> TRTLLMHAAttnBackend:
    backend = TRTLLMHAAttnBackend.__new__(TRTLLMHAAttnBackend)
    modes = {"device": "cpu", "use_sliding_window_kv_pool": False, "expand_encoder_only_verify": False}
    pools = {"_swa_kv_pool": SimpleNamespace(), "max_num_pages": CONTEXT}
    vars(backend).update(modes | pools, speculative_num_draft_tokens=width)
    return backend


@pytest.mark.parametrize("make", [triton_backend, flashinfer_backend, trtllm_backend])
def test_all_large_buffers_of_sglangs_backends_are_shared(make: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """The GPU emulation has the same rule for whole servers, and for fa3, whose module needs a GPU or the emulation."""
    zeros = torch.zeros
    monkeypatch.setattr(torch, "zeros", lambda *shape, **options: zeros(*shape, **options | {"device": "cpu"}))
    monkeypatch.setattr(verify_mask, "default_tree_mask_mode", lambda: TreeMaskMode.FULL_MASK)  # as on a GPU
    max_bs = 4
    widest, narrow = make(WIDEST), make(8)
    widest.init_cuda_graph_state(max_bs, max_bs * WIDEST)
    share_buffers(narrow, widest)
    narrow.init_cuda_graph_state(max_bs, max_bs * 8)
    require_shared({8: narrow, WIDEST: widest}, widest, max_bs * CONTEXT)
    alone = make(8)
    alone.init_cuda_graph_state(max_bs, max_bs * 8)
    with pytest.raises(NotShared):
        require_shared({8: alone, WIDEST: widest}, widest, max_bs * CONTEXT)
