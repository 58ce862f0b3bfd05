"""Capacity: computed bytes must equal those of SGLang's pools, and memory must be divided as SGLang divides it."""

from dataclasses import replace
from functools import partial
from types import SimpleNamespace
from typing import Any
from unittest.mock import patch

import pytest
import torch
from sglang.srt.arg_groups import cuda_graph_hook, memory_hook
from sglang.srt.arg_groups.model_overrides import qwen3_vl
from sglang.srt.configs.mamba_utils import Mamba2CacheParams
from sglang.srt.mem_cache import kv_cache_configurator
from sglang.srt.mem_cache.kv_cache_configurator import KVCacheConfigurator
from sglang.srt.mem_cache.memory_pool import HybridReqToTokenPool, MambaPool, MHATokenToKVPool
from sglang.srt.model_executor.cuda_graph_config import Backend

from sglang_dflash.engine.memory import records as state_pool
from sglang_dflash.engine.memory import sizes
from sglang_dflash.engine.memory.records import RecordPool, count_records
from sglang_dflash.engine.memory.sizes import AttentionSizes, RecurrentSizes, block_bytes, ring_slots
from sglang_dflash.flags import Worker
from sglang_dflash.tools.capacity import geometry
from sglang_dflash.tools.capacity import known_models as models
from sglang_dflash.tools.capacity.division import (
    GIB,
    Bound,
    RadixStates,
    Serving,
    TargetSizes,
    capacity,
)
from sglang_dflash.tools.capacity.fraction import default_mem_fraction
from tests.fixtures.recurrent import params

TINY = RecurrentSizes(3, 4, 64, 2, 64, conv_window=3, conv_itemsize=2, state_itemsize=4)
launched = partial(Serving, mem_fraction=0.85, block_size=16, context=8192)
QWEN_27B = geometry.read_target("Qwen3.5-27B")
DRAFT_27B = geometry.read_draft("Qwen3.5-27B-DFlash")
QWEN_8B = geometry.read_target("qwen/qwen3-8b")
DRAFT_8B = geometry.read_draft("Qwen3-8B-DFlash-b16")


def params_of(recurrent: RecurrentSizes, tp_size: int = 1) -> Mamba2CacheParams:
    """Return SGLang's cache parameters for one rank's share of the recurrent layers."""
    heads = {"n_groups": recurrent.n_key_heads, "num_heads": recurrent.n_value_heads}
    widths = {"head_dim": recurrent.value_width, "state_size": recurrent.key_width}
    return params(heads | widths | {"conv_kernel": recurrent.conv_window + 1}, recurrent.n_layers, tp_size)


@pytest.mark.parametrize("tp_size", [1, 2])
@pytest.mark.parametrize("kind", [RecordPool, MambaPool])
def test_recurrent_bytes_equal_allocated_bytes(kind, tp_size, monkeypatch):
    # SGLang rounds the largest captured batch up, so the pool could need more rows. Here the batch is not rounded.
    monkeypatch.setattr("sglang_dflash.engine.memory.records.get_cuda_graph_max_batch_size", lambda n: n)
    n_slots, n_requests, n_tokens = 6, 4, 8
    rank = TINY.shard(tp_size)
    sizes = {"size": n_slots, "spec_state_size": n_requests, "speculative_num_draft_tokens": n_tokens}
    cache = kind(**sizes, cache_params=params_of(TINY, tp_size), mamba_layer_ids=[0, 1, 2], device="cpu")
    state = cache.mamba_cache
    # Each pool has one more row, for padding.
    assert state.temporal.nbytes + sum(conv.nbytes for conv in state.conv) == (n_slots + 1) * rank.state_bytes
    windows = sum(strip.nbytes for strip in cache._intermediate_conv_window_phys)
    allocated = state.intermediate_ssm.nbytes + windows
    if kind is RecordPool:
        assert allocated == (n_requests + 1) * rank.record_bytes(n_tokens)
        return
    values = rank.n_value_heads * rank.value_width * rank.key_width
    conv_shapes = [(rank.n_channels, rank.conv_window)]
    snapshots = block_bytes(n_tokens, n_layers=3, record_values=values, conv_shapes=conv_shapes, conv_itemsize=2)
    assert allocated == (n_requests + 1) * snapshots
    # SGLang's accounting counts a convolution window per token. Its pool stores less, because the windows overlap.
    assert snapshots <= rank.snapshot_bytes(n_tokens)


