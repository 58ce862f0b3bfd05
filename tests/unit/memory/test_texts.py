"""Which servers keep texts, and what is left beside them."""

from types import SimpleNamespace

import pytest

from sglang_dflash.errors import NotSupported
from sglang_dflash.flags import Copy
from sglang_dflash.memory import texts


@pytest.mark.parametrize(
    ("copy", "disaggregation", "kept"),
    [
        (Copy.OFF, "null", False),
        (Copy.AUTO, "null", True),
        (Copy.ON, "null", True),
        (Copy.AUTO, "prefill", False),
        (Copy.AUTO, "decode", False),
    ],
)
def test_which_servers_keep_texts(copy: Copy, disaggregation: str, kept: bool) -> None:
    assert (not texts.why_no_copies(copy, disaggregation)) is kept


@pytest.mark.parametrize("copy", [Copy.ON, Copy.RANDOM])
@pytest.mark.parametrize(
    ("disaggregation", "reason"),
    [("prefill", "it reads prompts and decodes nothing"), ("decode", "another server reads the prompts, .*")],
)
def test_a_server_that_cannot_copy_is_refused_where_it_is_told_to(copy: Copy, disaggregation: str, reason: str) -> None:
    with pytest.raises(NotSupported, match=rf"SGLANG_DFLASH_COPY={copy}: {reason}; set it to auto or off"):
        texts.why_no_copies(copy, disaggregation)


def test_what_is_left_beside_texts(monkeypatch: pytest.MonkeyPatch) -> None:
    schedule = SimpleNamespace(max_running_requests=48)
    monkeypatch.setattr("sglang.srt.runtime_context.get_schedule", lambda: schedule)
    configurator = SimpleNamespace(model_config=SimpleNamespace(context_len=262144))
    left = texts.beside_texts(lambda configurator, before: 10**9, configurator, 1.0)
    assert left == 10**9 - 49 * 262144 * 4
