"""Worker: what each stage of a step gets from the stages before it, and what reaches the scheduler and the policy."""

from contextlib import nullcontext
from types import SimpleNamespace
from typing import Any
from unittest.mock import ANY

import pytest
import torch
from sglang.srt.managers.scheduler_components.weight_updater import SchedulerWeightUpdaterManager
from sglang.srt.managers.utils import GenerationBatchResult
from sglang.srt.model_executor.forward_batch_info import CaptureHiddenMode, ForwardMode

from sglang_dflash.engine import worker as worker_module
from sglang_dflash.engine.worker import DFlashWorker


class Recorded:
    """Stand-in for all stages: records each call, and returns what `returned` has under the method's name."""

    def __init__(self, **returned: Any) -> None:
        self.returned, self.calls = returned, list[tuple[Any, ...]]()

    def __getattr__(self, name: str) -> Any:
        def call(*args: Any, **options: Any) -> Any:
            self.calls.append((name, *args, *options.values()))
            return self.returned.get(name)

        return call


def worker_of(stages: Recorded) -> Any:
    worker: Any = DFlashWorker.__new__(DFlashWorker)
    names = ("planner", "drafter", "copier", "verifier", "choice", "context_kv")
    worker.stages = SimpleNamespace(accept=stages.accept, **dict.fromkeys(names, stages))
    worker.width, worker.hidden_states = stages, stages
    worker._target_worker = stages
    return worker


def test_each_stage_gets_the_results_of_its_own_step(monkeypatch: pytest.MonkeyPatch) -> None:
    """Two steps differ in width, requests, grammars, and in whether graphs may run."""
    monkeypatch.setattr(worker_module, "track_interval", lambda batch: ("interval", batch))
    for step, (rids, width, graphs) in enumerate(((["a", "b"], 4, True), (["b"], 1, False))):
        plan = SimpleNamespace(prefix_len_B=f"lengths before step {step}")
        copied = SimpleNamespace(tokens_BN=f"tokens {step}")
        target = SimpleNamespace(features_TC=f"features {step}")
        accepted = SimpleNamespace(
            n_accepted_B=f"accepted {step}", n_committed_B=f"committed {step}", next_prefix_len_B=f"lengths {step}"
        )
        stages = Recorded(
            decide=width, plan=plan, draft=f"drafts {step}", copy=copied, verify=target, choose=f"chosen {step}",
            accept=accepted, step_result=f"result {step}",
        )  # fmt: skip
        worker, batch = worker_of(stages), decoding(rids, graphs=graphs)
        worker.step_result = stages.step_result
        barrier: Any = f"barrier {step}" if graphs else None
        assert worker.forward_batch_generation(batch, stages.publish, barrier) == f"result {step}"
        assert stages.calls == [
            ("decide", rids, batch.reqs, ANY),  # and the clock
            ("plan", batch, width),
            ("before_draft", plan),
            ("draft", plan, graphs),
            ("copy", plan, f"drafts {step}"),
            ("verify", batch, plan, f"tokens {step}"),
            ("choose", batch, plan, f"tokens {step}", target, barrier),
            ("accept", f"tokens {step}", f"chosen {step}", f"lengths before step {step}", ("interval", batch)),
            ("count_tokens", batch, accepted),
            ("weigh", copied, accepted),
            ("commit", batch, plan, accepted),
            ("publish", f"lengths {step}"),
            ("append", rids, plan, f"features {step}", f"committed {step}"),
            ("step_result", batch, plan, target, accepted),
        ]


def decoding(rids: list[str], *, graphs: bool) -> Any:
    reqs = [SimpleNamespace(rid=rid) for rid in rids]
    return SimpleNamespace(
        reqs=reqs, forward_mode=ForwardMode.DECODE, is_extend_in_batch=False, can_run_decode_cuda_graph=graphs
    )


