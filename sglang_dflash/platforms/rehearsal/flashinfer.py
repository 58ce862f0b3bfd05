"""Definitions of FlashInfer's compiled modules. FlashInfer's Python runs unchanged: wrappers, plans, workspaces.

A module is compiled with or without a sliding window. Without one it ignores `window_left`. SGLang's verify plans all
layers without a window.

Dimension key: as in `attention.py`.
"""

from __future__ import annotations

import math
from typing import Any

import torch

from sglang_dflash.platforms.rehearsal import graph
from sglang_dflash.platforms.rehearsal.attention import Mask, Score, attend
from sglang_dflash.platforms.rehearsal.flashinfer_plan import Paged, Planned

NON_CAUSAL, CAUSAL = 0, 1  # FlashInfer's mask modes; 2 is a bit mask, 3 multi-item scoring
LOG2_E = math.log2(math.e)  # converts a natural log-sum-exp to FlashInfer's, which has base 2


class Module:
    """Emulation of the module from `get_batch_prefill_module`. FlashInfer also decodes with it, on tensor cores."""

    def __init__(self, *, window: bool, softcap: bool) -> None:
        self.window, self.softcap = window, softcap

    def mask(self, mode: int, window_left: int) -> Mask:
        if mode not in (NON_CAUSAL, CAUSAL):
            raise NotImplementedError(f"FlashInfer's mask mode {mode} is not defined in the rehearsal; run it on a GPU")
        return Mask(mode == CAUSAL, window_left if self.window else -1)

    def score(self, scale: float, softcap: float) -> Score:
        return Score(scale, softcap if self.softcap else 0.0)

    def plan(
        self,
        float_workspace: torch.Tensor,
        int_workspace: torch.Tensor,
        pinned_workspace: torch.Tensor,
        first_query_B1: torch.Tensor,
        first_page_B1: torch.Tensor,
        n_keys_B: torch.Tensor,
        n_rows: int,
        n_requests: int,
        n_heads: int,
        n_kv_heads: int,
        page_size: int,
        *others: Any,
    ) -> list[int]:
        planned = Planned(first_query_B1.tolist(), first_page_B1.diff().tolist())
        assert len(planned.n_pages_B) == n_requests, f"{len(planned.n_pages_B)} lengths of {n_requests} requests"
        assert planned.first_query_B1[-1] <= n_rows, f"{planned.first_query_B1[-1]} queries in {n_rows} rows"
        n_pages = (n_keys_B.clamp(min=1) + page_size - 1) // page_size  # without keys FlashInfer counts 1 page
        is_equal = torch.equal(n_pages.long(), first_page_B1.diff().clamp(min=1).long())
        assert is_equal, f"numbers of pages {n_pages.tolist()} by lengths, but pages start at {first_page_B1.tolist()}"
        return planned.write(int_workspace)

    @graph.launch
    def paged_run(
        self,
        float_workspace: torch.Tensor,
        int_workspace: torch.Tensor,
        plan_info: list[int],
        q: torch.Tensor,
        k_cache: torch.Tensor,
        v_cache: torch.Tensor,
        first_query_B1: torch.Tensor,
        first_page_B1: torch.Tensor,
        pages: torch.Tensor,
        last_page_len_B: torch.Tensor,
        out: torch.Tensor,
        lse: torch.Tensor | None,
        mask_mode: int,
        layout: int,
        window_left: int,
        pdl: bool,
        custom_mask: torch.Tensor | None,
        first_mask_B1: torch.Tensor | None,
        alibi: torch.Tensor,
        prefix_len: torch.Tensor | None,
        positions_in_items: torch.Tensor | None,
        longest_item: torch.Tensor | None,
        softcap: float,
        scale: float,
        *others: Any,
    ) -> None:
        paged = Paged.of(k_cache, v_cache, layout, first_page_B1, pages, last_page_len_B)
        n_keys_B = paged.n_keys()
        mask, score = self.mask(mask_mode, window_left), self.score(scale, softcap)
        for b, rows in Planned.read(int_workspace, plan_info).requests(first_query_B1, first_page_B1):
            allowed = mask.allowed(rows.stop - rows.start, n_keys_B[b])
            _write(attend(q[rows], *paged.keys(b, n_keys_B[b]), allowed, score), rows, out, lse)

    @graph.launch
    def ragged_run(
        self,
        float_workspace: torch.Tensor,
        int_workspace: torch.Tensor,
        plan_info: list[int],
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
        first_query_B1: torch.Tensor,
        first_key_B1: torch.Tensor,
        out: torch.Tensor,
        lse: torch.Tensor | None,
        mask_mode: int,
        layout: int,
        window_left: int,
        pdl: bool,
        custom_mask: torch.Tensor | None,
        first_mask_B1: torch.Tensor | None,
        alibi: torch.Tensor,
        prefix_len: torch.Tensor | None,
        positions_in_items: torch.Tensor | None,
        longest_item: torch.Tensor | None,
        softcap: float,
        scale: float,
        *others: Any,
    ) -> None:
        starts = first_key_B1.tolist()
        mask, score = self.mask(mask_mode, window_left), self.score(scale, softcap)
        planned = Planned.read(int_workspace, plan_info)
        for b, rows in planned.requests(first_query_B1, first_key_B1):
            keys = slice(starts[b], starts[b + 1])
            allowed = mask.allowed(rows.stop - rows.start, keys.stop - keys.start)
            _write(attend(q[rows], k[keys], v[keys], allowed, score), rows, out, lse)


