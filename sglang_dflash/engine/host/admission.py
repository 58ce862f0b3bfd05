"""Checks of requests in the process that tokenizes them, for servers with and without speculation.

This process rejects harmful requests (`limits.py`) with an error that names the field. The server answers with status
400. `n` is also limited here: it is unbounded in SGLang, and a request with n = 2**31 exhausts memory.

Requests over gRPC, and those to SGLang's Rust server, do not pass through SGLang's Python tokenizer. `intake.py` checks
all requests in the scheduler. `tests/server/test_requests_bad.py` and `test_front_ends.py` send harmful requests.
docs/troubleshooting.md lists those that only a change in SGLang can reject.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from sglang.srt.managers.io_struct import GenerateReqInput, TokenizedGenerateReqInput
from sglang.srt.plugins.hook_registry import HookType

from sglang_dflash import flags
from sglang_dflash.engine.draft.dialects import is_draft
from sglang_dflash.engine.host import contract
from sglang_dflash.engine.host.increments import hook_parsers
from sglang_dflash.engine.host.limits import check_fields, check_sampling, require_tokens
from sglang_dflash.engine.host.names import HOOKS, SECTIONS

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
    if simulated := flags.current().simulated:  # None: a later engine of this process turned it off
        meta_info["spec_simulated"] = str(simulated)


def keep_name(stock: Callable[..., None], manager: Any, model_path: str, load_format: str) -> None:
    """Keep the server's model name if a draft was loaded. Hook around `TokenizerManager._update_model_path_info`."""
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
