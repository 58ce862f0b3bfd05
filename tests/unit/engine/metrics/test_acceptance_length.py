"""All figures of one server have the same acceptance length and the same number of steps, whatever requests do.

SGLang's own function reads the outcomes, so SGLang's counts in `meta_info` are real.
"""

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from sglang.srt.managers.schedule_batch import Req
from sglang.srt.managers.scheduler_components.batch_result_processor import SchedulerBatchResultProcessor
from sglang.srt.managers.utils import GenerationBatchResult

from sglang_dflash.engine.metrics.meter import Exports, Meter
from sglang_dflash.engine.metrics.stage_times import StageTimes
from sglang_dflash.engine.width.chooser import Chooser
from sglang_dflash.engine.width.policy import Fixed
from sglang_dflash.tools.bench.client import steps_of
from sglang_dflash.tools.bench.measure import total
from sglang_dflash.tools.check import served
from tests.unit.engine.metrics.test_meter import Clock, Scraped

WIDTH = 8


class Request(SimpleNamespace):
    """Stand-in for SGLang's `Req`, with its own histograms of drafts and widths."""

    update_spec_correct_drafts_histogram = Req.update_spec_correct_drafts_histogram
    update_spec_cap_lens_histogram = Req.update_spec_cap_lens_histogram

    def __init__(self, rid: str) -> None:
        super().__init__(
            rid=rid, is_retracted=False, ended=False, grammar=None,
            kv=SimpleNamespace(req_pool_idx=1, kv_committed_len=50),
            spec_verify_ct=0, spec_num_correct_drafts=0, spec_num_cap_tokens=0,
            spec_correct_drafts_histogram=[], spec_cap_lens_histogram=[],
        )  # fmt: skip

    def finished(self) -> bool:
        return self.ended

    def meta(self) -> dict[str, Any]:
        """Return the counts that SGLang puts into `meta_info`; none before the first step."""
        names = ("spec_verify_ct", "spec_num_correct_drafts", "spec_correct_drafts_histogram")
        return {name: getattr(self, name) for name in names}


class Figures:
    """A scheduler of stand-ins, with SGLang's reader of outcomes and this plugin's two counters."""

    def __init__(self) -> None:
        self.scraped = Scraped()
        self.chooser = Chooser(Fixed(WIDTH))
        exports = Exports(self.scraped.collector, widest=WIDTH, widths=[WIDTH])
        self.meter = Meter(exports, StageTimes(Clock()), lambda row, prefix_len: False, {})
        self.processor: Any = SimpleNamespace(
            metrics_reporter=SimpleNamespace(snapshot_spec_decode_metrics=lambda batch, result: None),
            model_worker=SimpleNamespace(
                on_verify_complete_cpu=lambda accepted, batch_size: self.chooser.observe(accepted, 0.0)
            ),
            advance_grammar_fsm=lambda result, batch: None,
        )

    def launch(self, requests: list[Request]) -> None:
        self.chooser.decide([request.rid for request in requests], [*requests])

    def read(self, requests: list[Request], n_accepted_B: list[int]) -> None:
        batch: Any = SimpleNamespace(reqs=requests)
        result = GenerationBatchResult(
            next_token_ids=torch.zeros(len(requests) * WIDTH, dtype=torch.int64),
            accept_lens=torch.tensor(n_accepted_B) + 1,
            cap_lens=torch.full((len(requests),), WIDTH),
            speculative_num_draft_tokens=WIDTH,
        )
        tokens_B = SchedulerBatchResultProcessor._resolve_spec_v2_tokens(self.processor, result, batch)
        self.meter.add(tokens_B, self.processor, result, batch)


Step = st.tuples(st.lists(st.integers(0, WIDTH - 1), min_size=3, max_size=3), st.sampled_from(("", "ends", "leaves")))


@given(steps=st.lists(Step, min_size=1, max_size=20))
def test_all_figures_agree(steps: list[tuple[list[int], str]]) -> None:
    """With the overlap schedule a step is launched before the outcome of the one before it is read."""
    figures = Figures()
    running = [Request(rid) for rid in "abc"]
    everyone = list(running)
    in_flight: list[tuple[list[Request], list[int]]] = []
    for accepted, change in (*steps, ([], "")):
        if running and accepted:
            figures.launch(running)
            in_flight.append((list(running), accepted[: len(running)]))
        if len(in_flight) == 2 or not accepted:
            figures.read(*in_flight.pop(0))
        if change and len(running) > 1:
            gone = running.pop(0)  # while its block is in flight
            gone.ended, gone.is_retracted = change == "ends", change == "leaves"
    figures.meter.idle(None, None)

    of_answers = total(steps_of(request.meta(), 0) for request in everyone)
    if not of_answers.n:
        return
    state = figures.chooser.describe()
    n_blocks = figures.scraped.value("committed_tokens_count")
    committed = figures.scraped.value("committed_tokens_sum")
    assert n_blocks == of_answers.n == state["n_blocks"]
    assert committed == of_answers.n + of_answers.n_accepted == state["committed"]
    assert committed / n_blocks == pytest.approx(state["acceptance_length"])
    assert of_answers.committed_per_step == pytest.approx(state["acceptance_length"])
    assert figures.scraped.by("width", "steps_total") == {str(WIDTH): state["n_steps"][str(WIDTH)]}
    dflash = {"version": "", "block_size": WIDTH, "simulated": None, "copies": [], "width": state}
    assert f"acceptance length {committed / n_blocks:.2f}" in served.render(dflash)


def test_the_block_of_an_ended_request_is_left_out_of_every_figure() -> None:
    figures, ended, runs = Figures(), Request("ended"), Request("runs")
    figures.launch([ended, runs])
    ended.ended = True
    figures.read([ended, runs], [7, 1])
    figures.launch([ended])
    figures.read([ended], [5])
    figures.meter.idle(None, None)
    state = figures.chooser.describe()
    assert (state["n_steps"], state["n_blocks"], state["acceptance_length"]) == ({"8": 1}, 1, 2.0)
    assert figures.scraped.value("committed_tokens_count") == 1
    assert (ended.spec_verify_ct, runs.spec_verify_ct) == (0, 1)