def test_a_prefill_is_reported_read_and_returned() -> None:
    """The policy must not time the prefill as a step. The next step begins at the prefill's lengths and anchors."""
    lengths, anchors, drawn = torch.tensor([5, 9]), torch.tensor([7, 8]), torch.tensor([1, 2])
    output = SimpleNamespace(hidden_states="features")
    read = GenerationBatchResult(logits_output=output, next_token_ids=drawn)
    stages = Recorded(forward_batch_generation=read, anchors=anchors)
    batch: Any = SimpleNamespace(seq_lens=lengths, forward_mode=ForwardMode.EXTEND, return_hidden_states=False)
    result = worker_of(stages).forward_batch_generation(batch, stages.publish)
    assert stages.calls == [
        ("interrupt",),
        ("begin", batch),
        ("restore",),
        ("forward_batch_generation", batch, CaptureHiddenMode.FULL),
        ("anchors", batch, drawn),
        ("publish", lengths),
        ("append_prompt", batch, "features"),
        ("read", batch),
        ("of_prompts", batch, output),
    ]
    assert output.hidden_states is None, "the features would be copied to the host"
    assert result.new_seq_lens is lengths
    assert (result.next_draft_input.bonus_tokens, result.next_draft_input.new_seq_lens) == (anchors, lengths)


def test_a_rank_without_requests_keeps_up() -> None:
    stages = Recorded()
    worker = worker_of(stages)
    worker.device, worker.config = torch.device("cpu"), SimpleNamespace(block_size=8)
    batch: Any = SimpleNamespace(forward_mode=ForwardMode.IDLE)
    result = worker.forward_batch_generation(batch, stages.publish)
    assert [name for name, *_ in stages.calls] == ["keep_up", "publish"]
    assert stages.calls[0] == ("keep_up", batch)
    assert result.speculative_num_draft_tokens == 8
    assert len(result.next_token_ids) == 0


def test_outcomes_reach_the_policy(monkeypatch: pytest.MonkeyPatch) -> None:
    times_s = iter((1.5, 2.0))
    monkeypatch.setattr(worker_module.time, "perf_counter", lambda: next(times_s))
    stages = Recorded()
    worker = worker_of(stages)
    worker.on_verify_complete_cpu([3, 0])
    worker.on_verify_complete_cpu([1], batch_size=1)
    assert stages.calls == [("observe", [3, 0], 1.5), ("observe", [1], 2.0)]


def test_recurrent_states_are_set_up_for_the_widest_verify(monkeypatch: pytest.MonkeyPatch) -> None:
    """A verify may be wider than the block, if n-gram copies continue it."""
    monkeypatch.setattr(worker_module, "fit_page_tables", lambda runner: None)
    attached = list[Any]()
    worker = worker_of(Recorded())
    worker.config = SimpleNamespace(block_size=8, widest=12)
    worker.making_draft = nullcontext
    worker.draft_runner, worker._draft_worker = None, SimpleNamespace(init_attention_backends=lambda: None)
    worker.target_runner = SimpleNamespace(attn_backend="backend of 12")
    worker.state_for = lambda width: SimpleNamespace(attach=lambda backend: attached.append((width, backend)))
    worker.init_attention_backends()
    assert attached == [(12, "backend of 12")]


def test_sglang_saves_the_drafts_weights_under_their_own_url() -> None:
    saved = list[tuple[str, str]]()

    def runner(name: str) -> Any:
        return SimpleNamespace(weight_exporter=SimpleNamespace(save_remote_model=lambda url: saved.append((name, url))))

    worker = worker_of(Recorded())
    worker.draft_runner = runner("draft")
    manager: Any = SimpleNamespace(tp_worker=SimpleNamespace(model_runner=runner("target")), draft_worker=worker)
    SchedulerWeightUpdaterManager.save_remote_model(manager, {"url": "a", "draft_url": "b"})
    assert saved == [("target", "a"), ("draft", "b")]
