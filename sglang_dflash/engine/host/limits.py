"""Limits of a request that a scheduler can serve. `admission.py` and `intake.py` check them.

SGLang 0.5.23 accepts some requests that make the scheduler exit. Then the answers of all clients are lost. There are
two causes: SGLang uses token ids and the number of top log-probabilities without a check, and some parameters overflow
the dtypes of their tensors. Other requests turn the logits into NaN, so their answers are meaningless.
"""

from __future__ import annotations

import json
from collections.abc import Collection

from sglang.srt.managers.embed_types import PositionalEmbeds
from sglang.srt.managers.io_struct import TokenizedGenerateReqInput
from sglang.srt.sampling.sampling_params import SamplingParams

MOST_TOP_K = 2**31 - 1  # largest top_k, because SGLang stores top_k as int32
# Largest absolute logit bias, and largest temperature, far below fp32's maximum of 3.4e38. A larger bias could make
# logits infinite. A larger temperature could be infinite in fp32, and turn masked logits (-inf) into NaN.
MOST = 1e30
LEAST_REPETITION = 1e-30  # least repetition_penalty; logits divided by less could overflow fp32


def check_sampling(asked: SamplingParams, vocab_size: int) -> None:
    """Check sampling parameters.

    Raises:
        ValueError: a parameter could make the scheduler exit, or turn logits into NaN.
    """
    if not isinstance(asked.max_new_tokens, int | None):  # SGLang's Ollama API passes fractions on
        raise ValueError(f"max_new_tokens is {asked.max_new_tokens}; send a whole number")
    if asked.top_k > MOST_TOP_K:
        raise ValueError(f"top_k is {asked.top_k}; send at most {MOST_TOP_K}, or -1 for the whole vocabulary")
    if asked.temperature > MOST:
        raise ValueError(f"temperature is {asked.temperature}; send at most {MOST:g}")
    if asked.repetition_penalty < LEAST_REPETITION:
        raise ValueError(f"repetition_penalty is {asked.repetition_penalty}; send at least {LEAST_REPETITION:g}")
    for token, bias in (asked.logit_bias or {}).items():
        if not abs(bias) <= MOST:
            raise ValueError(f"logit_bias of {token} is {bias}; send numbers within {-MOST:g}..{MOST:g}")
    if asked.stop_token_ids:  # SGLang uses them as indices, if a request of the batch has min_new_tokens
        require_tokens("stop_token_ids", asked.stop_token_ids, vocab_size)


def check_fields(asked: TokenizedGenerateReqInput, vocab_size: int) -> None:
    """Check the fields that are not sampling parameters.

    Raises:
        ValueError: a field has a value that could make the scheduler exit.
    """
    if asked.top_logprobs_num > vocab_size:
        raise ValueError(
            f"top_logprobs_num (in OpenAI's API: top_logprobs or logprobs) is {asked.top_logprobs_num}; send at most "
            f"{vocab_size}, the size of the vocabulary"
        )
    if asked.token_ids_logprob:
        require_tokens("token_ids_logprob", asked.token_ids_logprob, vocab_size)
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


def require_tokens(field: str, ids: Collection[int], vocab_size: int) -> None:
    """Check that all token ids, at least one, are within the vocabulary, or raise ValueError."""
    least, most = min(ids), max(ids)
    if least < 0 or most >= vocab_size:
        wrong = least if least < 0 else most
        raise ValueError(
            f"{field} has {wrong}, which is no token of this model; send ids of its vocabulary, 0..{vocab_size - 1}"
        )
