"""A scheduler's intake must answer harmful requests of any front end with an error, and pass others on unchanged."""

import re
from array import array
from http import HTTPStatus
from types import SimpleNamespace
from typing import Any

import msgspec
import pytest
import torch
from sglang.srt.disaggregation.utils import DisaggregationMode
from sglang.srt.managers.io_struct import SessionParams, TokenizedEmbeddingReqInput, TokenizedGenerateReqInput
from sglang.srt.managers.schedule_batch import Modality, MultimodalDataItem, MultimodalProcessorOutput, Req
from sglang.srt.observability.req_time_stats import APIServerReqTimeStats
from sglang.srt.sampling.sampling_params import SamplingParams

from sglang_dflash.engine.host.intake import extremes, take_in, take_no_embedding

V = 100
PLAIN = TokenizedGenerateReqInput(
    rid="r", input_text="", input_ids=array("q", [5, V - 1]), mm_inputs=None, sampling_params=SamplingParams(),
    return_logprob=False, logprob_start_len=-1, top_logprobs_num=0, token_ids_logprob=None, stream=False,
    input_embeds=None, token_type_ids=None, http_worker_ipc="ipc://worker",
    time_stats=APIServerReqTimeStats(created_time=7.0),
)  # fmt: skip


class Scheduler:
    """Stand-in that records the requests SGLang would handle, and the answers it would stream."""

    def __init__(self, adapters: Any = None) -> None:
        self.taken: list[Any] = []
        self.answers: list[Req] = []
        self.model_config = SimpleNamespace(vocab_size=V)
        self.tokenizer = None
        self.disaggregation_mode = DisaggregationMode.NULL
        self.tp_worker = SimpleNamespace(model_runner=SimpleNamespace(lora_manager=adapters))
        self.output_streamer = self

    def stream_output(self, reqs: list[Req], return_logprob: bool) -> None:
        assert return_logprob is False
        self.answers += reqs

    def handle(self, asked: Any, **more: Any) -> None:
        self.taken.append((asked, more))


def handled(asked: Any, scheduler: Scheduler | None = None) -> Scheduler:
    scheduler = scheduler or Scheduler()
    take_in(Scheduler.handle, scheduler, asked, mm_input_error="reason")  # type: ignore[arg-type]
    return scheduler


def asked(*, sampling: dict[str, Any] | None = None, **fields: Any) -> TokenizedGenerateReqInput:
    return msgspec.structs.replace(PLAIN, sampling_params=SamplingParams(**(sampling or {})), **fields)


PICTURE = MultimodalProcessorOutput(mm_items=[MultimodalDataItem(modality=Modality.IMAGE, feature=torch.zeros(1))])
ADAPTERS = SimpleNamespace(lora_refs={"known": object()})


@pytest.mark.parametrize(
    "request_",
    [
        PLAIN,
        asked(input_ids=array("q"), session_params=SessionParams(id="s")),  # the prompt is the session's history
        asked(input_ids=None, input_embeds=[[0.5]]),
        asked(input_ids=array("q", [5, 2**40]), mm_inputs=PICTURE),  # a hash in place of an image token
        asked(sampling={"max_new_tokens": 0, "min_new_tokens": 4}),  # prefill of a prompt with n > 1
        asked(sampling={"temperature": 0}),
        asked(token_ids_logprob=[0, V - 1], return_logprob=True, top_logprobs_num=V),
    ],
)
def test_harmless_requests_pass_unchanged(request_: Any) -> None:
    before = msgspec.structs.asdict(request_.sampling_params)
    scheduler = handled(request_)
    assert (scheduler.taken, scheduler.answers) == ([(request_, {"mm_input_error": "reason"})], [])
    assert msgspec.structs.asdict(request_.sampling_params) == before


def test_a_loaded_adapter_passes() -> None:
    assert handled(asked(lora_id="known"), Scheduler(ADAPTERS)).taken


