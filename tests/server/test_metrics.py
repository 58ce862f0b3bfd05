"""`/metrics` of real servers: counters equal the sums of the counts in the requests' `meta_info`."""

import json
import time
from collections import Counter
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import httpx
import pytest
from prometheus_client.parser import text_string_to_metric_families

from sglang_dflash.engine.metrics.stage_times import SAMPLE_EVERY, STAGES
from sglang_dflash.engine.metrics.table import METRICS, PREFIX
from sglang_dflash.pairs.servers.server import Generation, Server
from sglang_dflash.tools.check import served
from tests.server.conftest import wait_idle
from tests.server.lib.talk import as_prompt, conversation
from tests.server.lib.variants import METRICS as ENABLED
from tests.server.lib.variants import window

BLOCK = 16
MAX_NEW_TOKENS = 48
# Tokens. SGLang prefills the end of a cached prompt again. The window is longer than this end, so the ring lacks a part
# of the window.
RING_WINDOW = 128


class Scrape:
    def __init__(self, server: Server) -> None:
        text = httpx.get(f"{server.url}/metrics", timeout=60.0).text
        families = text_string_to_metric_families(text)
        self.samples = [sample for family in families for sample in family.samples]

    def total(self, name: str, **labels: object) -> float:
        """Sum all series with these labels."""
        wanted = {key: str(value) for key, value in labels.items()}.items()
        return sum(s.value for s in self.samples if s.name == f"sglang:{name}" and wanted <= s.labels.items())

    def by(self, label: str, name: str) -> Counter[int]:
        found = Counter[int]()
        for sample in self.samples:
            if sample.name == f"{PREFIX}{name}":
                found[int(sample.labels[label])] += int(sample.value)
        return found

    def committed(self) -> Counter[int]:
        """Return n -> number of blocks that committed n tokens, from Prometheus's cumulative buckets."""
        up_to = [self.total("dflash_committed_tokens_bucket", le=f"{n}.0") for n in range(1, BLOCK + 1)]
        return Counter({n: int(b - a) for n, (a, b) in enumerate(zip([0, *up_to], up_to, strict=False), start=1)})


def scrape(server: Server) -> Scrape:
    """Wait until the server is idle and scrape it, because an answer may arrive before its counts are written."""
    wait_idle(server)
    return Scrape(server)


def histogram(answers: Sequence[Generation], field: str) -> Counter[int]:
    found = Counter[int]()
    for answer in answers:
        found.update(dict(enumerate(answer.meta[field])))
    return found


def summed(answers: Sequence[Generation], field: str) -> int:
    return sum(answer.meta[field] for answer in answers)


def require_same_counts(before: Scrape, after: Scrape, answers: Sequence[Generation]) -> None:
    """Require the growth between two scrapes to equal the counts of these requests."""
    accepted, widths = (histogram(answers, f) for f in ("spec_correct_drafts_histogram", "spec_cap_lens_histogram"))
    n_blocks = summed(answers, "spec_verify_ct")

    def grown(name: str) -> float:
        return after.total(name) - before.total(name)

    assert accepted.total() == widths.total() == n_blocks
    assert grown("dflash_committed_tokens_count") == n_blocks == grown("spec_verify_calls_total")
    assert grown("dflash_committed_tokens_sum") == n_blocks + summed(answers, "spec_num_correct_drafts")
    assert after.committed() - before.committed() == +Counter({n + 1: count for n, count in accepted.items()})
    for name, reached in (
        ("verified_drafts_total", {p: sum(n for width, n in widths.items() if width > p) for p in range(1, BLOCK)}),
        ("accepted_drafts_total", {p: sum(n for k, n in accepted.items() if k >= p) for p in range(1, BLOCK)}),
    ):
        assert after.by("position", name) - before.by("position", name) == +Counter(reached)


def test_counts_are_the_sums_of_the_requests(whole: Server, questions: Callable) -> None:
    for concurrency in (1, 4):
        before = scrape(whole)
        answers = whole.generate_many(questions(6, seed=3), concurrency=concurrency, max_new_tokens=MAX_NEW_TOKENS)
        n_blocks = summed(answers, "spec_verify_ct")
        after = scrape(whole)
        require_same_counts(before, after, answers)
        steps = after.by("width", "steps_total") - before.by("width", "steps_total")
        assert set(steps) == {BLOCK}
        assert n_blocks / concurrency <= steps[BLOCK] <= n_blocks
        assert all(answer.meta["spec_cap_length"] == BLOCK for answer in answers)

    n_timed = {stage: after.total("dflash_stage_seconds_count", stage=stage) for stage in STAGES}
    assert len(set(n_timed.values())) == 1
    assert n_timed["draft"] >= after.total("dflash_steps_total") // SAMPLE_EVERY > 0
    assert all(after.total("dflash_stage_seconds_sum", stage=stage) > 0 for stage in STAGES)
    assert after.total("dflash_pool_size", pool="states") == 64
    assert after.total("dflash_pool_in_use", pool="states") == 0
    assert after.total("dflash_cut_blocks_total") == 0


