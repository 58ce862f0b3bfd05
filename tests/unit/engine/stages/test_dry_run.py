"""Dry run at launch: dummy steps of every kind that serving has, with a recurrent state for each dummy request."""

import itertools
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from sglang.srt.mem_cache.memory_pool import HybridReqToTokenPool
from sglang_dflash_kernels.accept import Accepted, accept_ref
from sglang_dflash_kernels.penalise import Asked, penalise_ref
from sglang_dflash_kernels.specialisations import Server, of_server

from sglang_dflash.engine.stages import dry_run
from sglang_dflash.engine.stages.choice import Choice
from sglang_dflash.engine.stages.copier import CopyStep
from sglang_dflash.engine.stages.dry_run import IN_A_ROW, DryRun, batch_sizes, own_states, peak_bytes, reserve_bytes
from sglang_dflash.engine.stages.greedy import Whole
from sglang_dflash.engine.stages.penalties import Penalties
from sglang_dflash.engine.stages.ranks import OneGroup
from sglang_dflash.engine.stages.stages import Stages
from sglang_dflash.engine.stages.verifier import WidthEngine
from sglang_dflash.engine.step import Block, Plan
from sglang_dflash.flags import WidthPolicy

BLOCK, V = 4, 11


def kernel(size: int) -> tuple[bool, bool, int]:
    """Return what Triton specialises on: is `size` 1, is it a multiple of 16, and log2 of its next power of two."""
    return size == 1, size % 16 == 0, (size - 1).bit_length()


@given(st.integers(1, 600))
def test_batch_sizes_cover_every_kernel_specialisation(n_requests):
    sizes = batch_sizes(n_requests)
    assert {kernel(size) for size in sizes} == {kernel(size) for size in range(1, n_requests + 1)}
    assert sizes == sorted(set(sizes))
    assert sizes[0] >= 1
    assert sizes[-1] == n_requests


@given(st.integers(1, 600), st.sampled_from([8, 12, 16, 24, 32, 48, 64]))
def test_batch_sizes_cover_every_specialisation_of_a_server(n_requests: int, n_value_heads: int) -> None:
    sizes, heads = range(1, n_requests + 1), {"n_value_heads": n_value_heads, "value_width": 128}
    server = Server((1, 2, 4, 6, 8, 12, 16), 16, batch_sizes=sizes, **heads, tracks=True)
    assert of_server(server._replace(batch_sizes=batch_sizes(n_requests))) == of_server(server)


@pytest.mark.parametrize(("n_value_heads", "n_tiles"), [(16, 2), (48, 2), (128, 1)])
def test_few_heads_are_tiled_in_two_ways_and_many_in_one(n_value_heads: int, n_tiles: int) -> None:
    server = Server((16,), 16, range(1, 65), n_value_heads=n_value_heads, value_width=128, tracks=False)
    assert len(of_server(server)["gdn_verify"]) == n_tiles


class Recorded:
    """Stand-in for all stages. Records each call with the sizes on which a kernel may be specialised."""

    def __init__(self) -> None:
        self.calls = set[tuple]()

    def draft(self, plan: Plan, *, graphs: bool) -> None:
        self.calls.add(("draft", plan.n_requests, plan.width))

    def use(self, width: int) -> None:
        self.width = width

    def run(self, batch: Any, plan: Plan) -> SimpleNamespace:
        assert batch.spec_info.draft_token_num == plan.width == self.width
        n_rows = batch.batch_size * self.width
        output = SimpleNamespace(next_token_logits=torch.zeros(n_rows, V), hidden_states=torch.ones(n_rows, 2))
        return SimpleNamespace(logits_output=output)

    def commit(self, batch: Any, plan: Plan, accepted: Accepted) -> None:
        assert (accepted.tracked_B is None) == (batch.mamba_track_indices is None)
        self.calls.add(("commit", plan.n_requests, plan.width, batch.mamba_track_indices is not None))

    def append(self, rids: list[str], plan: Plan, features_TC: torch.Tensor, n_kept_B: torch.Tensor) -> None:
        assert len(features_TC) == plan.n_requests * plan.width
        self.calls.add(("append", plan.n_requests, plan.width))

    def copy(self, plan: Plan, drafts_BN: torch.Tensor) -> CopyStep:
        self.calls.add(("copy", *drafts_BN.shape))
        return CopyStep(drafts_BN, drafts_BN)

    def weigh(self, step: CopyStep, accepted: Accepted) -> None:
        self.calls.add(("weigh", *accepted.committed_BN.shape))

    def write_all(self, plan: Plan, features_TC: torch.Tensor) -> None:
        assert len(features_TC) == plan.n_requests * plan.width
        self.calls.add(("write all", plan.n_requests))

    def dry_run(self, tokens_BN: torch.Tensor, logits_TV: torch.Tensor) -> None:
        self.calls.add(("penalise", *tokens_BN.shape))

    def place(self, anchor_B: torch.Tensor, width: int, **others: Any) -> Plan:
        zeros_BN = torch.zeros(len(anchor_B), width, dtype=torch.int64)
        kv = SimpleNamespace(bind=lambda batch, translator: None)
        block = Block(zeros_BN, zeros_BN, zeros_BN, anchor_B, torch.zeros(len(anchor_B)), 0, kv)
        del others["bound_B_cpu"]
        return Plan(None if width == 1 else block, block, **others)


