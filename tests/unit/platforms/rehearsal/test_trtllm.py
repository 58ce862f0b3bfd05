"""FlashInfer's TensorRT-LLM functions over emulated kernels must equal PyTorch's attention."""

from typing import Any

import pytest
import torch

from sglang_dflash.platforms.rehearsal import trtllm
from sglang_dflash.platforms.rehearsal.capability import GPUS
from tests.fixtures.scene import SCALE, A, Scene

MIB = 2**20
XQA_SEMAPHORES = 8 * MIB


def on(gpu: str) -> None:
    from sglang_dflash.platforms.rehearsal import flashinfer_seams

    flashinfer_seams.define(GPUS[gpu])


def hnd(scene: Scene) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the caches as [pages, G, page size, E], the layout SGLang passes on."""
    return scene.k_cache.transpose(1, 2), scene.v_cache.transpose(1, 2)


def bits(allowed_NN: torch.Tensor) -> torch.Tensor:
    """Pack a mask [N, N] into 16-bit words, lowest bit first. Rows are padded to a multiple of 32 bits."""
    n = len(allowed_NN)
    words = -(-n // 32) * 2
    padded = torch.zeros(n, words * 16, dtype=torch.int64)
    padded[:, :n] = allowed_NN
    return (padded.view(n, words, 16) << torch.arange(16)).sum(-1).to(torch.uint16)


def decode(scene: Scene, **changes: Any) -> torch.Tensor:
    from flashinfer.decode import trtllm_batch_decode_with_kv_cache

    n = scene.n_queries[0]
    B = len(scene.n_keys)
    arguments = {
        "workspace_buffer": torch.zeros(XQA_SEMAPHORES + MIB, dtype=torch.uint8),
        "block_tables": scene.table,
        "seq_lens": scene.lengths,
        "max_seq_len": 4096,
        "bmm1_scale": SCALE,
        "bmm2_scale": 1.0,
        "q_len_per_req": n,
        "out_dtype": torch.float32,
        "multi_ctas_kv_counter_buffer": torch.zeros(4096, dtype=torch.uint8),
        "mask": bits(torch.ones(n, n).tril()).expand(B, -1, -1).contiguous() if n > 1 else None,
    }
    return trtllm_batch_decode_with_kv_cache(query=scene.q, kv_cache=hnd(scene), **arguments | changes)


@pytest.mark.parametrize("gpu", ["sm90", "sm100"])
@pytest.mark.parametrize("n_queries", [1, 4, 16, 33])
@pytest.mark.parametrize("page_size", [16, 32, 64])
@pytest.mark.parametrize("left", [-1, 20])
def test_decoding_and_verifying(gpu: str, n_queries: int, page_size: int, left: int) -> None:
    on(gpu)
    scene = Scene([n_queries] * 3, [40, 33, 130], page_size)
    sinks = torch.randn(A)
    out = decode(scene, window_left=left, sinks=sinks)
    torch.testing.assert_close(out, scene.expected(causal=True, left=left, sinks=sinks))


@pytest.mark.parametrize("gpu", ["sm90", "sm100"])
def test_sinks_must_be_fp32(gpu: str) -> None:
    """The kernels read fp32 whatever the dtype; of the generations, only trtllm-gen's launcher checks it."""
    on(gpu)
    with pytest.raises(AssertionError, match=r"sinks of torch\.bfloat16, the kernel reads fp32"):
        decode(Scene([1], [40], 16), window_left=-1, sinks=torch.zeros(A, dtype=torch.bfloat16))


def test_xqa_applies_its_mask() -> None:
    """The mask is a tree of two branches, not a causal one."""
    on("sm90")
    scene = Scene([3, 3], [40, 5], 16)
    tree = torch.tensor([[1, 0, 0], [1, 1, 0], [1, 0, 1]])
    out = decode(scene, mask=bits(tree).expand(2, -1, -1).contiguous())
    torch.testing.assert_close(out, scene.expected(causal=True, blocks=tree.bool()))


