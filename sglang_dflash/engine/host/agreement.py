"""Comparison of the ranks of one model, before the draft loads: variables, resolved choices and draft must be equal.

Ranks with other widths, copies or workers exchange tensors of other sizes, or at other times. With gloo such an
exchange fails, or allocates memory of a random size. NCCL hangs or returns wrong values. The ranks compare in a process
group of their own. In a shared group, another exchange of a rank without this plugin could be taken for its facts.
"""

import os
from collections.abc import Mapping, Sequence
from datetime import timedelta
from typing import Any

import torch
from sglang.srt.distributed.parallel_state import get_tp_group
from torch.distributed import DistNetworkError, DistStoreError

from sglang_dflash import __version__, flags
from sglang_dflash.engine.draft import files
from sglang_dflash.engine.host.arguments import Arguments, arguments_of
from sglang_dflash.errors import HostMismatch
from sglang_dflash.flags import Worker

Fact = tuple[str, str, str]  # name, value on this rank, cure if another rank has another value
WAIT_S = 120.0  # longest wait; other ranks come soon, because all have just loaded the target


def require_equal(server_args: Any, choices: Mapping[str, object]) -> None:
    """Compare this rank with all ranks of its model, also with those of other groups of data-parallel attention.

    All ranks must call this function, after SGLang has built the target. With one rank it does nothing.

    Args:
        choices: resolved settings of this rank, by name. If SGLang's own worker is selected, they are not compared.
    Raises:
        ValueError: a fact differs. All ranks raise the same sentence.
        HostMismatch: not all ranks have called this function within `WAIT_S`.
    """
    arguments = arguments_of(server_args)
    if arguments.tp_size > 1:
        sentence = difference(gathered(facts(arguments, choices)))
        if sentence:
            raise ValueError(sentence)


def facts(arguments: Arguments, choices: Mapping[str, object]) -> list[Fact]:
    """Return the facts of this rank. With SGLang's own worker the only fact is the worker."""
    alike = "set it alike on all nodes"
    if flags.current().worker is Worker.STOCK:
        return [("SGLANG_DFLASH_WORKER", Worker.STOCK.value, alike)]
    return [
        ("sglang-dflash", __version__, "install the same version on all nodes"),
        *((name, value, alike) for name, value in flags.shared(os.environ).items()),
        *((name, str(value), "give all nodes the same models and flags") for name, value in choices.items()),
        (*files.identity(arguments.require_draft_path(), arguments.draft_revision), "give all nodes the same draft"),
    ]


def difference(ranks: Sequence[Sequence[Fact]]) -> str:
    """Return a sentence about the first difference between ranks; "" if there is none.

    A fact that a rank does not have is not compared with that rank.

    Args:
        ranks: the facts of each rank.
    """
    first = dict[str, tuple[str, int]]()
    for rank, own in enumerate(ranks):
        for name, value, cure in own:
            other, of_rank = first.setdefault(name, (value, rank))
            if value != other:
                return f"{name} is {other} on rank {of_rank} and {value} on rank {rank}; {cure}"
    return ""


def gathered(own: Sequence[Fact]) -> list[Sequence[Fact]]:
    """Return the facts of every rank of the model, by rank, from an exchange over the CPU.

    Raises:
        HostMismatch: see `require_equal`.
    """
    ranks = get_tp_group().ranks
    try:
        group = torch.distributed.new_group(
            ranks, timedelta(seconds=WAIT_S), backend="gloo", use_local_synchronization=True
        )
    except (DistStoreError, DistNetworkError) as error:
        raise HostMismatch(
            f"not all {len(ranks)} ranks of the model compared their settings within {WAIT_S:.0f} s; install "
            f"sglang-dflash {__version__} on all nodes, set SGLANG_PLUGINS alike on all, and see the other nodes' logs"
        ) from error
    found: list[Any] = [None] * len(ranks)
    torch.distributed.all_gather_object(found, own, group=group)  # type: ignore[arg-type]
    torch.distributed.destroy_process_group(group)
    return found