@pytest.mark.parametrize("page_size", [1, 64])
def test_kv_bytes_equal_allocated_bytes(page_size):
    attention = AttentionSizes(n_layers=3, n_kv_heads=2, head_dim=64, itemsize=2)
    for tp_size, n_heads in ((1, 2), (2, 1), (4, 1)):
        shape = {"dtype": torch.bfloat16, "head_num": n_heads, "head_dim": 64, "layer_num": 3}
        pool = MHATokenToKVPool(size=256, page_size=page_size, **shape, device="cpu", enable_memory_saver=False)
        allocated = sum(buffer.nbytes for buffer in (*pool.k_buffer, *pool.v_buffer))
        assert allocated == (256 + page_size) * attention.bytes_per_token(tp_size)  # one page is for padding


def test_pool_and_report_share_their_formula():
    params = params_of(QWEN_27B.recurrent)
    assert state_pool.block_bytes(params, 16) == QWEN_27B.recurrent.record_bytes(16)
    assert state_pool.snapshot_bytes(params, 16) == QWEN_27B.recurrent.snapshot_bytes(16)


@pytest.mark.parametrize(
    ("window", "block", "page", "slots"),
    [(2048, 16, 1, 2064), (2048, 16, 64, 2176), (16, 16, 1, 32), (1, 2, 128, 256), (100, 8, 16, 128)],
)
def test_ring_slots(window, block, page, slots):
    """With pages of 64, up to 63 slots precede the 2048 of the window and the 16 of the block. Rounded up: 2176."""
    assert ring_slots(window, block, page) == slots
    # Window and block fit, wherever in a page the window begins.
    assert all(sizes.round_up(start + window + block, page) <= slots for start in range(page))


class SGLang:
    """SGLang's functions that divide memory for a hybrid target, with stand-ins for its configuration objects."""

    def __init__(self, target: TargetSizes, serving: Serving, worker: Worker, monkeypatch: pytest.MonkeyPatch) -> None:
        self.serving, self.worker = serving, worker
        radix = serving.radix
        self.schedule = SimpleNamespace(
            max_running_requests=serving.max_requests,
            max_mamba_cache_size=serving.n_states,
            mamba_full_memory_ratio=serving.mamba_ratio,
            disable_overlap_schedule=False,
        )
        mamba = SimpleNamespace(
            enable_linear_replayssm_spec=False,
            enable_mamba_extra_buffer=radix in (RadixStates.EXTRA_BUFFER, RadixStates.EXTRA_BUFFER_LAZY),
            enable_mamba_extra_buffer_lazy=radix is RadixStates.EXTRA_BUFFER_LAZY,
        )
        self.spec = SimpleNamespace(speculative_num_draft_tokens=serving.block_size)
        self.spec.override = partial(patch.multiple, self.spec)
        context = SimpleNamespace(override=lambda _, **changes: vars(self.schedule).update(changes))
        stand_ins = {
            "get_schedule": self.schedule,
            "get_memory": SimpleNamespace(disable_radix_cache=radix is RadixStates.OFF),
            "get_exec": SimpleNamespace(mamba=mamba),
            "get_spec": self.spec,
            "get_context": context,
            "get_disagg": SimpleNamespace(disaggregation_mode="null"),
        }
        for name, stand_in in stand_ins.items():
            monkeypatch.setattr(kv_cache_configurator, name, lambda stand_in=stand_in: stand_in)
        monkeypatch.setattr(kv_cache_configurator, "_pd_prefill_skips_mamba_spec_state", lambda: False)
        monkeypatch.setattr(state_pool, "get_spec", lambda: self.spec)
        pool = RecordPool if worker is Worker.PLUGIN else MambaPool
        monkeypatch.setattr(HybridReqToTokenPool, "mamba_pool_cls", pool)
        cache_params = params_of(target.recurrent, serving.tp_size)
        self.configurator = SimpleNamespace(
            mambaish_config=SimpleNamespace(mamba2_cache_params=cache_params),
            pp_size=1,
            attn_dp_size=1,
            extra_mamba_cache_bytes_per_req=0,
            hybrid_gdn_config=object(),
            hybrid_kda_config=None,
            spec_algorithm=SimpleNamespace(is_none=lambda: False),
            fused_entry_bytes=lambda _: None,
            model_config=SimpleNamespace(context_len=262144),
        )
        ratio = partial(KVCacheConfigurator._calculate_mamba_ratio, self.configurator)
        self.configurator._calculate_mamba_ratio = ratio

    def divide(self, rest_gib: float, bytes_per_token: int) -> tuple[int, int, int]:
        """Return how many recurrent-state slots, KV tokens and requests fit."""
        left = count_records(KVCacheConfigurator._handle_max_mamba_cache, self.configurator, rest_gib)
        n_tokens = int(left * GIB) // bytes_per_token
        n_requests = KVCacheConfigurator.resolve_max_num_reqs(self.configurator, n_tokens)
        return self.schedule.max_mamba_cache_size, n_tokens, n_requests