@pytest.mark.parametrize("gpu", ["sm90", "sm100"])
def test_rows_of_one_token_attend_to_a_whole_block(gpu: str) -> None:
    """SGLang computes a non-causal layer as if every slot of the block were a request with one query."""
    on(gpu)
    scene = Scene([4, 4], [40, 21], 16)
    rows = torch.arange(2).repeat_interleave(4)
    of_slots = {"block_tables": scene.table[rows], "seq_lens": scene.lengths[rows]}
    out = decode(scene, **of_slots, q_len_per_req=1, mask=None)
    torch.testing.assert_close(out, scene.expected(causal=False))


def prompt(scene: Scene, **changes: Any) -> dict[str, Any]:
    return {
        "workspace_buffer": torch.zeros(MIB, dtype=torch.uint8),
        "seq_lens": scene.lengths,
        "max_q_len": max(scene.n_queries),
        "max_kv_len": 4096,
        "bmm1_scale": SCALE,
        "bmm2_scale": 1.0,
        "batch_size": len(scene.n_keys),
        "cum_seq_lens_q": scene.first_query,
        "cum_seq_lens_kv": scene.first_key,
        "block_tables": scene.table,
        **changes,
    }


def context(scene: Scene, **changes: Any) -> torch.Tensor:
    from flashinfer.prefill import trtllm_batch_context_with_kv_cache

    on("sm100")
    return trtllm_batch_context_with_kv_cache(query=scene.q, kv_cache=hnd(scene), **prompt(scene, **changes))


@pytest.mark.parametrize(("causal", "left"), [(True, -1), (True, 6), (False, -1)])
def test_prompts_by_trtllm_gen(causal: bool, left: int) -> None:
    scene = Scene([4, 1, 20], [40, 9, 20], 16)
    out = context(scene, causal=causal, window_left=left)
    torch.testing.assert_close(out, scene.expected(causal=causal, left=left))


def fmha_v2(scene: Scene, halves: bool, layout: str = "NHD", **changes: Any) -> torch.Tensor:
    """Run the prefill. K and V of a page are adjacent, or with `halves` K and V are two halves of one allocation."""
    from flashinfer.prefill import trtllm_fmha_v2_prefill

    on("sm90")
    both = torch.stack([scene.k_cache, scene.v_cache], dim=0 if halves else 1)
    if layout == "HND":
        both = both.transpose(2, 3).contiguous()
    table, kv = scene.table, both
    if halves:
        table, kv = torch.stack([table, table + len(scene.k_cache)], dim=1), tuple(both)
    arguments = prompt(scene, **({"block_tables": table} | changes))
    return trtllm_fmha_v2_prefill((scene.q, kv), input_layout=f"Q_PAGED_KV_{layout}", **arguments)


@pytest.mark.parametrize("halves", [False, True])
@pytest.mark.parametrize("layout", ["NHD", "HND"])
@pytest.mark.parametrize(("mode", "left"), [("causal", -1), ("causal", 6), ("padding", -1)])
def test_prompts_by_fmha_v2(halves: bool, layout: str, mode: str, left: int) -> None:
    scene, sinks = Scene([4, 1, 20], [40, 9, 20], 16), torch.randn(A)
    out = fmha_v2(scene, halves, layout, mask_mode=mode, window_left=left, sinks=sinks)
    torch.testing.assert_close(out, scene.expected(causal=mode == "causal", left=left, sinks=sinks))


def dirty(scene: Scene) -> dict[str, Any]:
    workspace = torch.zeros(XQA_SEMAPHORES + MIB, dtype=torch.uint8)
    trtllm.scribble(workspace)  # like a kernel that uses the whole buffer as scratch
    return {"workspace_buffer": workspace, "multi_ctas_kv_counter_buffer": workspace[:4096]}


