"""`sglang-dflash bench --require-equal` that also shows speeds if answers differ by more than near ties.

    BEYOND_TIES=FILE python -m env.gpu.bench_ties [options of bench]

Each such difference is a line of JSON in FILE. Without this module such a difference ends a benchmark without a result.
"""

import json
import os
import sys
from collections.abc import Sequence

from sglang_dflash.tools.bench import schedule
from sglang_dflash.tools.bench.__main__ import main
from sglang_dflash.tools.bench.compare import Likeliest, Unequal, is_near_tie


def count_ties(unequal: Sequence[Unequal], first: str, likeliest: Likeliest, gap: float) -> int:
    """Return the number of near ties, and write the other differences. Replaces `compare.require_equal`."""
    beyond = [one for one in unequal if not is_near_tie(one, likeliest, gap)]
    with open(os.environ["BEYOND_TIES"], "a") as file:
        file.writelines(json.dumps([one.where, str(one.difference)]) + "\n" for one in beyond)
    return len(unequal) - len(beyond)


if __name__ == "__main__":
    schedule.require_equal = count_ties
    sys.exit(main(sys.argv[1:]))
