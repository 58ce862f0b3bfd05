"""Above temperature 0 the first tokens are drawn from the distribution they have without speculation.

The comparison and its bound are in `prove/distribution.py`. With `N` draws on each side a shift of 0.15 in an outcome
of probability 0.5 is caught five times in six, and one of 0.09 where it is 0.1. A wrong acceptance moves outcomes more,
as the last tests show on servers whose acceptance is spoilt on purpose.
"""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from sglang_dflash.check import served
from sglang_dflash.prove import distribution
from sglang_dflash.prove.distribution import Draw
from sglang_dflash.servers.server import Server
from tests.server.conftest import SECOND
from tests.server.lib.variants import VARIANTS
from tests.tools import parameters
from tests.tools.parameters import SAMPLED, Case

FLAGS = VARIANTS["hybrid"].flags
N = 800  # draws per setting and server; about 20 s for both
PLAIN = next(case for case in SAMPLED if case.name == "T 1")
ANY_WIDTH = ("T 1", "top_p 0.8", "penalties, top_k and min_p", "regex at T 1.5")
SPOILER = Path(__file__).parent / "wrong_acceptance"

pytestmark = pytest.mark.full


@pytest.fixture(scope="module")
def drawn_off(server: Callable) -> Callable[[Case], list[Draw]]:
    """The draws without speculation, made once."""
    drawn: dict[str, list[Draw]] = {}

    def draws(case: Case) -> list[Draw]:
        off = server("off")
        asked = repr((parameters.begun(case), case.sampling, case.fields))  # many have the same setting without theirs
        if asked not in drawn:
            drawn[asked] = parameters.draws(off, case, N)
        return drawn[asked]

    return draws


def compare(server: Server, drawn_off: Callable, case: Case) -> list[distribution.Cell]:
    return distribution.violations(drawn_off(case), parameters.draws(server, case, N))


@pytest.mark.parametrize("case", SAMPLED, ids=str)
def test_the_law_holds(ours: Server, drawn_off: Callable, case: Case) -> None:
    apart = compare(ours, drawn_off, case)
    assert not apart, f"{case}: {[str(cell) for cell in apart]}"
    assert len(set(drawn_off(case))) > 3, f"{case}: hardly any randomness; the comparison could not fail"


@pytest.mark.parametrize("case", [case for case in SAMPLED if case.row != "temperature > 0"], ids=str)
def test_the_parameter_changes_the_law(drawn_off: Callable, case: Case) -> None:
    """Otherwise a server that ignores it would pass."""
    assert distribution.violations(drawn_off(parameters.bare(case)), drawn_off(case))


@pytest.mark.parametrize("case", [case for case in SAMPLED if case.name in ANY_WIDTH], ids=str)
def test_the_law_holds_whatever_the_width(server: Callable, drawn_off: Callable, case: Case) -> None:
    """Every step verifies another number of tokens, one at times."""
    variant = VARIANTS["hybrid-random-widths"]
    assert not compare(server(flags=variant.flags, env=dict(variant.env)), drawn_off, case)


@pytest.mark.parametrize("case", [case for case in SAMPLED if case.name in ANY_WIDTH], ids=str)
def test_the_law_holds_whatever_is_copied(server: Callable, drawn_off: Callable, case: Case) -> None:
    copying = server(flags=FLAGS, env={"SGLANG_DFLASH_COPY": "random"})
    assert not compare(copying, drawn_off, case)
    assert sum(n_blocks for n_blocks, _ in served.fetch(copying.url)["copies"])


@pytest.mark.parametrize("case", [case for case in SAMPLED if case.name in ANY_WIDTH], ids=str)
def test_the_law_holds_with_a_dflash_2_draft(pool: Any, drawn_off: Callable, case: Case) -> None:
    second = pool.get(target="hybrid", pair=SECOND["hybrid"], flags=VARIANTS["hybrid-dflash2"].flags)
    assert not compare(second, drawn_off, case)


@pytest.mark.parametrize("rule", ["draw_twice", "argmax_inside", "above_threshold"])
def test_a_wrong_acceptance_is_caught(server: Callable, drawn_off: Callable, rule: str) -> None:
    """The negative control: the same comparison, the same number of draws, a server that accepts wrongly."""
    spoilt = server(flags=FLAGS, env=parameters.path_with(SPOILER) | {"WRONG_ACCEPTANCE": rule})
    assert f"acceptance spoilt: {rule}" in spoilt.log_text()
    assert compare(spoilt, drawn_off, PLAIN), f"{rule} passed for exact: the law test would miss it too"
    # And it is subtle: greedy answers are what they should be.
    off = server("off")
    prompt = parameters.begun(PLAIN)
    greedy = [s.generate(prompt, max_new_tokens=parameters.MAX_NEW_TOKENS).token_ids for s in (off, spoilt)]
    assert greedy[0] == greedy[1]
