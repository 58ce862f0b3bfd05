"""Checks of requests before they reach a scheduler, for servers with and without speculation.

SGLang 0.5.23 accepts some requests that make the scheduler exit. Then the answers of all clients are lost. SGLang uses
token ids and the number of top log-probabilities without a check. Some parameters overflow the dtypes of their tensors.
`n` is unbounded, and a request with n = 2**31 exhausts memory. Other requests turn the logits into NaN, so their
answers are meaningless.

The process that tokenizes requests rejects these harmful ones with an error that names the field. The server answers
with status 400. `tests/server/test_requests_bad.py` sends harmful requests. docs/troubleshooting.md lists those that
only a change in SGLang can reject.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from typing import Any

from sglang.srt.managers.embed_types import PositionalEmbeds
from sglang.srt.managers.io_struct import GenerateReqInput, TokenizedGenerateReqInput
from sglang.srt.plugins.hook_registry import HookType
from sglang.srt.sampling.sampling_params import SamplingParams

from sglang_dflash import flags
from sglang_dflash.draft.dialects import is_draft
from sglang_dflash.host import contract
from sglang_dflash.host.increments import hook_parsers
from sglang_dflash.host.names import HOOKS, SECTIONS

MOST_TOP_K = 2**31 - 1  # largest top_k, because SGLang stores top_k as int32
# Largest logit bias (absolute) and temperature, far below fp32's maximum of 3.4e38. A larger bias could make logits
# infinite. A larger temperature could be infinite in fp32, and turn masked logits (-inf) into NaN.
MOST = 1e30
LEAST_REPETITION = 1e-30  # least repetition_penalty; logits divided by less could overflow fp32
# Largest number of answers (n times the number of prompts) to a request with n > 1. SGLang creates an internal request
# for each answer before it serves the first.
MOST_ANSWERS = 2**16


def hook_tokenizer() -> None:
    """Set the hooks of a process that tokenizes. They check requests, and parse streamed answers piece by piece.

    A further hook keeps the server's model name if `/update_weights_from_disk` has loaded a draft.
    """
    hook_parsers()
    contract.check(SECTIONS["admission"])
    hooks: contract.Hooks = {
        HOOKS["asked"]: (check_asked, HookType.AFTER),
        HOOKS["prompt"]: (check_prompt, HookType.AROUND),
        HOOKS["tokenized"]: (check_parameters, HookType.AFTER),
        HOOKS["renamed"]: (keep_name, HookType.AROUND),
    }
    if flags.current().simulated:
        hooks[HOOKS["counted"]] = mark_simulated, HookType.AFTER
    contract.set_hooks(hooks)


def mark_simulated(result: None, manager: Any, meta_info: dict[str, Any], *_: Any) -> None:
    """Add the simulated acceptance to an answer's `meta_info`.

    Hook after `TokenizerManager._calculate_spec_decoding_metrics`.
    """
    if simulated := flags.current().simulated:  # none, if a later engine of this process does not simulate
        meta_info["spec_simulated"] = str(simulated)


def keep_name(stock: Callable[..., None], manager: Any, model_path: str, load_format: str) -> None:
    """Leave out the renaming for a draft. Hook around `TokenizerManager._update_model_path_info`."""
    if not is_draft(model_path):
        stock(manager, model_path, load_format)


def check_asked(_: None, request: GenerateReqInput) -> None:
    """Check a request as the client sent it. Hook after `GenerateReqInput._handle_parallel_sampling`.

    Raises:
        ValueError: n times the number of prompts is too large, or the client set `lora_id`, which only SGLang may set.
    """
    if request.lora_id is not None:
        raise ValueError("lora_id is internal to SGLang; leave it out, and name an adapter in lora_path")
    n, n_prompts = request.parallel_sample_num, request.batch_size
    if n > 1 and n * n_prompts > MOST_ANSWERS:
        raise ValueError(
            f"n is {n} and the number of prompts {n_prompts}, which makes {n * n_prompts} answers; send a request for "
            f"at most {MOST_ANSWERS}"
        )


def check_prompt(stock: Callable[..., None], manager: Any, request: Any, input_ids: Sequence[int] | None) -> None:
    """Check a prompt and the request's metric labels. Hook around `TokenizerManager._validate_one_request`.

    Token ids are checked only if the client sent ids. A tokenizer returns only ids of the vocabulary.

    Raises:
        ValueError: the prompt has no tokens or a token outside the vocabulary, or a label is unknown.
    """
    stock(manager, request, input_ids)
    if not isinstance(request, GenerateReqInput):
        return
    check_labels(request, manager)
    if input_ids is None or request.input_embeds is not None:
        return
    if not len(input_ids):
        # In a session the prompt also contains the history. The scheduler rejects the request if both are empty.
        if not (request.session_params or {}).get("id"):
            raise ValueError("the prompt has no tokens; send a text or input_ids with at least one")
        return
    if request.input_ids is not None:
        require_tokens("input_ids", input_ids, manager.model_config.vocab_size)


def check_labels(request: GenerateReqInput, manager: Any) -> None:
    """Check that the server's metrics, if enabled, have all custom labels of a request, or raise ValueError."""
    if manager.enable_metrics and request.custom_labels:
        unknown = set(request.custom_labels) - set(manager.metrics_collector.labels)
        if unknown:
            raise ValueError(
                f"custom_labels has {', '.join(sorted(unknown))}, which the metrics of this server do not have; leave "
                "it out, or start the server with it in --tokenizer-metrics-allowed-custom-labels"
            )


