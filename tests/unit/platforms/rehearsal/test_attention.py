"""FlashAttention's emulation must equal PyTorch's attention, and refuse wrong metadata."""

from typing import Any

import pytest
import torch

from sglang_dflash.platforms.rehearsal.attention import flash_attn_varlen_func, flash_attn_with_kvcache
from tests.fixtures.scene import SCALE, A, Scene, attention

LENGTHS = {"n_queries": [4, 1, 0, 3], "n_keys": [37, 9, 5, 3]}


def flash(scene: Scene, **changes: Any) -> torch.Tensor:
    arguments = {
        "page_table": scene.table,
        "cache_seqlens": scene.lengths,
        "cu_seqlens_q": scene.first_query,
        "max_seqlen_q": max(scene.n_queries),
        "softmax_scale": SCALE,
        "causal": True,
    }
    return flash_attn_with_kvcache(scene.q, scene.k_cache, scene.v_cache, **arguments | changes)


@pytest.mark.parametrize("page_size", [1, 4, 16])
@pytest.mark.parametrize(
    ("causal", "window"), [(True, (-1, -1)), (True, (6, 0)), (False, (-1, -1)), (False, (5, 2)), (False, (5, -1))]
)
@pytest.mark.parametrize("has_sinks", [False, True])
def test_flash_attention(page_size: int, causal: bool, window: tuple[int, int], has_sinks: bool) -> None:
    scene = Scene(**LENGTHS, page_size=page_size)
    sinks = torch.randn(A) if has_sinks else None
    out = flash(scene, causal=causal, window_size=window, sinks=sinks)
    expected = scene.expected(causal=causal, left=window[0], right=window[1], sinks=sinks)
    torch.testing.assert_close(out, expected)


def test_latent_attention_scores_both_parts() -> None:
    """In latent attention (MLA) a score is the product of `q` with the key plus that of `qv` with the value."""
    scene = Scene(**LENGTHS, page_size=4, value_width=24)
    qv = torch.randn(len(scene.q), A, 24)
    out = flash(scene, qv=qv)
    rows = zip(scene.q.split(scene.n_queries), qv.split(scene.n_queries), strict=True)
    expected = []
    for b, (q, of_values) in enumerate(rows):
        k, v = scene.keys(b)
        allowed = torch.ones(len(q), len(k), dtype=torch.bool).tril(len(k) - len(q))
        expected.append(attention(torch.cat([q, of_values], -1), torch.cat([k, v], -1), v, allowed, SCALE))
    torch.testing.assert_close(out, torch.cat(expected))


def test_soft_caps_bound_scores() -> None:
    scene = Scene(n_queries=[1], n_keys=[2])
    (k, v), q = scene.keys(0), scene.q
    out = flash(scene, softmax_scale=20.0, softcap=3.0)
    for a in range(A):
        scores = 3 * torch.tanh(20.0 * (k[:, a // 2] @ q[0, a]) / 3)
        torch.testing.assert_close(out[0, a], scores.softmax(0) @ v[:, a // 2])


def test_log_sum_exps_are_natural_and_by_head() -> None:
    scene = Scene(n_queries=[2], n_keys=[2])
    k = scene.keys(0)[0]
    _, lse = flash(scene, causal=False, return_softmax_lse=True)
    scores = SCALE * torch.einsum("nae,lae->anl", scene.q, k.repeat_interleave(2, dim=1))
    torch.testing.assert_close(lse, scores.logsumexp(-1))


def test_packed_keys() -> None:
    scene = Scene(n_queries=[3, 2], n_keys=[5, 2], page_size=1)
    k, v = (torch.cat(part) for part in zip(scene.keys(0), scene.keys(1), strict=True))
    out = flash_attn_varlen_func(
        scene.q, k, v, scene.first_query, scene.first_key, 3, 5, softmax_scale=SCALE, causal=True, window_size=(2, 0)
    )
    torch.testing.assert_close(out, scene.expected(causal=True, left=2))


@pytest.mark.parametrize(
    ("changes", "complaint"),
    [
        pytest.param(
            lambda s: {"page_table": s.table[:, :2].contiguous()},
            "2 columns for 37 keys at 4 a page needs 10",
            id="narrow",
        ),
        pytest.param(lambda s: {"cache_seqlens": s.lengths + 4}, r"1000000\] of a cache with", id="beyond-its-pages"),
        pytest.param(lambda s: {"page_table": s.table.long()}, "page_table is torch.int64", id="int64"),
        pytest.param(lambda s: {"page_table": s.table.T}, "page_table has strides", id="columns"),
        pytest.param(lambda s: {"max_seqlen_q": 3}, "4 queries, at most 3", id="more-queries"),
        pytest.param(
            lambda s: {"cu_seqlens_q": s.first_query[:-1]}, "4 starts for 4 requests, not 5", id="fewer-starts"
        ),
    ],
)
def test_metadata_is_checked(changes: Any, complaint: str) -> None:
    scene = Scene(**LENGTHS, page_size=4)
    with pytest.raises(AssertionError, match=complaint):
        flash(scene, **changes(scene))


def test_undefined_arguments_are_refused() -> None:
    with pytest.raises(NotImplementedError, match="k_descale"):
        flash(Scene(**LENGTHS), k_descale=torch.ones(1))


def test_rows_without_a_request_are_nan() -> None:
    scene = Scene(n_queries=[2], n_keys=[3])
    scene.q = torch.randn(5, A, scene.q.shape[-1])
    assert flash(scene)[2:].isnan().all()
