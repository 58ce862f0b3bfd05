"""Specialisations of each kernel: the variants that Triton compiles, each in 0.3 to 1 s at its first launch.

A server's dtypes, layouts and model shapes never change. The functions here take the quantities that change from launch
to launch, and return a key. Launches with equal keys use the same compiled variant. By default Triton also specialises
on a size of 1, on multiples of 16 and on aligned pointers. The kernels switch this off for arguments that change
(`do_not_specialize`). `of_server` lists all keys that can occur on a server, so that start-up can compile them all.
`tests/tools/compile_kernels.py` compares this file with Triton's compilations.
"""

from collections.abc import Hashable, Iterable
from typing import NamedTuple

import triton
from sglang_dflash_kernels.gdn_geometry import SMALLEST, geometry

KERNELS = (
    "plan_block",
    "accept",
    "penalise",
    "append_context",
    "gdn_verify",
    "gdn_fold",
    "block_conv",
    "select_path",
    "copy_draft",
    "weigh_copies",
)


class Server(NamedTuple):
    """Sizes and features of a server that determine its specialisations."""

    widths: tuple[int, ...]  # verify widths
    block_size: int  # tokens per drafted block
    batch_sizes: Iterable[int]  # possible numbers of requests in a step, padding requests included
    n_value_heads: int  # number of value heads per recurrent layer and rank; 0: gdn_verify and gdn_fold are not used
    value_width: int
    tracks: bool  # steps pass track slots, because recurrent states are saved at multiples of SGLang's track interval
    conv_taps: int = 0  # number of taps of the draft's convolutions; 0: the draft has no convolution
    selector_top_k: int = 0  # candidates per slot of the draft's selector; 0: the draft has no selector
    copies: bool = False  # the server makes n-gram copies


def plan_block(n_tokens: int) -> Hashable:
    """Return the key: the least power of two that is at least the number of tokens per block."""
    return triton.next_power_of_2(n_tokens)


def accept(n_tokens: int) -> Hashable:
    """Return the key: the least power of two that is at least the number of tokens per block."""
    return triton.next_power_of_2(n_tokens)


def penalise() -> Hashable:
    """Return the only key: the compiled variant serves all widths and all numbers of stop tokens."""
    return "any"


def append_context(*, n_kept: bool) -> Hashable:
    """Return the key. `n_kept`: the launch passes `n_kept_B`. Decode steps pass it, prefills do not."""
    return "accepted" if n_kept else "all"


def gdn_verify(n_requests: int, n_tokens: int, n_value_heads: int, value_width: int) -> Hashable:
    """Return the key: the padded number of tokens per block, then the shape of a program (`geometry`)."""
    block_n, block_v = (max(SMALLEST, triton.next_power_of_2(size)) for size in (n_tokens, value_width))
    return block_n, *geometry(n_requests * n_value_heads, block_n, block_v)


def gdn_fold(*, tracked: bool) -> Hashable:
    """Return the key. `tracked`: the launch has track slots, as described in `gdn_fold.Kept`."""
    return "tracked" if tracked else "untracked"


def block_conv(n_taps: int) -> Hashable:
    """Return the key: the number of taps. One variant serves all block sizes and both convolutions of a sublayer."""
    return n_taps


def select_path(top_k: int) -> Hashable:
    """Return the key: the number of candidates. One variant serves all block sizes."""
    return top_k


def copy_draft(n_tokens: int) -> Hashable:
    """Return the key: the least power of two that is at least the number of tokens per block."""
    return triton.next_power_of_2(n_tokens)


def weigh_copies(n_tokens: int) -> Hashable:
    """Return the key: the least power of two that is at least the number of tokens per block."""
    return triton.next_power_of_2(n_tokens)


def of_server(server: Server) -> dict[str, set[Hashable]]:
    """Return all keys that can occur on a server, by kernel. Blocks of one token do not use the GDN kernels."""
    drafted = [width for width in server.widths if width > 1]
    planned = {n if n == 1 else max(n, server.block_size) for n in (*server.widths, server.block_size)}
    specialisations = {
        "plan_block": set(map(plan_block, planned)),  # one launch plans the drafted block and the verified tokens
        "accept": {accept(n_tokens) for n_tokens in server.widths},
        "penalise": {penalise()},
        "append_context": {append_context(n_kept=n_kept) for n_kept in (True, False) if drafted or not n_kept},
    }
    if server.n_value_heads and drafted:
        heads = server.n_value_heads, server.value_width
        specialisations["gdn_verify"] = {gdn_verify(B, N, *heads) for B in server.batch_sizes for N in drafted}
        specialisations["gdn_fold"] = {gdn_fold(tracked=server.tracks)}
    if server.conv_taps:
        specialisations["block_conv"] = {block_conv(server.conv_taps)}
    if server.selector_top_k:
        specialisations["select_path"] = {select_path(server.selector_top_k)}
    if server.copies:
        specialisations["copy_draft"] = {copy_draft(n_tokens) for n_tokens in server.widths}
        specialisations["weigh_copies"] = {weigh_copies(n_tokens) for n_tokens in drafted}
    return specialisations
