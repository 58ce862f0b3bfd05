"""Verifier: the target runner's backend and graphs for prompts and blocks, and the outputs of a verify."""

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from sglang.srt.layers.moe.fused_moe_triton.layer import FusedMoE
from sglang.srt.managers.utils import GenerationBatchResult
from sglang.srt.model_executor.forward_batch_info import CaptureHiddenMode, ForwardMode
from sglang.srt.model_executor.model_runner import ModelRunnerOutput
from sglang.srt.speculative.dflash_info import DFlashVerifyInput
from sglang_dflash_kernels.accept import accept_ref
from torch import nn

from sglang_dflash.engine.host import results
from sglang_dflash.engine.stages.copier import NoCopies
from sglang_dflash.engine.stages.outputs import HiddenStates
from sglang_dflash.engine.stages.ranks import OneGroup
from sglang_dflash.engine.stages.state import NoState
from sglang_dflash.engine.stages.verifier import Verifier, WidthEngine
from sglang_dflash.engine.step import Block, Plan, Target
from sglang_dflash.engine.worker import DFlashWorker, not_published

OWN = SimpleNamespace(name="SGLang's own backend"), SimpleNamespace(name="SGLang's own graphs")


def make_verifier() -> Verifier:
    runner = SimpleNamespace(
        attn_backend=OWN[0],
        decode_cuda_graph_runner=OWN[1],
        device="cuda",
        forward=lambda batch: batch,
        lora_manager=None,
    )
    engines = {n: WidthEngine(f"backend of {n}", f"graphs of {n}", NoState(), {}) for n in (1, 4)}
    return Verifier(SimpleNamespace(model_runner=runner), engines, OneGroup(), HiddenStates(), on_host=True)


def test_prompts_are_read_with_sglangs_own_backend():
    """A prompt needs SGLang's own backend, but after a step of width 4 or 1 the runner has another one."""
    verifier = make_verifier()
    runner = verifier.worker.model_runner
    seen = list[Any]()

    def read(batch: object, capture_hidden_mode: object) -> GenerationBatchResult:
        seen.append((runner.attn_backend, runner.decode_cuda_graph_runner))
        return GenerationBatchResult(
            logits_output=SimpleNamespace(hidden_states=None), next_token_ids=torch.zeros(1, dtype=torch.int64)
        )

    verifier.worker.forward_batch_generation = read
    ours = DFlashWorker.__new__(DFlashWorker)
    ours._target_worker, ours.hidden_states = verifier.worker, HiddenStates()
    ours.width = SimpleNamespace(interrupt=lambda: None)
    ours.stages = SimpleNamespace(
        verifier=verifier,
        choice=SimpleNamespace(begin=lambda batch: None, anchors=lambda batch, drawn: drawn),
        context_kv=SimpleNamespace(append_prompt=lambda batch, features: None),
        copier=NoCopies(),
    )
    batch = SimpleNamespace(seq_lens=torch.ones(1, dtype=torch.int64), return_hidden_states=False)
    for width in (4, 1):
        verifier.use(width)
        assert runner.attn_backend == f"backend of {width}"
        ours.prefill(batch, not_published)
    assert seen == [OWN, OWN]


@pytest.mark.parametrize("decodes", [True, False])
def test_one_token_is_decoded_with_a_length_that_includes_it(decodes):
    """In a verify `seq_lens` has no tokens of the block. With SGLang's verify input, decoding would be a draft's."""
    verifier = make_verifier()
    verifier.engines = {1: WidthEngine("backend", "graphs", NoState(decodes=decodes), {}), 4: verifier.engines[4]}
    for width, decoded in ((1, decodes), (4, False)):
        plan = plan_of(2, width)
        batch = SimpleNamespace(forward_mode=ForwardMode.TARGET_VERIFY, spec_info="block", seq_lens=plan.prefix_len_B)
        verifier.run(batch, plan)
        want = ForwardMode.DECODE, None, [1, 1]
        if not decoded:
            want = ForwardMode.TARGET_VERIFY, "block", [0, 0]
        assert (batch.forward_mode, batch.spec_info, batch.seq_lens.tolist()) == want


