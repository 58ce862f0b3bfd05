"""What a request may ask for."""

import pytest

from sglang_dflash.host.requests import admit


def test_what_sglangs_own_worker_cannot_serve_is_served() -> None:
    """As a hook sees it: SGLang's function comes first, then what it was given."""
    assert admit(lambda *args: pytest.fail("SGLang's own worker was asked"), "request", "overlap") is None