LAUNCHES = (  # memory of the card in GiB, and changes to `Serving`
    (100.5, {}),
    (192, {"tp_size": 2, "max_requests": 256}),
    (141, {"mamba_ratio": 2.3, "block_size": 8}),
    (100.5, {"max_requests": 12}),
    (100.5, {"n_states": 40}),
)


@pytest.mark.parametrize("worker", Worker)
@pytest.mark.parametrize("radix", RadixStates)
@pytest.mark.parametrize(("card_gib", "changes"), LAUNCHES)
def test_memory_is_divided_as_sglang_does(worker, radix, card_gib, changes, monkeypatch):
    """State slots, KV tokens and requests must equal SGLang's.

    Without a prefix cache, SGLang's worker allocates states for `max_requests` requests, even if they do not fit. So
    this case has only twelve requests.
    """
    if radix is RadixStates.OFF and worker is Worker.STOCK:
        changes = changes | {"max_requests": 12}
    serving = Serving(**{"mem_fraction": 0.95, "block_size": 16, "context": 1, "radix": radix} | changes)
    weights = (QWEN_27B.weight_bytes + DRAFT_27B.split_bytes) / serving.tp_size + DRAFT_27B.whole_bytes
    rest = card_gib * GIB * 0.95 - weights - 100 * 2**20  # 100 MiB: SGLang's image cache
    # K and V in two bytes: 16 layers of the target with 4 heads of 256, 5 layers of the draft with 8 heads of 128.
    per_token = (16 * 2 * 4 * 256 * 2 + 5 * 2 * 8 * 128 * 2) // serving.tp_size
    n_slots, n_tokens, n_requests = SGLang(QWEN_27B, serving, worker, monkeypatch).divide(rest / GIB, per_token)
    mine = capacity(QWEN_27B, DRAFT_27B, serving, card_gib, worker)
    assert mine.n_states == n_slots
    # SGLang adds the same terms in another order, so rounding may differ by one token.
    assert mine.n_tokens == pytest.approx(n_tokens, abs=1)
    assert min(mine.limits[Bound.STATE], serving.max_requests) == n_requests


def of_8b(worker: Worker = Worker.PLUGIN, draft: Any = DRAFT_8B, **changes: Any) -> Any:
    return capacity(QWEN_8B, draft, launched(**changes), 80, worker)


def of_27b(worker: Worker = Worker.PLUGIN, card_gib: float = 141, **changes: Any) -> Any:
    return capacity(QWEN_27B, DRAFT_27B, launched(**changes), card_gib, worker)


def test_snapshots_leave_nine_to_eleven_27b_requests_on_an_h200():
    """A card of 139 GiB with 10 to 18 GiB reserved, weights in bf16 and recurrent states in fp32."""
    for reserve_gib in (10, 14, 18):
        kept = {"card_gib": 139, "mem_fraction": 1 - reserve_gib / 139}
        stock = of_27b(Worker.STOCK, **kept)
        assert stock.requests in (9, 10, 11)
        assert stock.bound is Bound.STATE
        assert 16 <= of_27b(Worker.STOCK, **kept, block_size=8).requests <= 18
        assert of_27b(**kept).requests > 4 * stock.requests
    assert QWEN_27B.attention.bytes_per_token(1) == 65536
    assert DRAFT_27B.attention.bytes_per_token(1) == 20480


