"""FlashInfer's wrappers over emulated kernels must equal PyTorch's attention, and refuse wrong plans."""

from functools import partial
from typing import Any

import pytest
import torch

from sglang_dflash.platforms.rehearsal import graph
from sglang_dflash.platforms.rehearsal.capability import GPUS
from tests.fixtures.scene import SCALE, A, E, G, Scene, starts

BLOCK = 4  # queries per request in a captured batch
BATCH = 3  # requests in a captured batch


@pytest.fixture(scope="module", autouse=True, params=["sm90", "sm100"])
def gpu(request: pytest.FixtureRequest) -> None:
    from sglang_dflash.platforms.rehearsal import flashinfer_seams

    flashinfer_seams.define(GPUS[request.param])


def workspace() -> torch.Tensor:
    return torch.empty(1024, dtype=torch.uint8)


def paged(**buffers: Any) -> Any:
    from flashinfer import BatchPrefillWithPagedKVCacheWrapper

    return BatchPrefillWithPagedKVCacheWrapper(workspace(), "NHD", backend="fa2", **buffers)


def buffers(end: str) -> dict[str, torch.Tensor]:
    """Return index buffers for a captured batch. `end`: the end of their names, which differs in decode and prefill."""
    made = {"paged_kv_indptr": torch.zeros(BATCH + 1), "paged_kv_indices": torch.zeros(1000)}
    made |= {"paged_kv_last_page_len": torch.ones(BATCH)}
    return {f"{name}_{end}": tensor.int() for name, tensor in made.items()}


def captured() -> Any:
    """Return a wrapper as SGLang makes one for a graph of `BATCH` requests."""
    return paged(use_cuda_graph=True, qo_indptr_buf=torch.zeros(BATCH + 1, dtype=torch.int32), **buffers("buf"))


def where(scene: Scene) -> tuple[torch.Tensor, ...]:
    return scene.first_query, scene.first_page, scene.page_numbers, scene.last_page_len


def plan(wrapper: Any, scene: Scene, **options: Any) -> None:
    wrapper.begin_forward(*where(scene), A, G, E, scene.page_size, q_data_type=torch.float32, **options)


def run(wrapper: Any, scene: Scene, **options: Any) -> torch.Tensor:
    return wrapper.forward(scene.q, (scene.k_cache, scene.v_cache), sm_scale=SCALE, **options)


@pytest.mark.parametrize("page_size", [1, 16])
@pytest.mark.parametrize(("causal", "left"), [(True, -1), (False, -1), (True, 6), (False, 6)])
def test_paged_keys(page_size: int, causal: bool, left: int) -> None:
    scene, wrapper = Scene([4, 1, 3], [37, 9, 3], page_size), paged()
    plan(wrapper, scene, causal=causal, window_left=left)
    out = run(wrapper, scene, causal=causal, window_left=left)
    torch.testing.assert_close(out, scene.expected(causal=causal, left=left))


def test_an_unplanned_window_is_ignored() -> None:
    """If a plan has no window, FlashInfer compiles the kernel without one, and the window of `run` has no effect.

    SGLang plans the verify forward without a window, also for sliding layers.
    """
    scene, wrapper = Scene([4], [37]), paged()
    plan(wrapper, scene)
    out = run(wrapper, scene, causal=True, window_left=6)
    torch.testing.assert_close(out, scene.expected(causal=True))


def test_a_prompt_and_its_prefix_are_merged() -> None:
    """Keys of new tokens are packed, keys of the prefix are on pages. The second request has no prefix."""
    from flashinfer import BatchPrefillWithRaggedKVCacheWrapper
    from flashinfer.cascade import merge_state

    scene = Scene([5, 4], [20, 4])
    new = [[part[-n:] for part in scene.keys(b)] for b, n in enumerate(scene.n_queries)]
    k, v = (torch.cat([request[i] for request in new]) for i in range(2))
    ragged, prefix = BatchPrefillWithRaggedKVCacheWrapper(workspace(), "NHD", backend="auto"), paged()
    ragged.begin_forward(scene.first_query, scene.first_query, A, G, E, q_data_type=torch.float32)
    pages = torch.tensor(scene.pages[0][:15], dtype=torch.int32)
    last = torch.ones(2, dtype=torch.int32)
    prefix.begin_forward(scene.first_query, starts([15, 0]), pages, last, A, G, E, 1, q_data_type=torch.float32)
    out_new, lse_new = ragged.forward_return_lse(scene.q, k, v, causal=True, sm_scale=SCALE)
    caches = (scene.k_cache, scene.v_cache)
    out_old, lse_old = prefix.forward_return_lse(scene.q, caches, causal=False, sm_scale=SCALE)
    torch.testing.assert_close(merge_state(out_new, lse_new, out_old, lse_old)[0], scene.expected(causal=True))