def make(monkeypatch: pytest.MonkeyPatch, *, device: str = "cpu", tracks: bool = False) -> tuple[DryRun, Recorded]:
    """Return a dry run for a runner on `device`. Tensors are on the CPU regardless."""
    monkeypatch.setattr("sglang_dflash.engine.stages.drafter.enable_num_token_non_padded", lambda: False)
    mamba = SimpleNamespace(enable_mamba_extra_buffer=tracks)
    monkeypatch.setattr(dry_run, "get_exec", lambda: SimpleNamespace(mamba=mamba))
    monkeypatch.setattr(dry_run, "track_interval", lambda batch: 64 if tracks else 0)
    config = SimpleNamespace(context_len=100, model_is_mrope=False)
    runner = SimpleNamespace(
        device=device, model_config=config, page_size=1, kv_index_translator=None, lora_manager=None
    )
    recorded = Recorded()
    recorded.n_slots, recorded.penalties = BLOCK, recorded
    recorded.logits, recorded.ranks = Whole(), OneGroup()
    recorded.worker = SimpleNamespace(model_runner=runner)
    stages = Stages(recorded, recorded, recorded, recorded, accept_ref, recorded, recorded)
    return DryRun(stages, on_host=device == "cpu"), recorded


@pytest.mark.parametrize("tracks", [True, False])
@pytest.mark.parametrize("widths", [(BLOCK,), (1, 2, BLOCK)], ids=["fixed", "several"])
@pytest.mark.parametrize(("device", "sizes"), [("meta", (1, 2, 3)), ("cpu", (1,))])
def test_every_kind_of_step_runs_dry(monkeypatch, device, sizes, widths, tracks):
    """A dry run makes every call that serving makes. Commits have a track index only if the server tracks states."""
    dry, recorded = make(monkeypatch, device="cpu", tracks=tracks)
    dry.on_host = device == "cpu"  # tensors are on the CPU either way
    dry.warm_up(widths, n_requests=3)
    want = {("commit", size, width, tracks) for size, width in itertools.product(sizes, widths)}
    want |= set(itertools.product(("append", "penalise", "copy", "weigh"), sizes, widths))
    want |= set(itertools.product(("write all",), sizes)) | {("draft", size, BLOCK) for size in sizes}
    assert recorded.calls == want


@pytest.mark.parametrize("on_host", [False, True], ids=["gpu", "cpu"])
def test_costs_are_robust_against_slow_rounds_and_steps(monkeypatch, on_host):
    """A draft takes 1 s at width 2, and 2 s at width 4. A verify takes 1, 2 and 3 s at widths 1, 2 and 4.

    Without graphs a draft fills only the verified slots, so it takes less time at a smaller width. The first round
    takes ten times as long. In the fourth round the verify of width 1 takes 9 s. On a CPU two more rounds are slow,
    because other processes use it.
    """
    dry, recorded = make(monkeypatch)
    dry.on_host = on_host
    usual = [1, 2, 1, 2, 3]
    others = [[(2 if on_host else 1) * s for s in usual]] * 2
    rounds = [[10 * s for s in usual], *others, [1, 2, 9, 2, 3], usual]
    taken = itertools.chain(*rounds)
    monkeypatch.setattr(dry, "_time", lambda run: (run(), next(taken))[1])
    assert dry.seconds(2, [1, 2, BLOCK]) == pytest.approx([1, 1 + 2, 2 + 3])
    assert next(taken, None) is None
    assert {call for call in recorded.calls if call[0] == "draft"} == {("draft", 2, 2), ("draft", 2, BLOCK)}