def check_parameters(made: Any, manager: Any, *_: Any) -> Any:
    """Check a tokenized request before the scheduler gets it. Hook after `TokenizerManager._create_tokenized_object`.

    Raises:
        ValueError: a parameter is invalid: it could make the scheduler exit, or turn logits into NaN.
    """
    if isinstance(made, TokenizedGenerateReqInput):
        vocab_size = manager.model_config.vocab_size
        check_sampling(made.sampling_params, vocab_size)
        check_fields(made, vocab_size)
    return made


def check_sampling(asked: SamplingParams, vocab_size: int) -> None:
    """Check sampling parameters. Raises ValueError, see `check_parameters`."""
    if asked.top_k > MOST_TOP_K:
        raise ValueError(f"top_k is {asked.top_k}; send at most {MOST_TOP_K}, or -1 for the whole vocabulary")
    if asked.temperature > MOST:
        raise ValueError(f"temperature is {asked.temperature}; send at most {MOST:g}")
    if asked.repetition_penalty < LEAST_REPETITION:
        raise ValueError(f"repetition_penalty is {asked.repetition_penalty}; send at least {LEAST_REPETITION:g}")
    for token, bias in (asked.logit_bias or {}).items():
        if not abs(bias) <= MOST:
            raise ValueError(f"logit_bias of {token} is {bias}; send numbers within {-MOST:g}..{MOST:g}")
    if asked.stop_token_ids:  # SGLang uses them as indices if any request of the batch has min_new_tokens
        require_tokens("stop_token_ids", asked.stop_token_ids, vocab_size)


def check_fields(asked: TokenizedGenerateReqInput, vocab_size: int) -> None:
    """Check the fields that are not sampling parameters. Raises ValueError, see `check_parameters`."""
    if asked.top_logprobs_num > vocab_size:
        raise ValueError(
            f"top_logprobs_num (in OpenAI's API: top_logprobs or logprobs) is {asked.top_logprobs_num}; send at most "
            f"{vocab_size}, the size of the vocabulary"
        )
    if asked.return_logprob and asked.logprob_start_len < -1:
        raise ValueError(f"logprob_start_len is {asked.logprob_start_len}; send a position, or -1 for the prompt's end")
    if not isinstance(asked.return_hidden_states, bool) and asked.return_hidden_states != "last":
        raise ValueError(f'return_hidden_states is {asked.return_hidden_states!r}; send true, false or "last"')
    if asked.custom_logit_processor is not None:
        require_processor(asked.custom_logit_processor)
    if not isinstance(asked.positional_embed_overrides, PositionalEmbeds | None):
        raise ValueError("positional_embed_overrides is internal to SGLang; leave it out")


def require_processor(text: str) -> None:
    """Check that `text` has the form of `CustomLogitProcessor.to_str`, without unpickling its content.

    Raises:
        ValueError: `text` has another form.
    """
    try:
        bytes.fromhex(json.loads(text)["callable"])
    except (ValueError, KeyError, TypeError) as error:
        raise ValueError(
            f"custom_logit_processor cannot be read ({type(error).__name__}: {error}); send the result of its to_str()"
        ) from error


def require_tokens(field: str, ids: Sequence[int], vocab_size: int) -> None:
    """Check that all token ids are within the vocabulary, or raise ValueError."""
    least, most = min(ids), max(ids)
    if least < 0 or most >= vocab_size:
        wrong = least if least < 0 else most
        raise ValueError(
            f"{field} has {wrong}, which is no token of this model; send ids of its vocabulary, 0..{vocab_size - 1}"
        )
