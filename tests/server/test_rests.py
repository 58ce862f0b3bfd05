"""A step that verifies one token runs the kernels of decoding without speculation, on every attention backend.

The emulation logs the kernels of each captured graph. The last graph that a server captures is that of one request at
its narrowest width.
"""

import json
import re
from collections import Counter
from typing import Any

import pytest

from sglang_dflash.pairs.tiny.pairs import Arm
from tests.server.lib.rehearsals import GRAPHS, PAGES, PAGES_64, SM90, SM100, attention

ROWS = {
    "triton": ("triton", (), SM90, "hybrid"),
    "fa3": ("fa3", (), SM90, "hybrid"),
    "fa4": ("fa4", PAGES_64, SM100, "hybrid"),
    "flashinfer": ("flashinfer", (), SM90, "hybrid"),
    "flashinfer, dense": ("flashinfer", (), SM90, "dense"),
    "trtllm_mha": ("trtllm_mha", PAGES, SM100, "hybrid"),
}
FEATURES = 5  # launches that return a token's features: copies of three captured layers, and their concatenation
TRACKING = "track_mamba_states_all_layers"  # outside the graph at width 1, see `InPlaceState`


def last_graph(log: str) -> tuple[int, Counter[str]]:
    """Return the number of launches, and the kernels, of the last graph in a server's log."""
    return int(re.findall(r"captured (\d+) launches", log)[-1]), Counter(
        json.loads(re.findall(r"kernels: (\{.*\})", log)[-1])
    )


@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=() if name == "triton" else pytest.mark.full) for name in ROWS]
)
def test_a_rest_has_the_kernels_of_a_decode_step(name: str, pool: Any) -> None:
    backend, flags, env, target = ROWS[name]
    graphs = {}
    for arm in (Arm.OFF, Arm.PLUGIN):
        widths = (("SGLANG_DFLASH_WIDTHS", "1,16"),) if arm is Arm.PLUGIN else ()
        asked = *attention(backend), *flags, *GRAPHS, "--log-level", "debug"
        server = pool.get(arm, target=target, flags=asked, env=dict((*env, *widths)))
        graphs[arm] = last_graph(server.log_text())
        pool.drop(server)
    (n_decode, decode), (n_rest, rest) = graphs[Arm.OFF], graphs[Arm.PLUGIN]
    assert rest == decode - Counter({TRACKING: 1})
    assert n_rest <= n_decode + FEATURES
