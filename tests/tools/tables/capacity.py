"""Compute the table of concurrent requests per model and GPU in docs/memory.md.

    python -m tests.tools.tables.capacity

Every launch has SGLang's default flags and a draft. The number of GPUs is the smallest of 1, 2, 4 and 8 on which this
plugin serves at least one request.
"""

from sglang_dflash.flags import Worker
from sglang_dflash.tools.capacity import geometry
from sglang_dflash.tools.capacity import known_models as models
from sglang_dflash.tools.capacity.division import Serving, capacity
from sglang_dflash.tools.capacity.fraction import default_mem_fraction
from sglang_dflash.tools.capacity.options import CONTEXT

# Memory in GiB, as the drivers report it.
CARDS = {"H100 80 GB": 79.6, "H200 141 GB": 140.4, "B200 192 GB": 179.0}
TARGETS = ("Qwen3.5-27B", "Qwen3.6-27B", "Qwen3.5-35B-A3B", "Qwen3.6-35B-A3B", "Qwen3.5-122B-A10B", "Qwen3-Coder-Next")


def cell(model: str, card_gib: float) -> str:
    """Return the cell "SGLang's requests → this plugin's requests", with the number of GPUs if it is above one."""
    target, draft = geometry.read_target(model), geometry.read_draft(models.draft_of(model))
    for tp_size in (1, 2, 4, 8):
        fraction = default_mem_fraction(card_gib, tp_size=tp_size, image_width=target.image_width)
        serving = Serving(mem_fraction=fraction, block_size=draft.block_size, context=CONTEXT, tp_size=tp_size)
        requests = {worker: capacity(target, draft, serving, card_gib, worker).requests for worker in Worker}
        if requests[Worker.PLUGIN]:
            cards = f" on {tp_size}" if tp_size > 1 else ""
            return f"{requests[Worker.STOCK]} → **{requests[Worker.PLUGIN]}**{cards}"
    return "-"


def rows() -> list[str]:
    """Return the lines of the Markdown table; targets with equal numbers share a row."""
    models_by_line: dict[str, list[str]] = {}
    for model in TARGETS:
        line = " | ".join(cell(model, gib) for gib in CARDS.values())
        models_by_line.setdefault(line, []).append(model)
    head = [f"| | {' | '.join(CARDS)} |", "|---|" + "---:|" * len(CARDS)]
    return head + [f"| {', '.join(names)} | {line} |" for line, names in models_by_line.items()]


if __name__ == "__main__":
    print("\n".join(rows()))
