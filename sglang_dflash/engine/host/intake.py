"""Checks of requests in a scheduler with DFLASH, where requests of all front ends arrive.

SGLang's Python tokenizer checks most requests first (`admission.py`). gRPC front ends and the Rust server have other
checks. A harmful request that reaches the scheduler is answered here, before SGLang creates any state for it. So a
refused request of a session leaves the session unchanged. All ranks get the same request, and refuse it alike.

SGLang itself refuses most requests by `Req.set_finish_with_abort`. That method still prefills one token with the
request's sampling parameters, which could make the scheduler exit. So a refused request gets no forward here.
"""

from __future__ import annotations

import copy
import logging
from array import array
from collections.abc import Callable, Sequence
from http import HTTPStatus
from typing import TYPE_CHECKING, Any

import numpy as np
from sglang.srt.disaggregation.utils import prepare_abort
from sglang.srt.managers.io_struct import TokenizedEmbeddingReqInput, TokenizedGenerateReqInput
from sglang.srt.managers.schedule_batch import MultimodalInputs, MultimodalProcessorOutput, Req
from sglang.srt.sampling.sampling_params import SamplingParams

from sglang_dflash.engine.host.limits import check_fields, check_sampling, require_tokens

if TYPE_CHECKING:
    from sglang.srt.managers.scheduler import Scheduler

logger = logging.getLogger(__name__)


def take_in(stock: Callable[..., None], scheduler: Scheduler, asked: TokenizedGenerateReqInput, **more: Any) -> None:
    """Answer a harmful request with an error; pass others on. Hook around `Scheduler.handle_generate_request`."""
    try:
        check(asked, scheduler)
    except ValueError as error:
        refuse(scheduler, asked, str(error))
    else:
        stock(scheduler, asked, **more)


def take_no_embedding(
    stock: Callable[..., None], scheduler: Scheduler, asked: TokenizedEmbeddingReqInput, **more: Any
) -> None:
    """Answer with an error, because a server with DFLASH generates text. gRPC passes such requests on unchecked.

    Hook around `Scheduler.handle_embedding_request`.
    """
    refuse(scheduler, asked, "this server generates text; send embedding requests to a server with --is-embedding")


def check(asked: TokenizedGenerateReqInput, scheduler: Scheduler) -> None:
    """Check all fields of a request.

    Raises:
        ValueError: a field has an invalid value.
    """
    vocab_size = scheduler.model_config.vocab_size
    check_prompt(asked, vocab_size)
    check_sampling(asked.sampling_params, vocab_size)
    verify(asked.sampling_params, vocab_size)
    check_fields(asked, vocab_size)
    check_adapter(asked.lora_id, scheduler)


def check_prompt(asked: TokenizedGenerateReqInput, vocab_size: int) -> None:
    """Check the token ids of a prompt, or raise ValueError.

    Ids of a prompt with images are not checked: SGLang replaces some by hashes, and limits all to the vocabulary.
    """
    ids = asked.input_ids
    if asked.input_embeds is not None or asked.mm_inputs is not None:
        return
    if ids is not None and len(ids):
        require_tokens("input_ids", extremes(ids), vocab_size)
    elif asked.session_params is None or asked.session_params.id is None:  # a session's history is part of the prompt
        raise ValueError("the prompt has no tokens; send at least one")


def extremes(ids: Sequence[int]) -> tuple[int, int]:
    """Return the least and the largest id. NumPy reads the buffer of an array without a copy."""
    values = np.asarray(ids)
    return int(values.min()), int(values.max())


def verify(asked: SamplingParams, vocab_size: int) -> None:
    """Run SGLang's own check of sampling parameters, which raises ValueError. gRPC front ends leave it out."""
    if asked.max_new_tokens == 0:
        # With n > 1, SGLang first prefills the prompt by an internal request. Its max_new_tokens is 0, but its
        # min_new_tokens is the client's.
        asked = copy.copy(asked)
        asked.min_new_tokens = 0
    asked.verify(vocab_size)


def check_adapter(lora_id: str | None, scheduler: Scheduler) -> None:
    """Check that the scheduler has loaded a request's LoRA adapter, or raise ValueError."""
    adapters = scheduler.tp_worker.model_runner.lora_manager
    if lora_id is not None and (adapters is None or lora_id not in adapters.lora_refs):
        raise ValueError(f"lora_id is {lora_id}, which is no loaded adapter; load it, or leave lora_id out")


def refuse(scheduler: Scheduler, asked: TokenizedGenerateReqInput | TokenizedEmbeddingReqInput, message: str) -> None:
    """Answer a request with HTTP status 400 and `message`. The answer has one prompt token and no output."""
    if isinstance(asked.mm_inputs, MultimodalInputs | MultimodalProcessorOutput):
        for item in asked.mm_inputs.mm_items:
            item.release_transport_proxies()
    logger.warning("request %s refused: %s", asked.rid, message)
    req = Req(
        asked.rid,
        "",
        array("q", [0]),
        SamplingParams(),
        disagg_mode=scheduler.disaggregation_mode,
        vocab_size=scheduler.model_config.vocab_size,
        http_worker_ipc=asked.http_worker_ipc,
        time_stats=asked.time_stats,
    )
    req.tokenizer = scheduler.tokenizer
    req.time_stats.trace_ctx.abort(abort_info={"reason": message})
    prepare_abort(req, message, status_code=HTTPStatus.BAD_REQUEST)
    scheduler.output_streamer.stream_output([req], req.return_logprob)
