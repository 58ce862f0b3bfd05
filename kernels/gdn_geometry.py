"""Shape of the programs of `gdn_verify`: tile of a head's state, warps and registers."""

from typing import NamedTuple

SMALLEST = 16  # smallest side of a tile in `tl.dot`
# With at least this number of heads in a launch, half a head per program occupies all multiprocessors of a GPU. An A100
# has 108 multiprocessors, an H200 132, a B200 148.
MANY_HEADS = 128


class Geometry(NamedTuple):
    """Shape of a program."""

    rows: int  # of a head's state
    columns: int  # of the state in one product
    warps: int
    max_registers: int | None = None  # per thread; None: the compiler decides


def geometry(n_heads: int, block_n: int, block_v: int) -> Geometry:
    """Return the shape of the programs of a launch. Smaller programs finish sooner, but more of them run.

    With fewer heads than multiprocessors, a program's latency dominates, so a program computes a quarter of a head.
    With more heads, it matters how many programs run at once. Six programs of half a head fit on a multiprocessor, if a
    thread takes at most 168 registers. So an H200 runs 396 heads at once. Blocks of more than 16 tokens would take more
    registers. For these, one program computes a head.

    Args:
        n_heads: number of value heads of all requests of the launch.
        block_n: number of tokens per block, padded to a power of two.
        block_v: number of rows of a head's state, padded to a power of two.
    """
    is_short = block_n == SMALLEST
    if n_heads < MANY_HEADS:
        return Geometry(rows=min(32, block_v), columns=64 if is_short else 32, warps=4)
    if is_short:
        return Geometry(rows=min(64, block_v), columns=16, warps=2, max_registers=168)
    return Geometry(rows=min(128, block_v), columns=32, warps=8)