def test_all_figures_have_one_acceptance_length(whole: Server, questions: Callable) -> None:
    """`/server_info`, `check --server`, `/metrics` and `meta_info` agree, also about steps after an answer's end."""
    before, state_before = scrape(whole), served.fetch(whole.url)["width"]
    answers = whole.generate_many(questions(7, seed=11), concurrency=3, max_new_tokens=MAX_NEW_TOKENS)
    n_blocks, n_accepted = (summed(answers, f"spec_{name}") for name in ("verify_ct", "num_correct_drafts"))
    after = scrape(whole)
    dflash = served.fetch(whole.url)
    state = dflash["width"]

    assert after.total("dflash_committed_tokens_count") - before.total("dflash_committed_tokens_count") == n_blocks
    assert state["n_blocks"] - state_before["n_blocks"] == n_blocks
    assert state["committed"] - state_before["committed"] == n_blocks + n_accepted
    # Since the start, all figures have the same numbers.
    assert {int(width): n for width, n in state["n_steps"].items()} == +after.by("width", "steps_total")
    length = after.total("dflash_committed_tokens_sum") / after.total("dflash_committed_tokens_count")
    assert state["acceptance_length"] == pytest.approx(length)
    assert f"acceptance length {length:.2f}" in served.render(dflash)


def test_all_metrics_are_exported_with_sglangs_labels(whole: Server, questions: Callable) -> None:
    whole.generate(questions(1)[0], max_new_tokens=MAX_NEW_TOKENS)
    samples = Scrape(whole).samples
    (sglangs,) = [sample.labels for sample in samples if sample.name == "sglang:num_running_reqs"]
    assert sglangs["model_name"]
    for metric in METRICS:
        found = [sample for sample in samples if sample.name in metric.exported()]
        assert {sample.name for sample in found} == metric.exported()
        for sample in found:
            own = {key: value for key, value in sample.labels.items() if key not in (*metric.labels, "le")}
            assert own == sglangs


def test_profile_of_a_few_steps_is_written(whole: Server, questions: Callable, tmp_path: Path) -> None:
    request = {"output_dir": str(tmp_path), "num_steps": 3, "activities": ["CPU", "GPU"], "with_stack": False}
    assert httpx.post(f"{whole.url}/start_profile", json=request, timeout=60).status_code == 200
    whole.generate(questions(1)[0], max_new_tokens=MAX_NEW_TOKENS, ignore_eos=True)
    written_by = time.monotonic() + 60
    sizes = list[int]()
    while max(sizes, default=0) <= 1000 and time.monotonic() < written_by:
        time.sleep(0.2)
        sizes = [trace.stat().st_size for trace in tmp_path.rglob("*.trace.json.gz")]
    assert len(sizes) == 1
    assert sizes[0] > 1000
    assert whole.generate(questions(1)[0], max_new_tokens=MAX_NEW_TOKENS).token_ids


@pytest.mark.full
def test_widths_and_cut_contexts_are_those_of_the_trace(pool: Any, tmp_path: Path) -> None:
    """Repeat prompts. The prefix cache then has tokens that the draft's ring lacks, so contexts are cut."""
    ours = pool.get(
        target="dense",
        flags=(*window(RING_WINDOW), *ENABLED),
        env={"SGLANG_DFLASH_WIDTHS": "random", "SGLANG_DFLASH_WIDTH_TRACE": str(tmp_path)},
    )
    prompts = [as_prompt(conversation(seed, 5), "dense") for seed in range(3)]
    before = scrape(ours)
    answers = [ours.generate(prompt, max_new_tokens=120, ignore_eos=True) for prompt in (*prompts, *prompts)]
    after = scrape(ours)
    require_same_counts(before, after, answers)
    widths = histogram(answers, "spec_cap_lens_histogram")
    assert after.by("width", "steps_total") - before.by("width", "steps_total") == +widths
    assert len(+widths) > 3, "widths change"

    steps = [json.loads(line) for path in tmp_path.glob("*.jsonl") for line in path.read_text().splitlines()]
    n_cut = cut_committed = 0
    for answer in answers:
        committed = [1 + n for step in steps for rid, n in step["accepted"].items() if rid == answer.meta["id"]]
        first, prefix_len = answer.meta["cached_tokens"], answer.meta["prompt_tokens"]
        for n in committed[: answer.meta["spec_verify_ct"]]:
            if first > max(prefix_len - RING_WINDOW, 0):
                n_cut, cut_committed = n_cut + 1, cut_committed + n
            prefix_len += n
    assert 0 < n_cut < summed(answers, "spec_verify_ct")
    assert after.total("dflash_cut_blocks_total") - before.total("dflash_cut_blocks_total") == n_cut
    assert after.total("dflash_cut_committed_tokens_total") - before.total("dflash_cut_committed_tokens_total") == (
        cut_committed
    )
    assert after.total("dflash_pool_size", pool="rings") == 8
    assert after.total("dflash_pool_in_use", pool="rings") == 0
    pool.drop(ours)
