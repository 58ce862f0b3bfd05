"""The texts that copies are taken from: which servers keep them, and how many bytes they take."""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import Any

from sglang_dflash.errors import NotSupported
from sglang_dflash.flags import Copy
from sglang_dflash.memory.sizes import text_bytes

logger = logging.getLogger(__name__)


def why_no_copies(disaggregation: str) -> str:
    """Why a server of that `--disaggregation-mode` cannot copy; empty: it can."""
    if disaggregation == "decode":
        return "another server reads the prompts, and their text does not come along"
    if disaggregation == "prefill":
        return "it reads prompts and decodes nothing"
    return ""


def check_copy(copy: Copy, disaggregation: str) -> None:
    """Raises NotSupported: copies are asked for, and cannot be."""
    if copy in (Copy.ON, Copy.RANDOM) and (reason := why_no_copies(disaggregation)):
        raise NotSupported(f"SGLANG_DFLASH_COPY={copy}: {reason}; set it to auto or off")


def why_none_are_kept(copy: Copy, disaggregation: str) -> str:
    """Empty: texts are kept, and copied from."""
    return f"SGLANG_DFLASH_COPY={copy}" if copy is Copy.OFF else why_no_copies(disaggregation)


def beside_texts(stock: Callable[[Any, float], int], configurator: Any, pre_model_load_memory: float) -> int:
    """AROUND `KVCacheConfigurator._profile_available_bytes`: bytes that are left beside the texts, on this rank."""
    from sglang.srt.runtime_context import get_schedule

    n_bytes = text_bytes(get_schedule().max_running_requests, configurator.model_config.context_len)
    logger.info("copies: texts of all requests take %.2f MiB", n_bytes / 2**20)
    return stock(configurator, pre_model_load_memory) - n_bytes