def test_every_rank_holds_unsplit_weights_whole():
    ours = of_8b(tp_size=4)
    assert ours.draft_weights == DRAFT_8B.split_bytes / 4 + DRAFT_8B.whole_bytes
    assert DRAFT_8B.whole_bytes > 2 * 4096 * 5 * 4096  # `fc` in bf16, from five layers' features to the hidden size
    assert ours.target_weights == QWEN_8B.weight_bytes / 4


def test_a_dense_target_differs_only_by_its_rings():
    stock, ours = (of_8b(worker, max_requests=256) for worker in (Worker.STOCK, Worker.PLUGIN))
    assert stock.limits == ours.limits
    assert stock.bound is Bound.TOKENS
    rest = 80 * GIB * 0.85 - stock.target_weights - stock.draft_weights
    assert stock.n_tokens == int(rest) // (36 * 8 * 128 * 2 * 2 + 5 * 8 * 128 * 2 * 2)
    stock, ring = (of_8b(worker, max_requests=256, window=2048) for worker in (Worker.STOCK, Worker.PLUGIN))
    assert stock.limits == ours.limits  # SGLang's window saves reads, not memory
    assert ring.ring_bytes == 257 * 2064 * 5 * 8 * 128 * 2 * 2
    assert ring.draft_bytes_per_token == 0
    assert ring.n_tokens == int(rest - ring.ring_bytes) // (36 * 8 * 128 * 2 * 2)
    assert of_8b(window=16).ring_bytes == 49 * 32 * 20480, "a window as short as a block"
    sliding = replace(DRAFT_8B, window=4096)  # the draft's own window, without a flag
    assert of_8b(draft=sliding).ring_bytes == 49 * 4112 * 20480
    assert of_8b(Worker.STOCK, sliding).ring_bytes == 0


@pytest.mark.parametrize(("page_size", "tokens_of_a_request"), [(1, 100 + 16 + 16), (64, 3 * 64)])
def test_tokens_come_in_pages_and_a_request_reserves_two_blocks(page_size, tokens_of_a_request):
    """A request reserves KV slots for its 100 tokens, the block in flight and the next block."""
    result = of_8b(context=100, page_size=page_size, max_requests=10**6)
    rest = 80 * GIB * 0.85 - result.target_weights - result.draft_weights
    whole = int(rest) // (36 * 8 * 128 * 2 * 2 + 5 * 8 * 128 * 2 * 2)
    assert whole % 64 > 0
    assert result.n_tokens == whole - whole % page_size
    assert result.limits[Bound.TOKENS] == result.n_tokens // tokens_of_a_request


def test_copies_need_token_histories_and_longer_blocks():
    """SGLang's worker makes no n-gram copies, so `copies` and `wider` change nothing for it."""
    texts, wide = of_27b(window=2048, copies=True), of_27b(window=2048, copies=True, wider=32)
    assert texts.text_bytes == 49 * 262144 * 4
    assert of_27b(window=2048).n_tokens - texts.n_tokens == pytest.approx(texts.text_bytes / 65536, abs=1)
    assert wide.ring_bytes == (wide.limits[Bound.STATE] + 1) * (2048 + 32) * 20480
    assert wide.request_block_bytes == QWEN_27B.recurrent.record_bytes(32)
    short = of_27b(window=2048, copies=True, wider=32, context=100)
    assert short.limits[Bound.TOKENS] == short.n_tokens // (100 + 64)
    assert of_27b(Worker.STOCK, window=2048, copies=True, wider=32) == of_27b(Worker.STOCK, window=2048)


def test_an_fp8_copy_of_the_head_is_subtracted():
    """Each of two ranks holds an fp8 copy of its half of the head. SGLang's worker has no copy."""
    for worker, n_bytes in ((Worker.PLUGIN, 151936 * (4096 + 4) / 2), (Worker.STOCK, 0)):
        full, copied = (of_8b(worker, tp_size=2, fp8_head=fp8) for fp8 in (False, True))
        assert (full.head_copy, copied.head_copy) == (0, n_bytes)
        per_token = full.target_bytes_per_token + full.draft_bytes_per_token
        assert full.n_tokens - copied.n_tokens == pytest.approx(n_bytes / per_token, abs=1)