HARMFUL = [
    (asked(input_ids=array("q", [5, V])), r"input_ids has 100, .*0\.\.99$"),
    (asked(input_ids=array("q", [-1, 5])), "input_ids has -1, "),
    (asked(input_ids=array("q", [V]), session_params=SessionParams(id="s")), "input_ids has 100, "),
    (asked(input_ids=array("q")), "the prompt has no tokens"),
    (asked(input_ids=None), "the prompt has no tokens"),
    (asked(input_ids=array("q"), session_params=SessionParams(id=None)), "the prompt has no tokens"),
    (asked(sampling={"top_k": 2**31}), "top_k is 2147483648; send at most"),
    (asked(sampling={"top_p": 5.0}), "top_p must be in"),
    (asked(sampling={"logit_bias": {"100": 1.0}}), "logit_bias must has keys in"),
    (asked(sampling={"logit_bias": {"x": 1.0}}), "invalid literal for int"),
    (asked(sampling={"max_new_tokens": 3, "min_new_tokens": 4}), "min_new_tokens must be in"),
    (asked(sampling={"max_new_tokens": 0, "min_new_tokens": -1, "temperature": -1}), "temperature must be"),
    (asked(return_logprob=True, top_logprobs_num=V + 1), "top_logprobs_num .* is 101"),
    (asked(return_logprob=True, token_ids_logprob=[5, V]), "token_ids_logprob has 100, "),
    (asked(return_logprob=True, logprob_start_len=-2), "logprob_start_len is -2"),
    (asked(lora_id="known"), "lora_id is known, which is no loaded adapter"),
]


@pytest.mark.parametrize(("request_", "sentence"), HARMFUL, ids=[sentence for _, sentence in HARMFUL])
def test_harmful_requests_are_answered_with_an_error(request_: Any, sentence: str) -> None:
    scheduler = handled(request_)
    assert scheduler.taken == []
    require_refused(scheduler, sentence)


def require_refused(scheduler: Scheduler, sentence: str) -> None:
    """Require one finished answer: HTTP status 400, a harmless prompt, and the way back to the client's process."""
    (req,) = scheduler.answers
    reason = req.finished_reason.to_json()
    assert (reason["type"], reason["status_code"]) == ("abort", HTTPStatus.BAD_REQUEST)
    assert re.search(sentence, reason["message"])
    assert req.finished()
    assert (req.rid, req.http_worker_ipc, list(req.origin_input_ids)) == ("r", "ipc://worker", [0])
    assert req.time_stats.created_time == 7.0, "metrics and traces begin where the front end got the request"
    assert req.session is None
    assert not req.return_logprob


def test_an_adapter_that_is_not_loaded_is_refused() -> None:
    scheduler = handled(asked(lora_id="unknown"), Scheduler(ADAPTERS))
    require_refused(scheduler, "lora_id is unknown, which is no loaded adapter")


def test_features_of_a_refused_image_are_released(monkeypatch: pytest.MonkeyPatch) -> None:
    released: list[Any] = []
    monkeypatch.setattr(MultimodalDataItem, "release_transport_proxies", lambda item: released.append(item))
    scheduler = handled(asked(mm_inputs=PICTURE, sampling={"top_k": 2**31}))
    require_refused(scheduler, "top_k is 2147483648")
    assert released == PICTURE.mm_items


def test_embedding_requests_are_refused() -> None:
    embed = TokenizedEmbeddingReqInput(
        rid="r", input_text="", input_ids=array("q", [5]), mm_inputs=None, token_type_ids=None,
        sampling_params=SamplingParams(), http_worker_ipc="ipc://worker", time_stats=PLAIN.time_stats,
    )  # fmt: skip
    scheduler = Scheduler()
    take_no_embedding(Scheduler.handle, scheduler, embed)  # type: ignore[arg-type]
    assert scheduler.taken == []
    require_refused(scheduler, "this server generates text")


@pytest.mark.parametrize(
    ("ids", "found"),
    [(array("q", [3, 2**40, -7, 5]), (-7, 2**40)), ([3, 2**70], (3, 2**70))],
)
def test_extremes(ids: Any, found: tuple[int, int]) -> None:
    assert extremes(ids) == found
