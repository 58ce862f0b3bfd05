"""Memory of the draft's context K/V.

With a draft window, each request has one ring. Without a window, the draft has as many KV slots as the target.
"""

from collections.abc import Callable
from dataclasses import replace

import pytest

from sglang_dflash.engine.memory.sizes import ring_slots
from sglang_dflash.pairs.tiny import pairs as tiny
from sglang_dflash.tools.capacity import geometry
from sglang_dflash.tools.check import served

# Largest number of requests that a tiny pair's server runs, tokens of a block, window in tokens.
N_REQUESTS, BLOCK, WINDOW = 8, 16, 64
FP32 = 4


def slot_bytes() -> int:
    attention = geometry.read_draft(str(tiny.DENSE.draft)).attention
    return replace(attention, itemsize=FP32).bytes_per_token(tp_size=1)


def draft_kv_bytes(server: Callable, *flags: str) -> int:
    return served.fetch(server(target="dense", flags=flags).url)["draft_kv_bytes"]


@pytest.mark.full
def test_ring_memory_does_not_depend_on_the_context(server: Callable) -> None:
    window = ("--speculative-draft-window-size", str(WINDOW))
    short = draft_kv_bytes(server, *window, "--context-length", "512", "--max-total-tokens", "2048")
    long = draft_kv_bytes(server, *window, "--context-length", "4096", "--max-total-tokens", "8192")
    # One more ring is for padding requests, and SGLang's pools have one more page (here one slot).
    assert short == long == ((N_REQUESTS + 1) * ring_slots(WINDOW, BLOCK, 1) + 1) * slot_bytes()


@pytest.mark.full
def test_without_a_window_each_target_slot_has_a_draft_slot(server: Callable) -> None:
    assert draft_kv_bytes(server, "--max-total-tokens", "2048") == 2049 * slot_bytes()
