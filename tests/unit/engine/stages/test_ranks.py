"""Data-parallel attention on one rank: forwards with and without requests, and the token counts passed to SGLang."""

from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from functools import partial
from types import SimpleNamespace
from typing import Any
from unittest.mock import patch

import numpy as np
import pytest
import torch
from sglang.srt.speculative.dflash_info import DFlashVerifyInput

from sglang_dflash.engine.stages import ranks

BLOCK = 8


@pytest.fixture
def together(monkeypatch: pytest.MonkeyPatch) -> ranks.Groups:
    """Return the `Groups` of a server whose ranks form three data-parallel groups."""
    monkeypatch.setattr(ranks, "get_parallel", lambda: SimpleNamespace(num_dp_ranks=3))
    return ranks.Groups()


def test_graphs_run_only_if_every_rank_has_requests(together):
    forward = together.beside_idle_ones(lambda batch: batch.can_run_decode_cuda_graph)
    for n_tokens, replays in (([8, 16, 8], True), ([8, 0, 16], False), ([0, 8, 8], False)):
        batch = SimpleNamespace(original_global_num_tokens_cpu=n_tokens, can_run_decode_cuda_graph=True)
        assert forward(batch) is replays


def test_one_group_of_ranks_needs_no_synchronisation():
    def forward(batch: Any) -> Any:
        return batch

    alone = ranks.OneGroup()
    assert alone.beside_idle_ones(forward) is forward
    alone.assume_equal_batches(None)
    assert alone.keep_up(None, BLOCK)(None) is None
    assert alone.draft_scope(None) is nullcontext


def test_equal_batches_have_the_same_request_count_on_every_rank(together):
    sent = list[Any]()
    batch = SimpleNamespace(batch_size=5, input_ids=torch.zeros(40), init_mlp_sync_metadata=lambda *a: sent.extend(a))
    together.assume_equal_batches(batch)
    info, device = sent
    assert (info.global_num_tokens, info.global_num_tokens_for_logprob, device.type) == ([5] * 3, [5] * 3, "cpu")


def test_a_draft_runs_in_its_scope():
    order = list[str]()

    @contextmanager
    def scope() -> Iterator[None]:
        order.append("in")
        yield
        order.append("out")

    forward = ranks.within(scope, lambda batch, n_filled: order.append(f"forward of {batch}, {n_filled} filled"))
    for n_filled in (4, 2):
        forward("a batch", n_filled=n_filled)
    assert order == [
        *("in", "forward of a batch, 4 filled", "out"),
        *("in", "forward of a batch, 2 filled", "out"),
    ]


@pytest.mark.parametrize("members", [[0, 1], [2, 3], [5]])
def test_a_group_takes_the_values_of_its_own_first_rank(members: list[int], monkeypatch) -> None:
    """`src` is a rank of the server, also if the group does not begin with rank 0."""
    asked = list[Any]()
    monkeypatch.setattr(torch.distributed, "broadcast", lambda values, **where: asked.append((values.tolist(), where)))
    group: Any = SimpleNamespace(world_size=len(members), ranks=members, cpu_group="over the CPU")
    ranks.from_first_rank(group)(np.array([1.5, 2.5]))
    where = {"src": members[0], "group": "over the CPU"}
    assert asked == ([([1.5, 2.5], where)] if len(members) > 1 else [])


def test_a_draft_is_built_for_its_block_at_any_verify_width(monkeypatch):
    spec = SimpleNamespace(speculative_num_draft_tokens=32)
    spec.override = partial(patch.multiple, spec)
    monkeypatch.setattr(ranks, "get_spec", lambda: spec)
    with ranks.OneGroup().making_draft(None, BLOCK):
        assert spec.speculative_num_draft_tokens == BLOCK
    assert spec.speculative_num_draft_tokens == 32


@pytest.mark.parametrize("others_read_prompts", [True, False])
def test_an_idle_rank_runs_what_the_others_run(together, others_read_prompts, monkeypatch):
    def prepare(block: DFlashVerifyInput, batch: Any, worker: Any, **_: Any) -> tuple[Any, bool]:
        return SimpleNamespace(can_run_decode_cuda_graph=True, block=block), True

    monkeypatch.setattr(DFlashVerifyInput, "prepare_for_verify", prepare)
    ran = list[tuple[str, Any]]()
    worker = SimpleNamespace(
        device="cpu",
        forward_batch_generation=lambda batch, **_: ran.append(("prompts", batch)),
        model_runner=SimpleNamespace(forward=lambda batch: ran.append(("block", batch))),
    )
    batch = SimpleNamespace(is_extend_in_batch=others_read_prompts)
    together.keep_up(worker, BLOCK)(batch)
    ((kind, given),) = ran
    if others_read_prompts:
        assert (kind, given) == ("prompts", batch)
        return
    assert (kind, given.block.draft_token_num, len(given.block.draft_token)) == ("block", BLOCK, 0)
    assert not given.can_run_decode_cuda_graph, "a graph replays a fixed number of rows, and an idle rank has none"