def test_step_times_are_looked_up_at_captured_sizes(monkeypatch):
    """Width 4 has graphs for 1 and 4 requests, so 2 requests run as 4. Step times are 1 s per request and token."""
    dry, recorded = make(monkeypatch)
    graphs = SimpleNamespace(capture_bs=[1, 4], disable_padding=False)
    recorded.engines = {1: WidthEngine(None, None, None, {}), 4: WidthEngine(None, graphs, None, {})}
    dry.runner.max_running_requests, dry.runner.req_to_token_pool = 4, None
    monkeypatch.setattr(dry, "warm_up", lambda widths, n_requests: None)
    monkeypatch.setattr(dry, "seconds", lambda n_requests, widths: [float(n_requests * width) for width in widths])
    monkeypatch.setattr(dry, "end", lambda: None)
    monkeypatch.setattr(dry_run, "from_first_of_ours", lambda: lambda seconds_SW: None)
    assert dry.run(WidthPolicy.AUTO).cost.of(2) == [2.0, 16.0]


def test_a_dummy_request_fits_into_the_context(monkeypatch):
    dry, _ = make(monkeypatch)
    assert dry.plan(2, BLOCK).prefix_len_B.tolist() == [50, 50]
    dry.runner.model_config.context_len = 4096
    assert dry.plan(2, BLOCK).prefix_len_B.tolist() == [dry_run.CONTEXT] * 2


def test_positions_have_three_axes_where_the_targets_do(monkeypatch):
    dry, recorded = make(monkeypatch)
    dry.runner.model_config.model_is_mrope = True
    verified, run = list[Any](), recorded.run
    recorded.run = lambda batch, plan: verified.append(batch) or run(batch, plan)
    dry.after_draft(2, BLOCK)()
    assert verified[0].mrope_positions.tolist() == [verified[0].positions.tolist()] * 3


def test_the_end_resets_the_event_late_rows_and_counts(monkeypatch):
    """If `shared_read_done_event` stayed set, the scheduler would wait for the dry run instead of the first prompt."""
    dry, recorded = make(monkeypatch)
    ended = list[str]()
    recorded.late = SimpleNamespace(forget=lambda: ended.append("late rows"))
    recorded.forget, recorded.restore = lambda: ended.append("counts of copies"), lambda: ended.append("engine")
    dry.runner.shared_read_done_event = object()
    dry.end()
    assert dry.runner.shared_read_done_event is None
    assert ended == ["late rows", "counts of copies", "engine"]


def test_steps_on_a_device_are_timed_consecutively(monkeypatch):
    """On a device consecutive steps are timed, so that host launches overlap with device work, as in serving.

    On a CPU one step is timed.
    """
    for device, n_runs in (("cuda", IN_A_ROW), ("cpu", 1)):
        waits, runs = list[int](), list[int]()
        module = SimpleNamespace(synchronize=lambda waits=waits, runs=runs: waits.append(len(runs)))
        monkeypatch.setattr(torch, "get_device_module", lambda name, module=module: module)
        now = itertools.count()
        monkeypatch.setattr(dry_run.time, "perf_counter", lambda now=now: float(next(now)))
        dry, _ = make(monkeypatch, device=device, tracks=False)
        assert dry._time(lambda runs=runs: runs.append(1)) == 1 / n_runs
        assert waits == [0, n_runs]


def test_each_request_has_its_own_state_during_a_dry_run():
    pool = HybridReqToTokenPool.__new__(HybridReqToTokenPool)
    pool.req_index_to_mamba_index_mapping = torch.tensor([0, 7, 0, 0, 0], dtype=torch.int32)
    pool.mamba_pool = SimpleNamespace(size=9)
    with own_states(pool, 4):
        assert pool.req_index_to_mamba_index_mapping.tolist() == [1, 2, 3, 4, 0]
    assert pool.req_index_to_mamba_index_mapping.tolist() == [0, 7, 0, 0, 0]
    with own_states(SimpleNamespace(), 4):
        pass


