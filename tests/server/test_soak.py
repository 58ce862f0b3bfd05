"""The soak, in its short form on the suite's own server, and in the long one on four (`make soak`)."""

from collections import Counter
from collections.abc import Callable

import pytest

from sglang_dflash.bench.server import Server
from tests.server.conftest import require_nothing_lost
from tests.server.lib.soak import Entry, Report, Soak, complaints, write_book
from tests.server.lib.variants import RETRACT, VARIANTS
from tests.server.test_lifecycle import TIGHT

N_SHORT, N_LONG = 200, 2500
SEED = 7


@pytest.fixture(scope="module")
def book(server: Callable) -> list[Entry]:
    return write_book(server("off"), n_entries=40, seed=9000)


def soaked(server: Server, book: list[Entry], n_requests: int, say: Callable[[str], None] = print) -> Report:
    report = Soak(server, book, n_requests, SEED).run()
    say(f"\n{server.name}: {report}")
    found = list(complaints(report))
    assert not found, "\n".join(found)
    server.flush_cache()
    require_nothing_lost(server)
    return report


def test_short(server: Callable, book: list[Entry]) -> None:
    soaked(server(flags=VARIANTS["hybrid"].flags), book, N_SHORT)


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


def test_the_soak_sees_a_wrong_token_and_a_leak() -> None:
    """A test that cannot fail is none."""
    flat = [900.0 + 30 * (i < 5) for i in range(40)]
    good = Report(Counter(whole=200), [], flat, 0, 2000, 1.0)
    assert list(complaints(good)) == []
    assert len(list(complaints(good._replace(wrong=["request 5"])))) == 1
    assert len(list(complaints(good._replace(rss_mib=[900.0 + 5 * i for i in range(40)])))) == 1
