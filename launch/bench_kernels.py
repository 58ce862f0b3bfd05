"""Time each kernel at the sizes of a 27B target and its draft, beside the bytes it cannot avoid moving.

    python launch/bench_kernels.py [--rounds 200]

Every case is first compared with its definition on the same inputs; nothing is timed unless all agree. How:
`kernels/cases/times.py`. The row `launch` times a one-cell fill: what any launch costs here. The byte
floor is a case's bytes over the copy bandwidth measured in the same run.

Needs a CUDA device. The last line of stdout is one JSON document; the table goes before it.
"""

import argparse
import json
from collections.abc import Sequence
from typing import Any

import torch
import triton
from sglang_dflash_kernels.cases.make import make_cases
from sglang_dflash_kernels.cases.sizes import QWEN_27B
from sglang_dflash_kernels.cases.times import timed


def print_table(results: Sequence[dict[str, Any]]) -> None:
    print(f"{'op':<16}{'shape':<24}{'us':>9}{'p10':>9}{'p90':>9}{'GB/s':>9}{'of floor':>10}")
    for row in results:
        times = "".join(f"{row[name]:>9.2f}" for name in ("us", "p10_us", "p90_us"))
        print(f"{row['op']:<16}{row['shape']:<24}{times}{row['gb_per_s']:>9.0f}{row['share_of_floor']:>10.1%}")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rounds", type=int, default=200)
    n_rounds = parser.parse_args().rounds
    if not torch.cuda.is_available():
        raise SystemExit("bench_kernels found no CUDA device; run it on a machine with one")
    cases = make_cases(QWEN_27B, "cuda")
    for case in cases:
        case.check()
    bytes_per_us, results = timed(cases, n_rounds)
    print_table(results)
    document = {
        "device": torch.cuda.get_device_name(),
        "torch": torch.__version__,
        "triton": triton.__version__,
        "n_rounds": n_rounds,
        "l2": "flushed before every launch",
        "copy_gb_per_s": bytes_per_us / 1000,
        "results": results,
    }
    print(json.dumps(document))


if __name__ == "__main__":
    main()