def plan_of(n_requests: int, width: int) -> Plan:
    zeros_BN = torch.zeros(n_requests, width, dtype=torch.int64)
    end_B = torch.full((n_requests,), width)
    block = Block(zeros_BN, zeros_BN, zeros_BN, end_B, end_B, 0, kv=None)
    return Plan(block, block, prefix_len_B=zeros_BN[:, 0], rows_B=zeros_BN[:, 0], rows_B_cpu=zeros_BN[:, 0])


def test_attention_is_planned_once_and_features_stay_on_the_device(monkeypatch):
    """Preparation must defer planning, because SGLang's forward plans attention itself unless it replays a graph."""
    deferred = list[bool]()
    features = torch.ones(2 * 4, 3)
    run = ModelRunnerOutput(SimpleNamespace(hidden_states=features), can_run_graph=True)

    def prepare(self, batch, worker, *, defer_metadata_init):
        deferred.append(defer_metadata_init)
        return run, True

    monkeypatch.setattr(DFlashVerifyInput, "prepare_for_verify", prepare)
    verifier = make_verifier()
    batch = SimpleNamespace(has_grammar=False, return_hidden_states=False)
    target = verifier.verify(batch, plan_of(2, 4), torch.zeros(2, 4, dtype=torch.int64))
    assert deferred == [True]
    assert verifier.worker.model_runner.attn_backend == "backend of 4"
    assert target.run is run
    assert target.features_TC is features
    assert target.output.hidden_states is None, "hidden states in the output would be copied to the host"


@pytest.mark.parametrize("has_grammar", [True, False])
def test_a_verify_passes_tokens_positions_and_slots(has_grammar, monkeypatch):
    """A batch's `seq_lens_cpu` are upper bounds of its lengths, from which the host plans attention on a GPU."""
    seen = list[Any]()
    run = ModelRunnerOutput(SimpleNamespace(hidden_states=None), can_run_graph=True)

    def prepare(block: DFlashVerifyInput, batch: object, worker: object, **_: object) -> tuple[object, bool]:
        seen.append(block)
        return run, True

    monkeypatch.setattr(DFlashVerifyInput, "prepare_for_verify", prepare)
    positions_BN = torch.tensor([[7, 8, 9, 10], [20, 21, 22, 23]])
    kv: Any = object()
    end_B = torch.tensor([11, 24])
    verified = Block(torch.zeros_like(positions_BN), positions_BN, 100 + positions_BN, end_B, end_B, 35, kv=kv)
    tokens_BN = torch.tensor([[1, 2, 3, 4], [5, 6, 7, 8]])
    batch: Any = SimpleNamespace(has_grammar=has_grammar, return_hidden_states=False)
    target = make_verifier().verify(batch, plan_of(2, 4)._replace(verified=verified), tokens_BN)

    (block,) = seen
    assert block.draft_token.tolist() == [1, 2, 3, 4, 5, 6, 7, 8]
    assert block.positions.tolist() == [7, 8, 9, 10, 20, 21, 22, 23]
    assert (block.draft_token_num, block.capture_hidden_mode) == (4, CaptureHiddenMode.FULL)
    assert block.kv_loc_plan is kv
    assert batch.out_cache_loc.tolist() == [107, 108, 109, 110, 120, 121, 122, 123]
    assert batch.seq_lens_cpu.tolist() == [11, 24]
    assert batch.seq_lens_sum == 35
    if has_grammar:
        *_, drafts_BN = target.grammar_tree.resolve()
        assert torch.equal(drafts_BN, tokens_BN)
    else:
        assert target.grammar_tree is None


class Experts(FusedMoE):
    """SGLang's mixture-of-experts layer without weights."""

    def __init__(self) -> None:
        nn.Module.__init__(self)


class Model(nn.Module):
    def __init__(self, *parts: nn.Module) -> None:
        super().__init__()
        self.parts = nn.ModuleList(parts)

    def forward(self, input_ids: object, positions: object, batch: object) -> str:
        return "directly"


