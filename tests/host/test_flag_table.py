"""`tests/tools/sweep/flags.toml` says of every flag of SGLang's launch command whether and how it is launched."""

from argparse import ArgumentParser

import pytest

from tests.tools.sweep.launches import TABLE, asks


@pytest.fixture(scope="module")
def known() -> list[set[str]]:
    """Return the names of every flag of SGLang's parser."""
    from sglang.srt.server_args import ServerArgs

    parser = ArgumentParser()
    ServerArgs.add_cli_args(parser)
    return [set(action.option_strings) for action in parser._actions if action.option_strings]


def named() -> tuple[set[str], set[str]]:
    """Return the flags that are launched, and those that are not."""
    launched = {word for ask in asks() for word in ask.flags if word.startswith("--")}
    return launched, {flag for flags in TABLE["not_launched"].values() for flag in flags}


def test_every_flag_has_its_place(known: list[set[str]]) -> None:
    launched, left_out = named()
    assert [names for names in known if not names & (launched | left_out)] == []
    assert launched & left_out == set()
    assert {flag for flag in launched | left_out if not any(flag in names for names in known)} == set()


def test_no_launch_is_listed_twice() -> None:
    texts = [(ask.kind, ask.text) for ask in asks()]
    assert sorted(set(texts)) == sorted(texts)
