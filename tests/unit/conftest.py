"""Tests set environment flags, which a server reads once."""

import pytest

from sglang_dflash import flags


@pytest.fixture(autouse=True)
def flags_are_read_again() -> None:
    flags.current.cache_clear()