@pytest.mark.parametrize(
    ("gpu", "changes", "complaint"),
    [
        pytest.param("sm90", dirty, "semaphores must be zero", id="semaphores"),
        pytest.param("sm100", dirty, "counters must be zero", id="counters"),
        pytest.param("sm90", lambda s: {"mask": None}, "Mask is required", id="no-mask"),
        pytest.param("sm90", lambda s: {"mask": bits(torch.ones(4, 4))[None]}, "a mask of", id="mask-of-one"),
        *(
            pytest.param(gpu, changes, complaint, id=f"{name}-{gpu}")
            for gpu in ("sm90", "sm100")
            for name, changes, complaint in (
                ("view", lambda s: {"block_tables": s.table.repeat(1, 2)[:, ::2]}, "strides"),
                ("wider", lambda s: {"block_tables": s.table.repeat(1, 2)[:, : s.table.shape[1]]}, "with strides"),
                ("rows", lambda s: {"block_tables": s.table.repeat(2, 1)}, "4 rows of pages for 2"),
                ("int64", lambda s: {"seq_lens": s.lengths.long()}, "seq_lens is torch.int64"),
                ("beyond", lambda s: {"seq_lens": s.lengths + 16}, r"1000000\] of a cache with"),
            )
        ),
        pytest.param("sm100", lambda s: {"max_seq_len": 39}, "at most 39 were announced", id="longer"),
    ],
)
def test_metadata_is_checked(gpu: str, changes: Any, complaint: str) -> None:
    on(gpu)
    scene = Scene([4, 4], [40, 21], 16)
    with pytest.raises(AssertionError, match=complaint):
        decode(scene, **changes(scene))


def test_scratch_must_not_overlap_semaphores() -> None:
    """On sm90, decode keeps semaphores at the start of its workspace, and prefill fills its workspace with scratch.

    They may share a buffer only if prefill gets the part after the semaphores, as in SGLang.
    """
    on("sm90")
    scene, workspace = Scene([4, 4], [40, 21], 16), torch.zeros(XQA_SEMAPHORES + MIB, dtype=torch.uint8)
    for _ in range(2):
        decode(scene, workspace_buffer=workspace)
        fmha_v2(scene, False, workspace_buffer=workspace[XQA_SEMAPHORES:])
    assert workspace[XQA_SEMAPHORES:].any(), "the scratch was never written"
    fmha_v2(scene, False, workspace_buffer=workspace)
    with pytest.raises(AssertionError, match="semaphores must be zero"):
        decode(scene, workspace_buffer=workspace)


@pytest.mark.parametrize("gpu", ["sm90", "sm100"])
def test_unknown_page_sizes_are_refused(gpu: str) -> None:
    on(gpu)
    with pytest.raises(AssertionError, match="8 tokens a page"):
        decode(Scene([4, 4], [40, 21], 8))


@pytest.mark.parametrize(
    ("changes", "complaint"),
    [
        pytest.param(lambda s: {"cum_seq_lens_kv": s.first_key + 1}, "keys start at", id="starts"),
        pytest.param(lambda s: {"max_q_len": 19}, "at most 19", id="more-queries"),
        pytest.param(lambda s: {"max_kv_len": 30}, "at most 30", id="more-keys"),
    ],
)
@pytest.mark.parametrize("kernel", [context, lambda scene, **changes: fmha_v2(scene, False, **changes)])
def test_a_prompts_metadata_is_checked(kernel: Any, changes: Any, complaint: str) -> None:
    scene = Scene([4, 1, 20], [40, 9, 20], 16)
    with pytest.raises(AssertionError, match=complaint):
        kernel(scene, **changes(scene))


def test_misplaced_values_are_refused():
    scene = Scene([4], [40], 16)
    with pytest.raises(AssertionError, match="not at the table's place"):
        fmha_v2(scene, True, block_tables=torch.stack([scene.table, scene.table + 1], dim=1))
