"""What a request may ask for."""

from types import SimpleNamespace
from typing import Any

import pytest

from sglang_dflash import __version__
from sglang_dflash.host.requests import refusal


def request(**asked: bool) -> Any:
    return SimpleNamespace(**({"return_hidden_states": False, "return_sampling_mask": False} | asked))


def test_a_plain_request_is_served() -> None:
    assert refusal(request()) is None


@pytest.mark.parametrize(
    ("asked", "named"),
    [
        (["return_hidden_states"], "return_hidden_states"),
        (["return_hidden_states", "return_sampling_mask"], "return_hidden_states, return_sampling_mask"),
    ],
)
def test_what_cannot_be_served_is_refused_by_name_and_with_a_cure(asked: list[str], named: str) -> None:
    assert refusal(request(**dict.fromkeys(asked, True))) == (
        f"sglang-dflash {__version__} does not support {named} with DFLASH speculation; leave it out, or start the "
        "server without --speculative-algorithm"
    )
