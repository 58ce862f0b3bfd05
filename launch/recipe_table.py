"""The table of `recipes/README.md`: `python -m launch.recipe_table`. Computed from the recipes, not measured.

A recipe is a shell script that ends in one launch command. Here a stand-in for `python3` is put before it, which prints
what it was given; so the table, and the tests of the recipes, read what a person would run.
"""

import os
import subprocess
import tempfile
from pathlib import Path
from typing import NamedTuple

from launch.capacity import CARDS
from sglang_dflash.capacity import geometry
from sglang_dflash.capacity import known_models as models
from sglang_dflash.capacity.division import Capacity, RadixStates, Serving, capacity, default_mem_fraction
from sglang_dflash.capacity.report import CONTEXT
from sglang_dflash.flags import Worker

FOLDER = Path(__file__).parent / "recipes"
RECIPES = tuple(path for path in sorted(FOLDER.glob("*.sh")) if path.name != "gpu.sh")
GPUS = {"h200": CARDS["H200 141 GB"], "b200": CARDS["B200 192 GB"]}  # GiB
PRINT_ARGUMENTS = """#!/bin/sh
printf '%s\\n' "$SGLANG_DFLASH_WORKER" "$@"
"""


class Refused(RuntimeError):
    """A recipe that starts nothing, and what it says."""


class Launch(NamedTuple):
    """What a recipe runs: `flags` maps names to values, the last one given; a switch has an empty one."""

    worker: str
    argv: list[str]

    @property
    def flags(self) -> dict[str, str]:
        words = self.argv[2:]  # -m sglang.launch_server
        values = [*words[1:], "--"]
        return {w: "" if v.startswith("--") else v for w, v in zip(words, values, strict=True) if w.startswith("--")}


def launch(recipe: Path, gpu: str, *further: str, env: dict[str, str] | None = None) -> Launch:
    """Run a recipe up to its launch command.

    Raises:
        Refused: it ends before.
    """
    with tempfile.TemporaryDirectory() as folder:
        python = Path(folder) / "python3"
        python.write_text(PRINT_ARGUMENTS)
        python.chmod(0o755)
        path = {"PATH": f"{folder}{os.pathsep}{os.environ['PATH']}"}
        ended = subprocess.run(
            ["bash", recipe, gpu, *further], env=path | (env or {}), capture_output=True, text=True, check=False
        )
    if ended.returncode:
        raise Refused(ended.stderr.strip())
    worker, *argv = ended.stdout.splitlines()
    return Launch(worker, argv)


def fits(started: Launch, gpu: str) -> Capacity | None:
    """What each card then holds, requests of 8,192 tokens; None for a model whose sizes are not known here."""
    flags = started.flags
    if flags["--model-path"] not in models.TARGETS:
        return None
    target = geometry.read_target(flags["--model-path"])
    draft = geometry.read_draft(flags["--speculative-draft-model-path"])
    tp_size, radix = int(flags.get("--tp-size", 1)), flags.get("--mamba-radix-cache-strategy", "extra_buffer")
    fraction = flags.get("--mem-fraction-static")
    serving = Serving(
        mem_fraction=float(fraction)
        if fraction
        else default_mem_fraction(GPUS[gpu], tp_size=tp_size, image_width=target.image_width),
        block_size=int(flags["--speculative-num-draft-tokens"]),
        context=CONTEXT,
        tp_size=tp_size,
        radix=RadixStates[radix.upper()],
    )
    return capacity(target, draft, serving, GPUS[gpu], Worker(started.worker))


# -- the table -----------------------------------------------------------------------------------------------------

# The architecture named in each target's config.json.
ARCHITECTURES = {
    "gemma-4-26b-a4b-it": "Gemma4ForConditionalGeneration",
    "gemma-4-31b-it": "Gemma4ForConditionalGeneration",
    "gpt-oss-120b": "GptOssForCausalLM",
    "gpt-oss-20b": "GptOssForCausalLM",
    "kimi-k2.5": "KimiK25ForConditionalGeneration",
    "llama-3.1-8b-instruct": "LlamaForCausalLM",
    "minimax-m2.5": "MiniMaxM2ForCausalLM",
    "qwen3-4b": "Qwen3ForCausalLM",
    "qwen3-8b": "Qwen3ForCausalLM",
    "qwen3-coder-30b-a3b": "Qwen3MoeForCausalLM",
    "qwen3-coder-next": "Qwen3NextForCausalLM",
    "qwen3.5-122b-a10b": "Qwen3_5MoeForConditionalGeneration",
    "qwen3.5-27b": "Qwen3_5ForConditionalGeneration",
    "qwen3.5-35b-a3b": "Qwen3_5MoeForConditionalGeneration",
    "qwen3.5-4b": "Qwen3_5ForConditionalGeneration",
    "qwen3.5-9b": "Qwen3_5ForConditionalGeneration",
    "qwen3.6-27b": "Qwen3_5ForConditionalGeneration",
    "qwen3.6-35b-a3b": "Qwen3_5MoeForConditionalGeneration",
}
# Which tiny checkpoint of tests/server/lib/families.py stands for one that has none of its own name.
TEXT_MODELS = {"KimiK25ForConditionalGeneration": "DeepseekV3ForCausalLM"}
# Architectures that SGLang serves on GPUs only, and why: they are rehearsed.
REHEARSED = {
    "DeepseekV3ForCausalLM": "latent attention",
    "Gemma4ForConditionalGeneration": "SGLang takes it with attention kernels of GPUs only",
    "GptOssForCausalLM": "SGLang takes it with attention kernels of GPUs only",
    "MiniMaxM2ForCausalLM": "norms of q and k in CUDA only",
    "Qwen3NextForCausalLM": "SGLang asks CUDA for the device when it builds the layers",
}


def rows() -> list[str]:
    """The table in Markdown, line by line."""
    head = ["| recipe | draft | H200 | B200 | architecture | proved here |", "|---|---|---|---|---|---|"]
    return head + [row(recipe) for recipe in RECIPES]


def row(recipe: Path) -> str:
    architecture = ARCHITECTURES[recipe.stem]
    launches = {gpu: launch(recipe, gpu) for gpu in GPUS}
    draft = launches["h200"].flags["--speculative-draft-model-path"]
    cells = [cell(started, gpu) for gpu, started in launches.items()]
    return (
        f"| [{recipe.stem}]({recipe.name}) | {draft} | {' | '.join(cells)} | {architecture} | {proof(architecture)} |"
    )


def proof(architecture: str) -> str:
    served = TEXT_MODELS.get(architecture, architecture)
    level = "R" if served in REHEARSED else "C"
    return level if served == architecture else f"{level}: its text model, {served}"


def cell(started: Launch, gpu: str) -> str:
    n_gpus, found = int(started.flags.get("--tp-size", 1)), fits(started, gpu)
    return f"{n_gpus}: {found.requests if found else '?'}"


if __name__ == "__main__":
    print("\n".join(rows()))