@pytest.mark.parametrize("tensor_cores", [False, True])
def test_decoding(tensor_cores: bool) -> None:
    from flashinfer import BatchDecodeWithPagedKVCacheWrapper, fast_decode_plan

    scene = Scene([1] * BATCH, [7, 1, 30])
    options = {"backend": "fa2", "use_cuda_graph": True, "use_tensor_cores": tensor_cores}
    wrapper = BatchDecodeWithPagedKVCacheWrapper(workspace(), "NHD", **options, **buffers("buffer"))
    types = {"data_type": torch.float32, "q_data_type": torch.float32}
    arguments = (*where(scene)[1:], A, G, E, 1)
    wrapper.begin_forward(*arguments, **types)
    torch.testing.assert_close(run(wrapper, scene), scene.expected(causal=True))

    scene = Scene([1] * BATCH, [8, 2, 31], seed=1)
    wrapper._paged_kv_indptr_buf.copy_(scene.first_page)  # SGLang fills the buffers itself
    wrapper._paged_kv_indices_buf[: len(scene.page_numbers)] = scene.page_numbers
    fast_decode_plan(wrapper, *where(scene)[1:], A, G, E, 1, **types, global_override_indptr_cpu=scene.first_page)
    torch.testing.assert_close(run(wrapper, scene), scene.expected(causal=True))


def replan(wrapper: Any, scene: Scene, planned: list[int]) -> None:
    """Plan a replay as SGLang does: from the key lengths `planned` on the host, without reading the device."""
    from sglang.srt.layers.attention.flashinfer_backend import fast_prefill_plan

    wrapper.begin_forward = partial(fast_prefill_plan, wrapper)
    on_host = {"kv_indptr_host": starts(planned), "kv_lens_host": torch.tensor(planned, dtype=torch.int32)}
    most = {"max_q_len": BLOCK, "max_kv_len": max(planned)}
    plan(wrapper, scene, qo_indptr_host=scene.first_query, **on_host, **most)


def replayed(lengths: list[int], planned: list[int]) -> tuple[torch.Tensor, torch.Tensor]:
    """Capture a batch, replay it with key lengths `lengths` and a plan for the lengths `planned`.

    Returns the output and the expected output.
    """
    wrapper, scene = captured(), Scene([BLOCK] * BATCH, [12, 40, 9])
    plan(wrapper, scene)
    run(wrapper, scene, causal=False)
    taken = graph.Graph()
    with torch.inference_mode(), graph.graph(taken):
        out = run(wrapper, scene, causal=False)
    later = Scene([BLOCK] * BATCH, lengths, seed=1)
    for name in ("q", "k_cache", "v_cache"):
        target, source = vars(scene)[name], vars(later)[name]
        target[: len(source)].copy_(source[: len(target)])
        vars(later)[name] = target
    replan(wrapper, later, planned)
    taken.replay()
    return out, later.expected(causal=False)


def test_a_replay_uses_its_own_plan():
    torch.testing.assert_close(*replayed([14, 36, 10], [14, 36, 10]))


@pytest.mark.parametrize("planned", [[15, 36, 10], [14, 35, 10], [14, 36, 200]])
def test_plans_that_differ_from_device_lengths_are_refused(planned):
    with pytest.raises(AssertionError, match="split by one length and merge by the other"):
        replayed([14, 36, 10], planned)


def test_a_padding_row_may_be_planned_short():
    """SGLang plans a padding request with length 1, shorter than its length on the device. Its output is not used."""
    out, expected = replayed([14, 36, 1 + BLOCK], [14, 36, 1])
    torch.testing.assert_close(out[: 2 * BLOCK], expected[: 2 * BLOCK])


def test_pages_outside_the_cache_are_refused() -> None:
    scene, wrapper = Scene([2], [5]), paged()
    scene.pages[0][3] = len(scene.k_cache)
    plan(wrapper, scene)
    with pytest.raises(AssertionError, match=r"pages .* of a cache with 8 pages"):
        run(wrapper, scene)


def test_planning_inside_a_capture_is_refused() -> None:
    wrapper, scene = captured(), Scene([BLOCK] * BATCH, [12, 40, 9])
    with pytest.raises((graph.CaptureError, AssertionError)), graph.graph(graph.Graph()):
        plan(wrapper, scene)


def test_bit_masks_are_refused() -> None:
    scene = Scene([BLOCK] * BATCH, [12, 40, 9])
    wrapper = captured()
    wrapper._custom_mask_buf = torch.zeros(100, dtype=torch.uint8)
    plan(wrapper, scene)
    with pytest.raises(NotImplementedError, match="mask mode 2"):
        run(wrapper, scene)
