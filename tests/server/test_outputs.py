"""Hidden states and sampling masks of a request equal those without speculation.

Hidden states are also tested by `test_parity.py`, by `test_exact.py` (chunked prefill, retraction, changing widths) and
by `test_rehearsal.py` (captured graphs).
"""

import math
from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch

from sglang_dflash.pairs.servers.server import Generation, Server
from sglang_dflash.pairs.tiny.pairs import HYBRID
from tests.server.lib.rows import GAP, require_rows
from tests.server.lib.talk import post, steps, stream, together, tokens_of
from tests.tools.parameters import BAN_TOKENS, COMMA

ASKED = {"return_hidden_states": True}
MASKED = {"return_sampling_mask": True, "sampling_logprobs_mode": "support"}
MAX_NEW_TOKENS = 40


def test_rows_of_a_prompt_equal_those_without_speculation(whole: Server, off: Server, questions: Callable) -> None:
    for prompt in questions(2, seed=21):
        first, second = (s.generate(prompt, fields=ASKED, max_new_tokens=1).meta["hidden_states"] for s in (whole, off))
        assert len(first) == len(second) == 1
        assert len(first[0]) == len(second[0]) == len(prompt)
        torch.testing.assert_close(torch.tensor(first), torch.tensor(second), atol=GAP, rtol=GAP)


def test_outputs_change_no_step_and_go_to_their_request_only(whole: Server, questions: Callable) -> None:
    prompts = questions(6, seed=22)
    plain = whole.generate_many(prompts, concurrency=6, max_new_tokens=MAX_NEW_TOKENS)
    fields = [ASKED, {}, MASKED, ASKED | MASKED, {}, ASKED]
    requests = [{"fields": field, "max_new_tokens": MAX_NEW_TOKENS} for field in fields]
    asked = together(whole, list(zip(prompts, requests, strict=True)))
    assert tokens_of(asked) == tokens_of(plain)
    assert list(map(steps, asked)) == list(map(steps, plain))
    for prompt, field, answer in zip(prompts, fields, asked, strict=True):
        assert ("hidden_states" in answer.meta) == ("return_hidden_states" in field)
        assert ("output_token_sampling_mask" in answer.meta) == ("return_sampling_mask" in field)
        if "return_hidden_states" in field:
            require_rows(HYBRID.target, prompt, answer)
        if "return_sampling_mask" in field:
            assert answer.meta["output_token_sampling_mask"] == [[token] for token in answer.token_ids]
            assert answer.meta["output_token_sampling_logprobs"] == [[0.0]] * len(answer.token_ids)


def test_hidden_states_of_any_kind_of_request(whole: Server, questions: Callable) -> None:
    kinds: list[dict[str, Any]] = [
        {"stop": ["the", "e"]},
        {"temperature": 1.5, "min_p": 0.01},
        {"regex": "[a-z ]{20}"},
        {"frequency_penalty": 1.0, "temperature": 0.7},
        {"max_new_tokens": 3},
    ]
    prompts = questions(len(kinds), seed=23)
    requests = [{"fields": ASKED, "max_new_tokens": MAX_NEW_TOKENS} | kind for kind in kinds]
    for prompt, answer in zip(prompts, together(whole, list(zip(prompts, requests, strict=True))), strict=True):
        require_rows(HYBRID.target, prompt, answer)


def test_each_of_several_answers_has_its_own_outputs(whole: Server, questions: Callable) -> None:
    (prompt,) = questions(1, seed=24)
    sampling = {"n": 2, "temperature": 1.5, "top_k": 50, "max_new_tokens": MAX_NEW_TOKENS}
    answers = post(whole, "/generate", {"input_ids": prompt, "sampling_params": sampling} | ASKED | MASKED).json()
    assert len(answers) == 2
    for answer in answers:
        require_rows(HYBRID.target, prompt, Generation(answer["output_ids"], answer["text"], answer["meta_info"]))
        require_masks(answer["output_ids"], answer["meta_info"])


def test_stream_has_as_many_rows_as_tokens_at_any_time(whole: Server, questions: Callable) -> None:
    (prompt,) = questions(1, seed=25)
    # The answer is long, because SGLang joins events that wait to be sent, and at least three must arrive.
    events = list(stream(whole, prompt, fields=ASKED | MASKED, max_new_tokens=4 * MAX_NEW_TOKENS, ignore_eos=True))
    assert len(events) > 2
    for event in events:
        assert len(event.meta["hidden_states"]) == len(event.token_ids)
        assert len(event.meta["output_token_sampling_mask"]) == len(event.token_ids)
    require_rows(HYBRID.target, prompt, events[-1])


