"""Mixed steps: which running requests prevent mixing, and the scheduler's setting afterwards."""

from types import SimpleNamespace
from typing import Any

import pytest

from sglang_dflash.engine.stages.mixing import cache_no_state_ahead, mix_plain

PLAIN = {
    "grammar": None, "custom_logit_processor": None, "return_sampling_mask": False, "return_hidden_states": False,
}  # fmt: skip
NO_PENALTY = {"frequency_penalty": 0.0, "presence_penalty": 0.0, "repetition_penalty": 1.0, "min_new_tokens": 0}
NOT_MIXED = {
    "grammar": {"grammar": object()},
    "processor": {"custom_logit_processor": "code"},
    "penalty": {"sampling_params": SimpleNamespace(**NO_PENALTY | {"presence_penalty": 0.5})},
    "sampling mask": {"return_sampling_mask": True},
    "hidden states": {"return_hidden_states": True},
}


def request(**fields: Any) -> Any:
    return SimpleNamespace(**{"sampling_params": SimpleNamespace(**NO_PENALTY)} | PLAIN | fields)


def mixed(*reqs: Any, is_mixed_chunk: bool = True) -> bool:
    """Return whether SGLang mixes a prompt with these running requests."""
    scheduler: Any = SimpleNamespace(is_mixed_chunk=is_mixed_chunk)

    def stock(given: Any, *, running_batch: Any, n_prompts: int) -> tuple[bool, Any, int]:
        assert given is scheduler
        return scheduler.is_mixed_chunk, running_batch, n_prompts

    running: Any = SimpleNamespace(reqs=reqs)
    found, *passed_on = mix_plain(stock, scheduler, running_batch=running, n_prompts=3)
    assert passed_on == [running, 3]
    assert scheduler.is_mixed_chunk is is_mixed_chunk, "the setting is the server's, and stays"
    return found


@pytest.mark.parametrize("what", NOT_MIXED)
def test_one_request_that_sglang_would_sample_otherwise_prevents_mixing(what: str) -> None:
    other = request(**NOT_MIXED[what])
    assert not mixed(request(), other)
    assert not mixed(other, request())


def test_plain_requests_are_mixed_if_the_server_mixes() -> None:
    assert mixed(request(), request())
    assert mixed()
    assert not mixed(request(), is_mixed_chunk=False)


def test_the_setting_stays_after_an_error() -> None:
    scheduler: Any = SimpleNamespace(is_mixed_chunk=True)
    running: Any = SimpleNamespace(reqs=[request(return_hidden_states=True)])
    with pytest.raises(ZeroDivisionError):
        mix_plain(lambda *_, **__: 1 / 0, scheduler, running_batch=running)
    assert scheduler.is_mixed_chunk


def test_a_state_that_a_mixed_step_has_advanced_is_not_cached() -> None:
    """A request that ends in a mixed step is not cached, unless it has track slots. Others may be cached later."""

    def running(*, ends: bool = False, slots: Any = None, before: bool = False) -> Any:
        return SimpleNamespace(
            ends=ends,
            finished=lambda: False,
            is_retracted=False,
            kv=SimpleNamespace(mamba_ping_pong_track_buffer=slots),
            skip_radix_cache_insert=before,
        )

    ending, going_on, tracked = running(ends=True), running(), running(ends=True, slots="slots")
    asked_not_to = running(before=True)
    prompt = running(ends=True)
    batch: Any = SimpleNamespace(reqs=[prompt, ending, going_on, tracked, asked_not_to])
    batch.decoding_reqs = [ending, going_on, tracked, asked_not_to]
    cached = list[bool]()

    def process(processor: str, given: Any, result: str) -> None:
        assert (processor, given, result) == ("processor", batch, "result")
        for req in given.reqs:
            if req.ends:
                cached.append(not req.skip_radix_cache_insert)
                req.finished = lambda: True

    cache_no_state_ahead(process, "processor", batch, "result")
    assert cached == [True, False, True]  # the prompt, the ending one, the tracked one
    assert not going_on.skip_radix_cache_insert
    assert asked_not_to.skip_radix_cache_insert
    batch.decoding_reqs = None  # no mixed step
    cache_no_state_ahead(process, "processor", batch, "result")
    assert not going_on.skip_radix_cache_insert