@pytest.mark.parametrize(
    ("on_host", "model", "graphs", "way"),
    [
        pytest.param(True, Model(), None, "directly", id="plain"),
        pytest.param(True, Model(Experts()), None, "through the runner", id="experts"),  # experts need SGLang's runner
        pytest.param(True, Model(), "graphs", "through the runner", id="graphs"),
        pytest.param(False, Model(), None, "through the runner", id="on-a-device"),
    ],
)
def test_only_a_plain_target_on_the_host_is_called_directly(on_host, model, graphs, way):
    runner = SimpleNamespace(
        attn_backend=SimpleNamespace(init_forward_metadata=lambda batch: None),
        decode_cuda_graph_runner=graphs,
        model=model,
        forward=lambda batch: SimpleNamespace(logits_output="through the runner"),
    )
    engines = {4: WidthEngine(runner.attn_backend, graphs, NoState(), {})}
    verifier = Verifier(SimpleNamespace(model_runner=runner), engines, OneGroup(), HiddenStates(), on_host=on_host)
    batch = SimpleNamespace(input_ids=None, positions=None, moe_num_token_non_padded=None)
    assert verifier.forward(batch).logits_output == way


def test_experts_indexer_and_metrics_reach_the_scheduler(monkeypatch):
    """SGLang's own worker also returns routed experts, indexer output and expert metrics with a step."""
    monkeypatch.setattr(results, "DraftInput", lambda **fields: SimpleNamespace(**fields))
    output = SimpleNamespace(sampling_mask_output=None)
    run = ModelRunnerOutput(output, True, "metrics", "experts", "indexer")
    tokens_BN = torch.zeros(2, 4, dtype=torch.int64)
    accepted = accept_ref(tokens_BN, tokens_BN, torch.zeros(2, dtype=torch.int64))
    result = DFlashWorker.__new__(DFlashWorker).step_result(
        SimpleNamespace(return_logprob=False), plan_of(2, 4), Target(run, torch.zeros(8, 3), None), accepted
    )
    assert result.logits_output is output
    assert result.can_run_cuda_graph is True
    assert result.expert_distribution_metrics == "metrics"
    assert (result.routed_experts_output, result.indexer_topk_output) == ("experts", "indexer")


def narrow_plan(n_requests: int, drafted: int, width: int) -> Plan:
    """Return a plan that drafts blocks of `drafted` tokens and verifies `width` of each."""
    return plan_of(n_requests, width)._replace(drafted=plan_of(n_requests, drafted).verified)


def test_a_narrow_steps_stride_is_its_verify_width(monkeypatch):
    """The stride is the number of tokens per request, for log-probabilities, the scheduler and `cap_lens`.

    It is also the largest number of tokens that the step may commit, for which KV slots are reserved.
    """
    asked: list[int] = []
    monkeypatch.setattr(results, "compute_spec_logprobs", lambda *args, chain_stride: asked.append(chain_stride))
    plan, tokens_BN = narrow_plan(2, drafted=8, width=4), torch.zeros(2, 4, dtype=torch.int64)
    accepted = accept_ref(tokens_BN, tokens_BN, plan.prefix_len_B)
    run = ModelRunnerOutput(None, False, None, None, None)
    result = results.result_of(SimpleNamespace(return_logprob=True), plan, Target(run, None, None), accepted)
    assert asked == [4]
    assert result.speculative_num_draft_tokens == 4
    assert result.cap_lens.tolist() == [4, 4]
    assert result.next_draft_input.n_in_flight == 4


def test_the_engine_that_verified_commits():
    commits = list[int]()
    verifier = make_verifier()
    for width, engine in verifier.engines.items():
        state = SimpleNamespace(commit=lambda *args, width=width: commits.append(width))
        verifier.engines[width] = engine._replace(state=state)
    verifier.commit(None, narrow_plan(1, drafted=8, width=4), torch.ones(1))
    assert commits == [4]
