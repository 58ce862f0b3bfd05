"""Memory of the token histories for n-gram copies, and the reasons why a server keeps no histories."""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import Any

from sglang_dflash.engine.memory.sizes import text_bytes
from sglang_dflash.errors import NotSupported
from sglang_dflash.flags import Copy

logger = logging.getLogger(__name__)


DETERMINISTIC = "--enable-deterministic-inference"
WITHOUT_TEXTS = {  # reason why a server keeps no histories, by `--disaggregation-mode`
    "decode": "another server reads the prompts, and their tokens are not transferred",
    "prefill": "a prefill server does not decode",
}


def why_no_copies(
    copy: Copy, disaggregation: str, *, is_simulated: bool = False, is_deterministic: bool = False
) -> str:
    """Return the reason why a server keeps no token histories; "" if it keeps them.

    Args:
        copy: value of SGLANG_DFLASH_COPY.
        disaggregation: value of `--disaggregation-mode`.
        is_simulated: acceptance is simulated.
        is_deterministic: answers must be equal between runs.
    Raises:
        NotSupported: copies are required but impossible.
    """
    if copy is Copy.OFF:
        return f"SGLANG_DFLASH_COPY={copy}"
    setting, reason = f"--disaggregation-mode {disaggregation}", WITHOUT_TEXTS.get(disaggregation, "")
    if is_simulated:
        setting, reason = "SGLANG_SIMULATE_ACC_LEN", "a simulated step accepts copies and other drafts alike"
    if is_deterministic and copy is Copy.AUTO:
        return f"with {DETERMINISTIC} no answer may depend on requests before it"
    if reason and copy is not Copy.AUTO:
        raise NotSupported(
            f"SGLANG_DFLASH_COPY={copy} is not supported with {setting} ({reason}); set SGLANG_DFLASH_COPY to auto or "
            "off"
        )
    return reason


def beside_texts(stock: Callable[[Any, float], int], configurator: Any, pre_model_load_memory: float) -> int:
    """Return this rank's bytes for pools, minus the bytes of all token histories.

    Hook around `KVCacheConfigurator._profile_available_bytes`.
    """
    from sglang.srt.runtime_context import get_schedule

    n_requests = max(1, get_schedule().max_running_requests // configurator.attn_dp_size)
    n_bytes = text_bytes(n_requests, configurator.model_config.context_len)
    logger.info("n-gram copies: token histories of all requests take %.2f MiB", n_bytes / 2**20)
    return stock(configurator, pre_model_load_memory) - n_bytes
