"""Request hooks: admission, retraction with a step in flight, weight versions, and repeated matches."""

from collections import deque
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from sglang.srt.managers.schedule_batch import ReqKvInfo
from sglang.srt.model_executor.forward_batch_info import ForwardMode

from sglang_dflash.engine.host.requests import admit, match_anew, outcomes_before_version, outcomes_first


def test_requests_that_sglangs_worker_refuses_are_admitted():
    """SGLang's own check, the first argument of the hook, must not be called."""
    assert admit(lambda *args: pytest.fail("SGLang's own worker was asked"), "request", "overlap") is None


@pytest.mark.parametrize(
    ("memory_suffices", "in_flight", "order"),
    [(False, ["step"], ["outcome of step", "update"]), (True, ["step"], ["update"]), (False, [], ["update"])],
)
def test_a_step_in_flight_is_processed_before_retraction(memory_suffices, in_flight, order):
    calls_made: list[str] = []
    scheduler = SimpleNamespace(
        last_batch="batch" if in_flight else None,
        result_queue=deque((step,) for step in in_flight),
        process_batch_result=lambda step: calls_made.append(f"outcome of {step}"),
    )
    batch = SimpleNamespace(check_decode_mem=lambda: memory_suffices)
    outcomes_first(lambda *_: calls_made.append("update"), scheduler, batch)
    assert calls_made == order
    assert not (scheduler.result_queue and not memory_suffices)


@pytest.mark.parametrize(
    ("version", "mode", "order"),
    [
        ("new", ForwardMode.DECODE, ["outcome of step", "version"]),
        ("new", ForwardMode.EXTEND, ["version"]),
        (None, ForwardMode.DECODE, ["version"]),
        ("new", None, ["version"]),
    ],
    ids=["decode", "prefill", "no version", "idle"],
)
def test_a_decode_step_in_flight_is_processed_before_a_new_weight_version(version, mode, order):
    calls_made: list[str] = []
    scheduler = SimpleNamespace(
        last_batch=mode and SimpleNamespace(forward_mode=mode),
        result_queue=deque([("step",)] if mode else []),
        process_batch_result=lambda step: calls_made.append(f"outcome of {step}"),
    )
    outcomes_before_version(lambda *_: calls_made.append("version"), scheduler, version)
    assert calls_made == order
    assert (scheduler.last_batch is None) == (not scheduler.result_queue), "the event loop would process it again"


@pytest.mark.parametrize(
    ("chunk", "row", "frees"),
    [(False, None, True), (True, 3, False), (False, 3, False)],
    ids=["waits", "chunk", "runs"],
)
def test_a_match_begins_without_the_slot_of_an_earlier_match(chunk: bool, row: int | None, frees: bool) -> None:
    """The index of the state to copy comes from the earlier match. The new match may find another state, or none."""
    freed, seen = list[int](), list[Any]()
    pool = SimpleNamespace(mamba_allocator=SimpleNamespace(free=lambda slots: freed.extend(slots.tolist())))
    kv = ReqKvInfo(req_pool_idx=row, mamba_pool_idx=torch.tensor(7), mamba_cow_src_index=torch.tensor([2]))
    req: Any = SimpleNamespace(kv=kv)
    cache = None if chunk else SimpleNamespace(req_to_token_pool=pool)
    match_anew(lambda *args, **kwargs: seen.append((*args, kwargs, kv.holds_mamba)), req, cache, cow_mamba=False)
    assert seen == [(req, cache, {"cow_mamba": False}, not frees)]
    assert freed == ([7] if frees else [])
    assert (kv.mamba_cow_src_index is None) == frees
