"""What a request must be before it may reach a scheduler, with speculation and without.

SGLang 0.5.23 takes some requests that end the scheduler, and with it every other client's answer: token ids and numbers
of log-probabilities are looked up unchecked, some numbers do not fit the tensors they are put into, and `n` answers not
the machine. Others it answers from a distribution that is not a number. Here they are refused by name, in the process
that tokenizes; what is raised, the server answers with status 400. The list is what
`tests/server/test_requests_bad.py` sends; docs/troubleshooting.md says which ones SGLang alone can mend.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from typing import Any

from sglang.srt.managers.embed_types import PositionalEmbeds
from sglang.srt.managers.io_struct import GenerateReqInput, TokenizedGenerateReqInput
from sglang.srt.plugins.hook_registry import HookType
from sglang.srt.sampling.sampling_params import SamplingParams

from sglang_dflash.host import contract
from sglang_dflash.host.increments import hook_parsers
from sglang_dflash.host.names import HOOKS, SECTIONS

MOST_TOP_K = 2**31 - 1  # SGLang keeps it as int32
MOST = 1e30  # far from fp32's largest, 3.4e38: a biased logit stays finite, a masked one divided by it is no NaN
LEAST_REPETITION = 1e-30  # logits are divided by it
MOST_ANSWERS = 2**16  # to one request, which SGLang makes that many requests of before the first is served


def hook_tokenizer() -> None:
    """Check requests in this process, where it tokenizes them, and parse its streams in pieces."""
    hook_parsers()
    contract.check(SECTIONS["admission"])
    contract.set_hooks(
        {
            HOOKS["asked"]: (check_asked, HookType.AFTER),
            HOOKS["prompt"]: (check_prompt, HookType.AROUND),
            HOOKS["tokenized"]: (check_parameters, HookType.AFTER),
        }
    )


def check_asked(_: None, request: GenerateReqInput) -> None:
    """AFTER `GenerateReqInput._handle_parallel_sampling`: as the client sent it, before its prompts are repeated.

    Raises:
        ValueError: it asks for answers without end, or has what SGLang finds out itself.
    """
    if request.lora_id is not None:
        raise ValueError("lora_id is SGLang's own and no client's; leave it out, and name an adapter in lora_path")
    n, n_prompts = request.parallel_sample_num, request.batch_size
    if n > 1 and n * n_prompts > MOST_ANSWERS:
        raise ValueError(f"n is {n}, of {n_prompts} prompts; ask for at most {MOST_ANSWERS} answers at once")


def check_prompt(stock: Callable[..., None], manager: Any, request: Any, input_ids: Sequence[int] | None) -> None:
    """AROUND `TokenizerManager._validate_one_request`. Ids are a client's; those of a text are the tokenizer's own.

    Raises:
        ValueError: the prompt has no tokens, or one that is none of the model's; or see `check_labels`.
    """
    stock(manager, request, input_ids)
    if not isinstance(request, GenerateReqInput):
        return
    check_labels(request, manager)
    if input_ids is None or request.input_embeds is not None:
        return
    if not len(input_ids):
        # A session's history may be all of a turn's prompt; the scheduler refuses one that is empty with it.
        if not (request.session_params or {}).get("id"):
            raise ValueError("the prompt has no tokens; send a text or input_ids with at least one")
        return
    if request.input_ids is not None:
        require_tokens("input_ids", input_ids, manager.model_config.vocab_size)


def check_labels(request: GenerateReqInput, manager: Any) -> None:
    """
    Raises:
        ValueError: it is to be counted by what the server has no metrics of.
    """
    if manager.enable_metrics and request.custom_labels:
        unknown = set(request.custom_labels) - set(manager.metrics_collector.labels)
        if unknown:
            raise ValueError(
                f"custom_labels has {', '.join(sorted(unknown))}, by which this server does not count; "
                "leave it out, or name it in --tokenizer-metrics-allowed-custom-labels"
            )


def check_parameters(made: Any, manager: Any, *_: Any) -> Any:
    """AFTER `TokenizerManager._create_tokenized_object`, whose result is what a scheduler is sent.

    Raises:
        ValueError: a parameter is none that a scheduler survives.
    """
    if isinstance(made, TokenizedGenerateReqInput):
        vocab_size = manager.model_config.vocab_size
        check_sampling(made.sampling_params, vocab_size)
        check_fields(made, vocab_size)
    return made


def check_sampling(asked: SamplingParams, vocab_size: int) -> None:
    """
    Raises:
        ValueError: see `check_parameters`.
    """
    if asked.top_k > MOST_TOP_K:
        raise ValueError(f"top_k is {asked.top_k}; send at most {MOST_TOP_K}, or -1 for the whole vocabulary")
    if asked.temperature > MOST:
        raise ValueError(f"temperature is {asked.temperature}; send at most {MOST:g}")
    if asked.repetition_penalty < LEAST_REPETITION:
        raise ValueError(f"repetition_penalty is {asked.repetition_penalty}; send at least {LEAST_REPETITION:g}")
    for token, bias in (asked.logit_bias or {}).items():
        if not abs(bias) <= MOST:
            raise ValueError(f"logit_bias of {token} is {bias}; send numbers within {-MOST:g}..{MOST:g}")
    if asked.stop_token_ids:  # looked up where any request of the batch has min_new_tokens
        require_tokens("stop_token_ids", asked.stop_token_ids, vocab_size)


def check_fields(asked: TokenizedGenerateReqInput, vocab_size: int) -> None:
    """
    Raises:
        ValueError: see `check_parameters`.
    """
    if asked.top_logprobs_num > vocab_size:
        raise ValueError(f"{asked.top_logprobs_num} top log-probabilities of {vocab_size} tokens; ask for fewer")
    if asked.return_logprob and asked.logprob_start_len < -1:
        raise ValueError(f"logprob_start_len is {asked.logprob_start_len}; send a position, or -1 for the prompt's end")
    if not isinstance(asked.return_hidden_states, bool) and asked.return_hidden_states != "last":
        raise ValueError(f'return_hidden_states is {asked.return_hidden_states!r}; send true, false or "last"')
    if asked.custom_logit_processor is not None:
        require_processor(asked.custom_logit_processor)
    if not isinstance(asked.positional_embed_overrides, PositionalEmbeds | None):
        raise ValueError("positional_embed_overrides is SGLang's own and no client's; leave it out")


def require_processor(text: str) -> None:
    """Check that `text` looks like what `CustomLogitProcessor.to_str` makes; what is in it stays unread.

    Raises:
        ValueError: it does not.
    """
    try:
        bytes.fromhex(json.loads(text)["callable"])
    except (ValueError, KeyError, TypeError) as error:
        raise ValueError(
            f"custom_logit_processor cannot be read ({type(error).__name__}: {error}); send what its to_str() says"
        ) from error


def require_tokens(field: str, ids: Sequence[int], vocab_size: int) -> None:
    """Check that all token ids are within the vocabulary.

    Raises:
        ValueError: one is not.
    """
    least, most = min(ids), max(ids)
    if least < 0 or most >= vocab_size:
        wrong = least if least < 0 else most
        raise ValueError(
            f"{field} has {wrong}, which is no token of this model; send ids of its vocabulary, 0..{vocab_size - 1}"
        )
