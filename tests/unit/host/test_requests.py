"""What a request may ask for."""

from collections import deque
from types import SimpleNamespace

import pytest

from sglang_dflash.host.requests import admit, outcomes_first


def test_what_sglangs_own_worker_cannot_serve_is_served():
    """As a hook sees it: SGLang's function comes first, then what it was given."""
    assert admit(lambda *args: pytest.fail("SGLang's own worker was asked"), "request", "overlap") is None


@pytest.mark.parametrize(
    ("memory_suffices", "in_flight", "said"),
    [
        (False, ["step"], ["outcome of step", "update"]),
        (True, ["step"], ["update"]),
        (False, [], ["update"]),
    ],
)
def test_a_step_in_flight_is_waited_for_before_requests_are_taken_back(memory_suffices, in_flight, said):
    heard: list[str] = []
    scheduler = SimpleNamespace(
        last_batch="batch" if in_flight else None,
        result_queue=deque((step,) for step in in_flight),
        process_batch_result=lambda step: heard.append(f"outcome of {step}"),
    )
    batch = SimpleNamespace(check_decode_mem=lambda: memory_suffices)
    outcomes_first(lambda *_: heard.append("update"), scheduler, batch)
    assert heard == said
    assert not (scheduler.result_queue and not memory_suffices)
