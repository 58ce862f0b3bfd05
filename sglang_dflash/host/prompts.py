"""What a prompt must be before it may reach a scheduler: some token, and none outside the vocabulary.

SGLang 0.5.23 looks ids up unchecked and takes the logits of a prompt's last row. So an id past the vocabulary ends the
scheduler (on a GPU by a device assert), and a prompt without a row does, with speculation and without. Ids are a
client's; those of a text are the tokenizer's own. Called in the process that tokenizes, before anything is sent on.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from sglang.srt.managers.io_struct import GenerateReqInput


def check_prompt(stock: Callable[..., None], manager: Any, request: Any, input_ids: Sequence[int] | None) -> None:
    """AROUND `TokenizerManager._validate_one_request`; what it raises, the server answers with status 400.

    Raises:
        ValueError: the prompt has no tokens, or one that is none of the model's.
    """
    stock(manager, request, input_ids)
    if not isinstance(request, GenerateReqInput) or input_ids is None or request.input_embeds is not None:
        return
    if not len(input_ids):
        # A session's history may be all of a turn's prompt; the scheduler refuses one that is empty with it.
        if not request.session_params:
            raise ValueError("the prompt has no tokens; send a text or input_ids with at least one")
        return
    if request.input_ids is not None:
        require_tokens(input_ids, manager.model_config.vocab_size)


def require_tokens(ids: Sequence[int], vocab_size: int) -> None:
    """
    Raises:
        ValueError: one is not within 0..vocab_size - 1.
    """
    least, most = min(ids), max(ids)
    if least < 0 or most >= vocab_size:
        wrong = least if least < 0 else most
        raise ValueError(
            f"input_ids has {wrong}, which is no token of this model; send ids of its vocabulary, 0..{vocab_size - 1}"
        )
