"""Counter of the elements that ranks exchange in each collective operation, eager or in replayed graphs.

A dispatch mode counts eager operations. It also counts operations in graphs, because an emulated replay runs them again
(`graph.py`). The counter works without the emulation too.
"""

from __future__ import annotations

import functools
import json
import re
from collections import Counter
from collections.abc import Callable
from typing import Any

import torch
from torch.utils import _pytree as pytree
from torch.utils._python_dispatch import TorchDispatchMode

COLLECTIVES = ("c10d::", "_c10d_functional::")
STEP_LINE = "a step exchanged "  # start of a step's line in the log


class CollectiveCounter(TorchDispatchMode):
    """Dispatch mode that counts the elements of this rank's collective operations, by name.

    A call counts as many elements as its largest tensor has. For a gather this is the gathered tensor.
    """

    def __init__(self) -> None:
        super().__init__()
        self.elements = Counter[str]()

    def __torch_dispatch__(self, func: Any, types: Any, args: tuple = (), kwargs: dict | None = None) -> Any:
        name = func._schema.name
        if name.startswith(COLLECTIVES):
            leaves = pytree.tree_leaves((args, kwargs))
            sizes = [leaf.numel() for leaf in leaves if isinstance(leaf, torch.Tensor)]
            self.elements[name.partition("::")[2]] += max(sizes, default=0)
        return func(*args, **(kwargs or {}))


def report_steps(decode: Callable[..., Any]) -> Callable[..., Any]:
    """Wrap the worker's `decode` so that each rank prints a line per step, which `steps_in` parses."""

    @functools.wraps(decode)
    def counted(self: Any, batch: Any, *args: Any, **kwargs: Any) -> Any:
        with CollectiveCounter() as exchange:
            result = decode(self, batch, *args, **kwargs)
        step = {"rows": len(batch.reqs) * result.speculative_num_draft_tokens} | exchange.elements
        print(STEP_LINE + json.dumps(step), flush=True)
        return result

    return counted


def steps_in(log: str) -> list[dict[str, int]]:
    """Parse a log. Returns a dict per step and rank: number of verified tokens (`rows`), and elements by operation."""
    # Ranks print at the same time, so one line may have the texts of two ranks.
    return [json.loads(found) for found in re.findall(STEP_LINE + r"(\{.*?\})", log)]