def test_a_reduced_vocabulary_copies_its_rows_of_the_head():
    draft = replace(DRAFT_8B, head_bytes=32000 * 4096 * 2, fp8_head_bytes=32000 * (4096 + 4))
    assert of_8b(draft=draft, tp_size=2).head_copy == 32000 * 4096
    assert of_8b(draft=draft, tp_size=2, fp8_head=True).head_copy == 32000 * (4096 + 4) / 2
    assert of_8b(Worker.STOCK, draft=draft).head_copy == 0


@pytest.mark.parametrize(
    ("changes", "bound"),
    [
        ({}, Bound.STATE),
        ({"context": 131072}, Bound.TOKENS),
        ({"max_requests": 4}, Bound.FLAG),
        ({"card_gib": 60}, Bound.WEIGHTS),
    ],
)
def test_the_bound_is_named(changes, bound):
    result = of_27b(**changes)
    assert result.bound is bound
    assert (result.requests == 0) is (bound is Bound.WEIGHTS)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"tp_size": 16}, "Qwen3.5-27B: 24 heads cannot be split over --tp-size 16; give a divisor of 8$"),
        ({"tp_size": 3}, "Qwen3.5-27B-DFlash: 32 heads cannot be split over --tp-size 3"),
        ({"window": 8}, "--window 8 is smaller than the block of 16; give at least 16"),
    ],
)
def test_impossible_launches_are_refused(changes, message):
    with pytest.raises(ValueError, match=message):
        of_27b(**changes)


def test_unsplittable_recurrent_layers_are_refused():
    target, draft = replace(QWEN_27B, n_heads=32), replace(DRAFT_27B, n_heads=32)
    with pytest.raises(ValueError, match="recurrent layers: 16 heads cannot be split over --tp-size 32"):
        capacity(target, draft, launched(tp_size=32), 141, Worker.PLUGIN)


@pytest.mark.parametrize("gib", [16, 24, 44.99, 79.65, 140.4, 179])
@pytest.mark.parametrize("tp_size", [1, 4])
@pytest.mark.parametrize("image_width", [0, 1152])
def test_the_default_fraction_equals_sglangs(gib, tp_size, image_width, monkeypatch):
    phase = partial(SimpleNamespace, max_bs=None, bs=None)
    graphs = SimpleNamespace(decode=phase(backend=Backend.FULL), prefill=phase(backend=Backend.BREAKABLE))
    model = SimpleNamespace(
        is_multimodal=bool(image_width),
        hf_config=SimpleNamespace(vision_config=SimpleNamespace(hidden_size=image_width, depth=27)),
    )
    args = SimpleNamespace(
        device="cuda", cuda_graph_config=graphs, chunked_prefill_size=None, max_running_requests=None, tp_size=tp_size,
        pp_size=1, max_total_tokens=None, model_path="Qwen3.5-27B", mem_fraction_static=None, language_only=False,
        language_model_only=False, disaggregation_mode="null", disable_cuda_graph_padding=False,
        speculative_algorithm="DFLASH", enable_symm_mem=False, moe_a2a_backend="none",
    )  # fmt: skip
    stand_ins = {
        "resolving_view": lambda args: args,
        "resolved_view": lambda args: args,
        "declare_resolution": lambda args, _, **values: vars(args).update(values),
        "get_device_memory_capacity": lambda _: gib * 1024,
        "model_config_of": lambda _: model,
        "post_capture_kv_sizing_planned": lambda _: False,
        "use_mla_backend": lambda _: False,
        "attn_dp_enabled_of": lambda _: False,
        "reserve_for_deepep_a2a_mb": lambda _: 0.0,
        "get_platform": lambda: SimpleNamespace(is_xpu=False),
    }
    for name, stand_in in stand_ins.items():
        monkeypatch.setattr(memory_hook, name, stand_in)
    monkeypatch.setattr(cuda_graph_hook, "resolving_view", lambda args: args)
    monkeypatch.setattr(qwen3_vl, "expand_multimodal_decode_graph_to_running_limit", lambda *_: None)
    memory_hook.handle_gpu_memory_settings(args)
    mine = default_mem_fraction(gib, tp_size=tp_size, image_width=image_width)
    assert mine == pytest.approx(args.mem_fraction_static)


def test_published_drafts_have_a_target():
    assert {model.draft for model in models.TARGETS.values()} == set(models.DRAFTS)
