"""Admission must refuse bad requests before a scheduler gets them, and let harmless ones pass."""

from types import SimpleNamespace
from typing import Any

import msgspec
import pytest
import torch
from sglang.srt.managers.embed_types import PositionalEmbeds
from sglang.srt.managers.io_struct import EmbeddingReqInput, GenerateReqInput, TokenizedGenerateReqInput
from sglang.srt.sampling.custom_logit_processor import DisallowedTokensLogitsProcessor
from sglang.srt.sampling.sampling_params import SamplingParams

from sglang_dflash.engine.host.admission import MOST_ANSWERS, check_asked, check_parameters, check_prompt

V = 100
MANAGER = SimpleNamespace(
    model_config=SimpleNamespace(vocab_size=V),
    enable_metrics=True,
    metrics_collector=SimpleNamespace(labels={"model_name": "tiny", "tenant": ""}),
)


def check(request: Any, input_ids: list[int] | None) -> list[Any]:
    """Return the arguments with which SGLang's own check was called."""
    asked: list[Any] = []
    check_prompt(lambda *args: asked.append(args), MANAGER, request, input_ids)
    return asked


@pytest.mark.parametrize("ids", [[0], [V - 1], [5, 0, V - 1]])
def test_tokens_of_the_vocabulary_pass(ids: list[int]) -> None:
    request = GenerateReqInput(input_ids=ids)
    assert check(request, ids) == [(MANAGER, request, ids)]


@pytest.mark.parametrize(("ids", "named"), [([5, V], V), ([-1, 5], -1), ([V + 7, -3], -3)])
def test_tokens_outside_the_vocabulary_are_named(ids: list[int], named: int) -> None:
    with pytest.raises(ValueError, match=rf"input_ids has {named}, .*0\.\.99$"):
        check(GenerateReqInput(input_ids=ids), ids)


def test_ids_of_a_session_are_checked() -> None:
    with pytest.raises(ValueError, match="input_ids has 100, "):
        check(GenerateReqInput(input_ids=[V, 5], session_params={"id": "a"}), [V, 5])


NO_SESSION = GenerateReqInput(text="", session_params={"id": None, "offset": -5})


@pytest.mark.parametrize("request_", [GenerateReqInput(text=""), GenerateReqInput(input_ids=[[]]), NO_SESSION])
def test_a_prompt_without_tokens_is_refused(request_: GenerateReqInput) -> None:
    with pytest.raises(ValueError, match="the prompt has no tokens"):
        check(request_, [])


@pytest.mark.parametrize(
    ("request_", "ids"),
    [
        (GenerateReqInput(input_ids=[], session_params={"id": "a"}), []),  # the prompt is the session's history
        (GenerateReqInput(input_embeds=[[0.5]]), None),
        (GenerateReqInput(text="words"), [V + 5]),  # ids made by the tokenizer
        (EmbeddingReqInput(input_ids=[V]), [V]),
    ],
)
def test_ids_that_no_client_sent_pass(request_: Any, ids: list[int] | None) -> None:
    assert check(request_, ids)


def test_sglangs_check_runs_first() -> None:
    def refuse(*args: Any) -> None:
        raise ValueError("too long")

    with pytest.raises(ValueError, match="too long"):
        check_prompt(refuse, MANAGER, GenerateReqInput(input_ids=[V]), [V])


NOTHING = TokenizedGenerateReqInput(
    input_text="", input_ids=[5], mm_inputs=None, sampling_params=SamplingParams(), return_logprob=True,
    logprob_start_len=-1, top_logprobs_num=0, token_ids_logprob=None, stream=False, input_embeds=None,
    token_type_ids=None,
)  # fmt: skip


def made(*, sampling: dict[str, Any] | None = None, **fields: Any) -> TokenizedGenerateReqInput:
    return msgspec.structs.replace(NOTHING, sampling_params=SamplingParams(**(sampling or {})), **fields)


@pytest.mark.parametrize(
    "made_",
    [
        NOTHING,
        made(sampling={"temperature": 1e30, "top_k": 2**31 - 1, "repetition_penalty": 1e-30}),
        made(sampling={"logit_bias": {"5": 1e30, "6": -1e30}}),
        made(sampling={"stop_token_ids": {0, V - 1}}),
        made(top_logprobs_num=V, logprob_start_len=0),
        made(return_logprob=False, logprob_start_len=-7),
        made(return_hidden_states="last"),
        made(positional_embed_overrides=PositionalEmbeds(embeds=[torch.zeros(1, 4)], positions=[0])),
        made(custom_logit_processor=DisallowedTokensLogitsProcessor.to_str()),
        SimpleNamespace(sampling_params=SamplingParams(top_k=2**40)),  # an embedding request
    ],
)
def test_harmless_parameters_pass(made_: Any) -> None:
    assert check_parameters(made_, MANAGER, "the request") is made_