class DecodeModule(Module):
    """Emulation of the module from `get_batch_decode_module`: one query per request, without tensor cores."""

    def plan(  # type: ignore[override]
        self,
        float_workspace: torch.Tensor,
        int_workspace: torch.Tensor,
        pinned_workspace: torch.Tensor,
        first_page_B1: torch.Tensor,
        n_requests: int,
        n_heads: int,
        n_kv_heads: int,
        page_size: int,
        *others: Any,
    ) -> list[int]:
        assert page_size == 1, f"pages of {page_size} tokens, not 1: this plan gets no length of the last page"
        return Planned(list(range(n_requests + 1)), first_page_B1.diff().tolist()).write(int_workspace)

    @graph.launch
    def run(
        self,
        float_workspace: torch.Tensor,
        int_workspace: torch.Tensor,
        plan_info: list[int],
        q: torch.Tensor,
        k_cache: torch.Tensor,
        v_cache: torch.Tensor,
        first_page_B1: torch.Tensor,
        pages: torch.Tensor,
        last_page_len_B: torch.Tensor,
        out: torch.Tensor,
        lse: torch.Tensor | None,
        layout: int,
        window_left: int,
        pdl: bool,
        alibi: torch.Tensor,
        softcap: float,
        scale: float,
        *others: Any,
    ) -> None:
        paged = Paged.of(k_cache, v_cache, layout, first_page_B1, pages, last_page_len_B)
        n_keys_B = paged.n_keys()
        mask, score = self.mask(CAUSAL, window_left), self.score(scale, softcap)
        first_query_B1 = torch.arange(len(n_keys_B) + 1)
        for b, rows in Planned.read(int_workspace, plan_info).requests(first_query_B1, first_page_B1):
            _write(attend(q[rows], *paged.keys(b, n_keys_B[b]), mask.allowed(1, n_keys_B[b]), score), rows, out, lse)


def _write(result: tuple[torch.Tensor, torch.Tensor], rows: slice, out: torch.Tensor, lse: torch.Tensor | None) -> None:
    out[rows] = result[0]
    if lse is not None:
        lse[rows] = result[1] * LOG2_E


def batch_prefill_module(backend: str, *args: Any) -> Module:
    """Return the module for FlashInfer's arguments. `args[7]`: has a window; `args[8]`: has a soft cap."""
    return Module(window=args[7], softcap=args[8])


def batch_decode_module(*args: Any) -> DecodeModule:
    return DecodeModule(window=args[7], softcap=args[8])


def fmha_varlen_plan(*args: Any) -> tuple[None, ...]:
    """Return an empty plan for the Blackwell kernel over packed keys, which plans on the device."""
    return None, None, None, None


@graph.launch
def fmha_varlen_run(
    workspace: torch.Tensor,
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    first_query_B1: torch.Tensor,
    first_key_B1: torch.Tensor,
    *plan_and_out: Any,
) -> None:
    """Emulate FlashInfer's Blackwell kernel over packed keys.

    `plan_and_out` ends with out, lse, mask mode, five scales and the largest number of queries of a request.
    """
    *_, out, lse, mask_mode, scale, q_scale, k_scale, v_scale, o_scale, max_queries = plan_and_out
    assert q_scale == k_scale == v_scale == o_scale == 1.0, (
        "fp8 scales are not defined in the rehearsal; run this on a GPU"
    )
    mask, score = Mask(mask_mode == CAUSAL), Score(scale)
    starts_q, starts_k = first_query_B1.tolist(), first_key_B1.tolist()
    for rows, keys in zip(map(slice, starts_q, starts_q[1:]), map(slice, starts_k, starts_k[1:]), strict=True):
        n_queries, n_keys = rows.stop - rows.start, keys.stop - keys.start
        assert n_queries <= max_queries, f"{n_queries} queries, at most {max_queries} were announced"
        if n_queries:
            _write(attend(q[rows], k[keys], v[keys], mask.allowed(n_queries, n_keys), score), rows, out, lse)


@graph.launch
def merge_state(
    v_a: torch.Tensor,
    lse_a: torch.Tensor,
    v_b: torch.Tensor,
    lse_b: torch.Tensor,
    v: torch.Tensor,
    lse: torch.Tensor,
) -> None:
    """Merge attention outputs over two disjoint sets of keys into one output. Log-sum-exps have base 2."""
    lse.copy_(torch.logaddexp2(lse_a, lse_b))
    weight_a, weight_b = ((part - lse).exp2()[..., None].to(v.dtype) for part in (lse_a, lse_b))
    v.copy_(v_a * weight_a + v_b * weight_b)
