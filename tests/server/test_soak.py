"""Soak test (`tests/server/lib/soak.py`): 200 requests in CI, 2,500 on each of four servers in `make soak`."""

import resource
from collections import Counter
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from itertools import cycle, islice

import pytest

from sglang_dflash.pairs.servers.server import Server
from tests.server.conftest import require_nothing_lost
from tests.server.lib.soak import Entry, Report, Soak, complaints, write_book
from tests.server.lib.talk import ask_and_never_read, stream, tokens_of
from tests.server.lib.variants import RETRACT, VARIANTS
from tests.server.test_lifecycle import TIGHT

N_SHORT, N_LONG = 200, 2500
SEED = 7
N_UNREAD, N_READ = 9500, 32


@pytest.fixture(scope="module")
def book(server: Callable) -> list[Entry]:
    return write_book(server("off"), n_entries=40, seed=9000)


def soaked(server: Server, book: list[Entry], n_requests: int) -> Report:
    report = Soak(server, book, n_requests, SEED).run()
    print(f"\n{server.name}: {report}")
    found = list(complaints(report))
    assert not found, "\n".join(found)
    server.flush_cache()
    require_nothing_lost(server)
    return report


def test_short(ours: Server, book: list[Entry]) -> None:
    soaked(ours, book, N_SHORT)


@pytest.mark.full
@pytest.mark.soak
@pytest.mark.parametrize(
    ("flags", "env"),
    [
        (VARIANTS["hybrid"].flags, ()),
        (TIGHT, ()),
        (TIGHT, RETRACT),
        ((*VARIANTS["hybrid-window"].flags, "--page-size", "16", "--chunked-prefill-size", "64"), ()),
    ],
    ids=["hybrid", "tight", "tight-retract", "window-pages-chunked"],
)
def test_long(server: Callable, book: list[Entry], flags: tuple[str, ...], env: tuple[tuple[str, str], ...]) -> None:
    report = soaked(server(flags=flags, env=dict(env)), book, N_LONG)
    if flags is TIGHT:
        assert report.n_retractions > 0, "memory sufficed"


@pytest.mark.full
@pytest.mark.soak
def test_thousands_of_streams_that_nobody_reads(ours: Server, book: list[Entry]) -> None:
    """Streams that are read must be complete while thousands of unread streams wait, and after these disconnect."""
    _, most = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (most, most))
    read = book[:N_READ]
    prompts = cycle(entry.prompt for entry in book)
    with ThreadPoolExecutor(N_READ) as clients:
        with ExitStack() as unread:
            for prompt in islice(prompts, N_UNREAD // 10):
                unread.enter_context(ask_and_never_read(ours, prompt, max_new_tokens=16))
            answers = [clients.submit(last, ours, entry) for entry in read]
            for prompt in islice(prompts, N_UNREAD - N_UNREAD // 10):
                unread.enter_context(ask_and_never_read(ours, prompt, max_new_tokens=16))
            assert ours.load()["num_waiting_reqs"] > N_UNREAD // 2
            assert [answer.result() for answer in answers[: N_READ // 2]] == [e.token_ids for e in read[: N_READ // 2]]
        assert [answer.result() for answer in answers] == tokens_of(read)
    require_nothing_lost(ours)


def last(server: Server, entry: Entry) -> list[int]:
    *_, whole = stream(server, entry.prompt, **entry.options)
    return whole.token_ids


def test_wrong_token_and_leak_are_found() -> None:
    flat = [900.0 + 30 * (i < 5) for i in range(40)]
    good = Report(Counter(whole=200), [], flat, 0, 2000, 1.0)
    assert list(complaints(good)) == []
    assert len(list(complaints(good._replace(wrong=["request 5"])))) == 1
    assert len(list(complaints(good._replace(rss_mib=[900.0 + 5 * i for i in range(40)])))) == 1