def test_a_penalty_dry_run_changes_nothing(monkeypatch):
    asked = list[Asked]()

    def penalise(*args: Any) -> None:
        asked.append(args[-1])
        penalise_ref(*args)

    monkeypatch.setattr("sglang_dflash.engine.stages.penalties.penalise_", penalise)
    logits_TV = torch.randn(2 * BLOCK, V)
    before_TV = logits_TV.clone()
    penalties = Penalties(V, torch.device("cpu"))
    penalties.dry_run(torch.zeros(2, BLOCK, dtype=torch.int64), logits_TV)
    assert torch.equal(logits_TV, before_TV)
    assert asked[0].stop_PE.tolist() == [[-1]]
    assert len(penalties.counts_RV) == 0, "a server that never meets a penalty keeps no counts"


def test_the_reserve_measures_sampling_with_the_largest_step(monkeypatch):
    """If memory does not suffice for sampling the largest step, the server fails at launch instead of while serving."""
    drawn = list[Any]()

    def sampler(output: Any, info: Any, **others: Any) -> None:
        drawn.append((tuple(output.next_token_logits.shape), info, others["positions"].shape))

    choice = Choice.__new__(Choice)
    choice.sampler, choice.device, choice.vocab_size = sampler, torch.device("cpu"), V
    choice.runner = SimpleNamespace(graph_shared_output=None, model_config=SimpleNamespace(vocab_size=V))
    n_bytes = {"memory_allocated": lambda: 1000, "max_memory_allocated": lambda: 1500}
    memory = SimpleNamespace(synchronize=lambda: None, reset_peak_memory_stats=lambda: None, **n_bytes)
    monkeypatch.setattr(torch, "get_device_module", lambda name: memory)
    schedule = SimpleNamespace(chunked_prefill_size=100, max_prefill_tokens=7)
    monkeypatch.setattr(dry_run, "get_schedule", lambda: schedule)
    target = SimpleNamespace(
        max_running_requests=6, model_config=SimpleNamespace(vocab_size=V), device="cuda", sampling_prewarm_result=None
    )
    weight = torch.zeros(3, 10, dtype=torch.bfloat16)  # a token has 10 features of 2 bytes
    draft = SimpleNamespace(model=SimpleNamespace(fc=SimpleNamespace(weight=weight)))
    assert reserve_bytes(target, draft, choice, (1, BLOCK)) == 500 + 2 * 100 * 20
    assert reserve_bytes(target, draft, choice, (1, BLOCK), n_waiting=1) == 500 + 3 * 100 * 20
    drawn.pop()
    (shape, info, positions), *rest = drawn
    assert not rest
    assert shape == (6 * BLOCK, V)
    assert positions == (6 * BLOCK,)
    assert (info.need_top_p_sampling, info.need_top_k_sampling, info.need_min_p_sampling) == (True,) * 3
    assert not info.is_all_greedy
    assert target.sampling_prewarm_result.sampling_headroom_bytes == 500

    for no_chunks in (None, -1, 0):
        schedule.chunked_prefill_size = no_chunks
        assert reserve_bytes(target, draft, choice, (1, BLOCK)) == 500 + 2 * 7 * 20

    drawn.clear()
    reserve_bytes(target, draft, choice, ())
    assert [shape for shape, *_ in drawn] == [(6, V)], "a server that only reads prompts samples one slot per request"
    assert target.sampling_prewarm_result.sampling_input_bytes == 4 * 6 * V

    drawn.clear()
    buffer = torch.ones(6 * BLOCK, V)
    choice.runner.graph_shared_output = SimpleNamespace(
        max_rows=len(buffer), get_logits_buffer=lambda vocab_size, rows: buffer[:rows]
    )
    reserve_bytes(target, draft, choice, (1, BLOCK))
    assert [shape for shape, *_ in drawn] == [(6 * BLOCK, V)]
    assert not buffer.any(), "the logits are in the buffer that captured forwards use"

    def no_memory(output: Any, info: Any, **others: Any) -> None:
        raise torch.OutOfMemoryError("CUDA out of memory")

    choice.sampler = no_memory
    with pytest.raises(RuntimeError, match=r"sampling 4 tokens of each of 6 requests .* lower --max-running-requests"):
        reserve_bytes(target, draft, choice, (1, BLOCK))


def test_peak_memory_is_not_measured_on_cpu():
    assert peak_bytes(lambda: pytest.fail("run"), "cpu") == 0
