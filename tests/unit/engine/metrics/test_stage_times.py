"""Stage times: every n-th step must be measured, and reads must not wait for the device."""

from functools import partial
from types import SimpleNamespace
from typing import Any

import pytest

from sglang_dflash.engine.metrics import stage_times
from sglang_dflash.engine.metrics.stage_times import STAGES, DeviceClock, HostClock, StageTimes, time_stages
from sglang_dflash.engine.stages.stages import Stages


class Device:
    """Stand-in for a device. The test sets `reached` on a recorded event when the device would have reached it."""

    def __init__(self) -> None:
        self.now_ms, self.events = 0.0, list[Any]()

    def Event(self, *, enable_timing: bool) -> Any:
        assert enable_timing
        event = SimpleNamespace(at_ms=None, reached=False)

        def record() -> None:
            event.at_ms = self.now_ms
            self.events.append(event)

        event.record, event.query = record, lambda: event.reached
        event.elapsed_time = lambda other: other.at_ms - event.at_ms
        return event


def stages_of(run: Any) -> Any:
    """Return stages whose methods call `run` with the stage's name and their arguments."""
    stage = SimpleNamespace(**{name: partial(run, name) for name in STAGES})
    return Stages(*[stage] * len(Stages._fields))


def step(stages: Any) -> list[Any]:
    return [
        stages.drafter.draft("plan", graphs=True),
        stages.copier.copy("plan"),
        stages.verifier.verify("plan"),
        stages.choice.choose("plan"),
        stages.verifier.commit("plan"),
        stages.context_kv.append("plan"),
        stages.copier.weigh("plan"),
    ]


def test_only_every_nth_step_is_measured(monkeypatch: pytest.MonkeyPatch) -> None:
    device = Device()
    monkeypatch.setattr(stage_times.torch, "get_device_module", lambda name: {"some": device}[name])
    took_ms = dict(zip(STAGES, (1.0, 0.2, 4.0, 0.5, 0.25, 0.125, 0.1), strict=True))

    def run(stage: str, plan: str, **kwargs: Any) -> tuple[str, Any]:
        device.now_ms += took_ms[stage]
        return stage, kwargs

    stages = stages_of(run)
    timed, times = time_stages(stages, "some")
    assert (timed.planner, timed.accept) == (stages.planner, stages.accept), "these two are not timed"
    for n_step in range(1, 2 * times.every + 2):
        assert step(timed) == [(stage, {"graphs": True} if stage == "draft" else {}) for stage in STAGES]
        assert len(device.events) == 2 * len(STAGES) * (n_step // times.every)

    assert list(times.read()) == [], "nothing has been reached"
    for event in device.events[:3]:
        event.reached = True
    assert list(times.read()) == [("draft", 1e-3)], "the copy has begun but not ended"
    assert list(times.read()) == [], "each time is read once"
    for event in device.events:
        event.reached = True
    rest = [*STAGES[1:], *STAGES]
    assert list(times.read()) == [(stage, pytest.approx(took_ms[stage] / 1e3)) for stage in rest]


def test_host_times_are_available_immediately(monkeypatch: pytest.MonkeyPatch) -> None:
    now = iter([10.0, 10.5])
    monkeypatch.setattr(stage_times.time, "perf_counter", lambda: next(now))
    times = StageTimes(HostClock(), every=1)
    assert times.timed("draft", lambda x: x + 1)(1) == 2
    assert list(times.read()) == [("draft", 0.5)]


def test_each_device_has_its_clock(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(stage_times.torch, "get_device_module", lambda name: Device())
    assert isinstance(time_stages(stages_of(print), "cpu")[1].clock, HostClock)
    assert isinstance(time_stages(stages_of(print), "cuda")[1].clock, DeviceClock)
