"""Steps of one token compared with decoding without speculation, for a 27B target's shapes. `d.sh` runs this module.

A rest is a step of one token between drafting steps. It should cost what a step without speculation costs, also after
a long prompt. Writes $OUT/d.json after every result. Arms: `off` is no speculation, `width 1` this plugin's worker.
"""

from functools import partial
from pathlib import Path

from env.gpu import dry, servers27
from env.gpu.clock import Clock, Document
from env.gpu.servers27 import COMMON, DRY, GPU, OFF, WIDTH_1, Settings, sized
from env.gpu.steps import Measurement, begin

BLOCK = 8
BACKENDS = "fa3", "triton"
LOADS = (256, 1), (256, 8), (256, 64), (32768, 1), (32768, 8)
DRY_LOADS = (16, 1), (16, 2), (96, 2)
ESTIMATE_S, ESTIMATE_DRY_S = 150.0, 60.0  # of a backend
REST = GPU._replace(
    loads=LOADS,
    rounds=1,
    flags=(
        *COMMON, *sized(64, 280_000), "--sampling-backend", "pytorch", "--mem-fraction-static", "0.95",
        "--context-length", "34000", "--chunked-prefill-size", "8192", "--cuda-graph-bs-decode", "1", "8", "64",
        "--cuda-graph-backend-prefill", "disabled",
    ),
)  # fmt: skip
REST_DRY = DRY._replace(loads=DRY_LOADS, rounds=1)


def measure(settings: Settings, backend: str, clock: Clock, out: Document, work: Path) -> None:
    """Start both arms with an attention backend, measure them in turns, and stop them."""
    measurement = Measurement(settings._replace(backend=backend), clock, out, work)
    try:
        measurement.blocks_of(BLOCK, (OFF, WIDTH_1))
    finally:
        measurement.stop_all()


def main() -> int:
    servers27.end_on_first_sigterm()
    settings, small = (REST_DRY, True) if dry.is_dry() else (REST, False)
    clock, out, work = begin("d.sh", "steps of one token beside decoding without speculation", settings)
    for backend in BACKENDS:
        estimate_s = ESTIMATE_DRY_S if small else ESTIMATE_S
        out.part(backend, estimate_s, partial(measure, settings, backend, clock, out, work))
    out.finish()
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