@pytest.mark.parametrize(
    ("made_", "sentence"),
    [
        (made(sampling={"max_new_tokens": 1.5}), "max_new_tokens is 1.5; send a whole number"),
        (made(sampling={"top_k": 2**31}), "top_k is 2147483648; send at most 2147483647"),
        (made(sampling={"temperature": 2e30}), "temperature is 2e[+]30; send at most 1e[+]30"),
        (made(sampling={"repetition_penalty": 1e-31}), "repetition_penalty is 1e-31; send at least 1e-30"),
        (made(sampling={"logit_bias": {"5": 1.0, "6": -2e30}}), "logit_bias of 6 is -2e[+]30; send numbers within"),
        (made(sampling={"logit_bias": {"5": float("nan")}}), "logit_bias of 5 is nan"),
        (made(sampling={"stop_token_ids": {V, 5}}), r"stop_token_ids has 100, .*0\.\.99$"),
        (made(sampling={"stop_token_ids": {-1}}), "stop_token_ids has -1,"),
        (made(top_logprobs_num=V + 1), r"top_logprobs_num .* is 101; send at most 100, the size of the voc"),
        (made(logprob_start_len=-2), "logprob_start_len is -2; send a position"),
        (made(custom_logit_processor="garbage"), r"custom_logit_processor cannot be read \(JSONDecodeError"),
        (made(custom_logit_processor="[]"), r"custom_logit_processor cannot be read \(TypeError"),
        (made(custom_logit_processor='{"a": 1}'), r"custom_logit_processor cannot be read \(KeyError"),
        (made(custom_logit_processor='{"callable": "zz"}'), r"custom_logit_processor cannot be read \(ValueError"),
        (made(return_hidden_states=0), "return_hidden_states is 0; send true"),
        (made(return_hidden_states=[]), r"return_hidden_states is \[\]; send true"),
        (made(positional_embed_overrides={"a": 1}), "positional_embed_overrides is internal to SGLang"),
    ],
)
def test_parameters_that_would_end_a_scheduler_are_named(made_: Any, sentence: str) -> None:
    with pytest.raises(ValueError, match=sentence):
        check_parameters(made_, MANAGER, "the request")


def asked(**fields: Any) -> GenerateReqInput:
    """Return a request in the state in which SGLang passes it to `check_asked`."""
    request = GenerateReqInput(**fields)
    request._determine_batch_size()
    request._handle_parallel_sampling()
    return request


@pytest.mark.parametrize(
    ("n", "n_prompts"), [(1, 1), (1, MOST_ANSWERS + 1), (MOST_ANSWERS, 1), (MOST_ANSWERS // 4, 4), (-5, 1)]
)
def test_many_answers_pass(n: int, n_prompts: int) -> None:
    request = asked(input_ids=[[5]] * n_prompts, sampling_params={"n": n})
    check_asked(None, request)


@pytest.mark.parametrize(("n", "n_prompts"), [(MOST_ANSWERS + 1, 1), (2**70, 1), (MOST_ANSWERS // 4 + 1, 4)])
def test_answers_past_memory_are_refused(n: int, n_prompts: int) -> None:
    request = asked(input_ids=[[5]] * n_prompts, sampling_params={"n": n})
    sentence = f"n is {n} and the number of prompts {n_prompts}, .* {n * n_prompts} answers; send .* at most 65536$"
    with pytest.raises(ValueError, match=sentence):
        check_asked(None, request)


def test_clients_cannot_send_adapter_ids() -> None:
    request = asked(input_ids=[5], lora_path="adapter", lora_id=[])
    with pytest.raises(ValueError, match="lora_id is internal to SGLang"):
        check_asked(None, request)


def test_unknown_metric_labels_are_refused() -> None:
    request = GenerateReqInput(text="words", custom_labels={"tenant": "a", "team": "b", "app": "c"})
    with pytest.raises(ValueError, match="custom_labels has app, team, which the metrics of this server do not have"):
        check(request, [5])
    assert check(GenerateReqInput(text="words", custom_labels={"tenant": "a"}), [5])
    without_metrics = SimpleNamespace(**(vars(MANAGER) | {"enable_metrics": False, "metrics_collector": None}))
    check_prompt(lambda *_: None, without_metrics, request, [5])
