"""Above temperature 0 the first tokens have the same sampling distribution as without speculation.

`prove/distribution.py` has the comparison and its bound. If an outcome's probability shifts by 0.15 from 0.5, or by
0.09 from 0.1, `N` draws per server show the shift with probability 5/6. Wrong acceptance rules shift probabilities
more, as `test_wrong_acceptance_is_found` shows.
"""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from sglang_dflash.pairs.servers.server import Server
from sglang_dflash.tools.check import served
from sglang_dflash.tools.prove import distribution
from sglang_dflash.tools.prove.distribution import Draw
from tests.server.conftest import SECOND
from tests.server.lib.variants import VARIANTS
from tests.tools import parameters
from tests.tools.parameters import SAMPLED, Case

FLAGS = VARIANTS["hybrid"].flags
N = 800  # draws per case and server; about 20 s for both servers
PLAIN = next(case for case in SAMPLED if case.name == "T 1")
ANY_WIDTH = ("T 1", "top_p 0.8", "penalties, top_k and min_p", "regex at T 1.5")
FAULT = Path(__file__).parent / "wrong_acceptance"

pytestmark = pytest.mark.full


@pytest.fixture(scope="module")
def drawn_off(server: Callable) -> Callable[[Case], list[Draw]]:
    """Return `drawn_off(case)`, which returns draws without speculation, cached by request."""
    drawn: dict[str, list[Draw]] = {}

    def draws(case: Case) -> list[Draw]:
        off = server("off")
        # Cases made by `parameters.bare` often send equal requests, which share their draws.
        asked = repr((parameters.begun(case), case.sampling, case.fields))
        if asked not in drawn:
            drawn[asked] = parameters.draws(off, case, N)
        return drawn[asked]

    return draws


def compare(server: Server, drawn_off: Callable, case: Case) -> list[distribution.Cell]:
    return distribution.violations(drawn_off(case), parameters.draws(server, case, N))


@pytest.mark.parametrize("case", SAMPLED, ids=str)
def test_the_sampling_distribution_holds(ours: Server, drawn_off: Callable, case: Case) -> None:
    apart = compare(ours, drawn_off, case)
    assert not apart, f"{case}: {[str(cell) for cell in apart]}"
    assert len(set(drawn_off(case))) > 3, f"{case}: hardly any randomness; the comparison cannot fail"


@pytest.mark.parametrize("case", [case for case in SAMPLED if case.row != "temperature > 0"], ids=str)
def test_the_parameter_changes_the_distribution(drawn_off: Callable, case: Case) -> None:
    """Without the parameter the distribution must be another one. Else a server that ignores it would pass."""
    assert distribution.violations(drawn_off(parameters.bare(case)), drawn_off(case))


@pytest.mark.parametrize("case", [case for case in SAMPLED if case.name in ANY_WIDTH], ids=str)
def test_the_sampling_distribution_holds_at_any_width(server: Callable, drawn_off: Callable, case: Case) -> None:
    """Every step verifies a random number of tokens, sometimes one."""
    variant = VARIANTS["hybrid-random-widths"]
    assert not compare(server(flags=variant.flags, env=dict(variant.env)), drawn_off, case)


@pytest.mark.parametrize("case", [case for case in SAMPLED if case.name in ANY_WIDTH], ids=str)
def test_the_sampling_distribution_holds_with_copies(server: Callable, drawn_off: Callable, case: Case) -> None:
    copying = server(flags=FLAGS, env={"SGLANG_DFLASH_COPY": "random"})
    assert not compare(copying, drawn_off, case)
    assert sum(n_blocks for n_blocks, _ in served.fetch(copying.url)["copies"])


@pytest.mark.parametrize("case", [case for case in SAMPLED if case.name in ANY_WIDTH], ids=str)
def test_the_sampling_distribution_holds_with_a_dflash_2_draft(pool: Any, drawn_off: Callable, case: Case) -> None:
    second = pool.get(target="hybrid", pair=SECOND["hybrid"], flags=VARIANTS["hybrid-dflash2"].flags)
    assert not compare(second, drawn_off, case)


@pytest.mark.parametrize("rule", ["draw_twice", "argmax_inside", "above_threshold"])
def test_wrong_acceptance_is_found(server: Callable, drawn_off: Callable, rule: str) -> None:
    wrong = server(flags=FLAGS, env=parameters.path_with(FAULT) | {"WRONG_ACCEPTANCE": rule})
    assert f"acceptance spoilt: {rule}" in wrong.log_text()
    assert compare(wrong, drawn_off, PLAIN), f"{rule} is not found: the tests above would miss it too"
    # With the fault, greedy answers still equal those without speculation.
    off = server("off")
    prompt = parameters.begun(PLAIN)
    greedy = [s.generate(prompt, max_new_tokens=parameters.MAX_NEW_TOKENS).token_ids for s in (off, wrong)]
    assert greedy[0] == greedy[1]