# -- sampling masks ---------------------------------------------------------------------------------------------------

DRAWN: list[dict[str, Any]] = [
    {"temperature": 1.5, "top_k": 10},
    {"temperature": 1.5, "top_k": 40, "top_p": 0.9},
    {"temperature": 2.0, "top_k": 50, "min_p": 0.05},
    {"temperature": 0.0},
    {"temperature": 1.5, "top_k": 5, "logit_bias": {str(COMMA): 6.0}},
    {"temperature": 1.5, "top_k": 20, "custom_params": {"token_ids": [COMMA]}},
]


def require_masks(token_ids: Sequence[int], meta: dict[str, Any]) -> None:
    masks, logprobs = meta["output_token_sampling_mask"], meta["output_token_sampling_logprobs"]
    assert len(masks) == len(logprobs) == len(token_ids)
    for token, mask, logprob in zip(token_ids, masks, logprobs, strict=True):
        assert token in mask
        assert len(logprob) == len(mask)
        assert math.isclose(sum(map(math.exp, logprob)), 1.0, abs_tol=1e-4)


def test_masks_are_those_without_speculation(whole: Server, off: Server, questions: Callable) -> None:
    """Masks depend only on earlier tokens, which are sent as a prompt to the server without speculation."""
    prompts = questions(len(DRAWN), seed=26)
    requests = [masked(kind) | {"max_new_tokens": 12} for kind in DRAWN]
    answers = together(whole, list(zip(prompts, requests, strict=True)))
    assert sum(answer.meta["spec_num_correct_drafts"] for answer in answers) > 10
    for prompt, kind, answer in zip(prompts, DRAWN, answers, strict=True):
        require_masks(answer.token_ids, answer.meta)
        texts = [prompt + answer.token_ids[:i] for i in range(len(answer.token_ids))]
        masks_off = together(off, [(text, masked(kind) | {"max_new_tokens": 1}) for text in texts])
        for i, one in enumerate(masks_off):
            assert of_mask(answer.meta, i) == pytest.approx(of_mask(one.meta, 0), abs=1e-3), (kind, i)


def masked(kind: dict[str, Any]) -> dict[str, Any]:
    return kind | {"fields": MASKED | ({"custom_logit_processor": BAN_TOKENS} if "custom_params" in kind else {})}


def of_mask(meta: dict[str, Any], i: int) -> dict[int, float]:
    """Return the mask of output token `i`, as token id -> log-probability."""
    masks, logprobs = meta["output_token_sampling_mask"], meta["output_token_sampling_logprobs"]
    return dict(zip(masks[i], logprobs[i], strict=True))


def test_selected_logprobs_have_one_value_per_token(whole: Server, questions: Callable) -> None:
    """With mode "selected" each token has one log-probability, even if other requests use "support" or no mask."""
    kind = {"temperature": 1.5, "top_k": 10, "max_new_tokens": 12}
    fields = [MASKED | {"sampling_logprobs_mode": "selected"}, MASKED, {}]
    requests = [kind | {"fields": field} for field in fields]
    selected, supported, _ = together(whole, list(zip(questions(3, seed=27), requests, strict=True)))
    require_masks(supported.token_ids, supported.meta)
    masks, logprobs = (selected.meta[f"output_token_sampling_{name}"] for name in ("mask", "logprobs"))
    assert all(token in mask for token, mask in zip(selected.token_ids, masks, strict=True))
    assert len(logprobs) == len(masks)
    assert all(-30 < logprob <= 0 for logprob in logprobs)


def test_refusals_of_masks_equal_those_without_speculation(whole: Server, off: Server, questions: Callable) -> None:
    (prompt,) = questions(1)
    body = {"input_ids": prompt, "sampling_params": {"temperature": 1.0}, "return_sampling_mask": True}  # no top_k
    answers = [post(server, "/generate", body) for server in (whole, off)]
    assert [answer.status_code for answer in answers] == [400, 400]
    assert len({answer.json()["error"]["message"] for answer in answers}) == 1
