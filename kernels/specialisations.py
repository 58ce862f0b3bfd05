"""Specialisations of each kernel. The first launch of each waits 0.3 to 1 s for the compiler.

A server's dtypes, layouts and model shapes never change. Quantities that change from launch to launch are arguments
here. Triton is kept from specialising on values by chance (a size of 1 or a multiple of 16, an aligned pointer).
`of_server` lists all specialisations that a server can meet, so that start-up can launch them all.
`tests/tools/compile_kernels.py` compares this file with Triton's compilations.
"""

from collections.abc import Hashable, Iterable
from typing import NamedTuple

import triton
from sglang_dflash_kernels.gdn_verify import SMALLEST, geometry

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
    """Sizes of a server that select specialisations."""

    widths: tuple[int, ...]  # verify widths
    block_size: int  # tokens per drafted block
    batch_sizes: Iterable[int]  # numbers of requests of a step, padding included
    n_value_heads: int  # per recurrent layer and rank; 0: no state is folded
    value_width: int
    tracks: bool  # steps pass a track index, because recurrent states are saved at multiples of the track interval
    conv_taps: int = 0  # taps of the draft's convolution; 0: none
    selector_top_k: int = 0  # candidates per slot of the draft's selector; 0: none
    copies: bool = False  # n-gram copies continue blocks


def plan_block(n_tokens: int) -> Hashable:
    """Return the specialisation: one per power of two that the block fits into."""
    return triton.next_power_of_2(n_tokens)


def accept(n_tokens: int) -> Hashable:
    """Return the specialisation: one per power of two that the block fits into."""
    return triton.next_power_of_2(n_tokens)


def penalise() -> Hashable:
    """Return the only specialisation: it is independent of the width and of the number of stop tokens."""
    return "any"


def append_context(*, n_kept: bool) -> Hashable:
    """Return the specialisation: for the kept rows of a step's blocks, or for rows all kept (prompts, late rows)."""
    return "accepted" if n_kept else "all"


def gdn_verify(n_requests: int, n_tokens: int, n_value_heads: int, value_width: int) -> Hashable:
    """Return the specialisation: one per size of a block and per geometry of the launch."""
    block_v = max(SMALLEST, triton.next_power_of_2(value_width))
    return max(SMALLEST, triton.next_power_of_2(n_tokens)), *geometry(n_requests * n_value_heads, block_v)


def gdn_fold(*, tracked: bool) -> Hashable:
    """Return the specialisation: with tracked states, or without."""
    return "tracked" if tracked else "untracked"


def block_conv(n_taps: int) -> Hashable:
    """Return the specialisation: one per number of taps, for any block size and side of the sublayer."""
    return n_taps


def select_path(top_k: int) -> Hashable:
    """Return the specialisation: one per number of candidates, for any block size."""
    return top_k


def copy_draft(n_tokens: int) -> Hashable:
    """Return the specialisation: one per power of two that the block fits into."""
    return triton.next_power_of_2(n_tokens)


def weigh_copies(n_tokens: int) -> Hashable:
    """Return the specialisation: one per power of two that the block fits into."""
    return triton.next_power_of_2(n_tokens)


def of_server(server: Server) -> dict[str, set[Hashable]]:
    """Return all specialisations that a server can meet, by kernel. Blocks of one token use no `gdn_verify`."""
    drafted = [width for width in server.widths if width > 1]
    specialisations = {
        "plan_block": {plan_block(n_tokens) for n_tokens in (*server.widths, server.block_size)},
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
