"""Print the table of `docs/recipes.md`, computed from the recipes: `python -m tests.tools.tables.recipe_table`."""

from collections.abc import Mapping

from sglang_dflash.flags import Worker
from sglang_dflash.tools.capacity import geometry
from sglang_dflash.tools.capacity import known_models as models
from sglang_dflash.tools.capacity.division import Capacity, RadixStates, Serving, capacity
from sglang_dflash.tools.capacity.fraction import default_mem_fraction
from sglang_dflash.tools.capacity.options import CONTEXT
from sglang_dflash.tools.recipe import CARDS as CARDS_BY_NAME
from sglang_dflash.tools.recipe import GPUS, RECIPES, Recipe, fitting, flags_on
from tests.tools.tables.capacity import CARDS

CARD_GIB = {"h200": CARDS["H200 141 GB"], "b200": CARDS["B200 192 GB"]}


def flags_of(recipe: Recipe, gpu: str) -> dict[str, str]:
    """Return flag values by name; a switch has an empty value."""
    return {flag.name: flag.value for flag in recipe.flags[gpu]}


def fits(flags: Mapping[str, str], gpu: str) -> Capacity | None:
    """Return this plugin's capacity for requests of 8,192 tokens; None if `known_models` lacks the target or draft."""
    if flags["--model-path"] not in models.TARGETS or flags["--speculative-draft-model-path"] not in models.DRAFTS:
        return None
    target = geometry.read_target(flags["--model-path"])
    draft = geometry.read_draft(flags["--speculative-draft-model-path"])
    tp_size, radix = int(flags.get("--tp-size", 1)), flags.get("--mamba-radix-cache-strategy", "extra_buffer")
    fraction = flags.get("--mem-fraction-static")
    serving = Serving(
        mem_fraction=float(fraction)
        if fraction
        else default_mem_fraction(CARD_GIB[gpu], tp_size=tp_size, image_width=target.image_width),
        block_size=int(flags["--speculative-num-draft-tokens"]),
        context=CONTEXT,
        tp_size=tp_size,
        radix=RadixStates[radix.upper()],
    )
    return capacity(target, draft, serving, CARD_GIB[gpu], Worker.PLUGIN)


# -- the table -----------------------------------------------------------------------------------------------------

# Architecture without a tiny checkpoint -> architecture of its text model, which tests/server/lib/families.py has.
TEXT_MODELS = {"KimiK25ForConditionalGeneration": "DeepseekV3ForCausalLM"}
# Architectures that are tested under GPU emulation, and why SGLang serves them on GPUs only.
REHEARSED = {
    "DeepseekV3ForCausalLM": "latent attention",
    "Gemma4ForConditionalGeneration": "SGLang requires attention kernels of GPUs",
    "GptOssForCausalLM": "SGLang requires attention kernels of GPUs",
    "MiniMaxM2ForCausalLM": "norms of q and k in CUDA only",
    "Qwen3NextForCausalLM": "SGLang reads the CUDA device when it builds the layers",
}
# Architectures of which no tiny target was run. SGLang's classes have the methods that a draft needs.
NOT_RUN = {"LagunaForCausalLM", "MuseGlimmerForConditionalGeneration", "NemotronHForCausalLM"}


def rows() -> list[str]:
    """Return the lines of the Markdown table."""
    head = ["| recipe | draft | H200 | B200 | evidence |", "|---|---|---|---|---|"]
    return head + [row(recipe) for recipe in RECIPES.values()]


CARD_RECIPES = ("qwen3-4b", "qwen3-8b", "qwen3.6-27b", "qwen3.6-27b-awq", "qwen3.6-27b-fp8", "qwen3.6-27b-nvfp4")


def card_rows() -> list[str]:
    """Return the lines of the table of cards whose flags are computed."""
    head = [f"| | {' | '.join(CARD_RECIPES)} |", "|---|" + "---|" * len(CARD_RECIPES)]
    computed = [gpu for gpu, card in CARDS_BY_NAME.items() if card.like not in GPUS]
    return head + [
        f"| {gpu} | {' | '.join(card_cell(RECIPES[name], gpu) for name in CARD_RECIPES)} |" for gpu in computed
    ]


def card_cell(recipe: Recipe, gpu: str) -> str:
    try:
        flags = flags_on(recipe, gpu)
    except ValueError:
        return "-"
    n_cards = next((flag.value for flag in flags if flag.name == "--tp-size"), "1")
    is_small = any(flag.name == "--chunked-prefill-size" for flag in flags)
    return f"{n_cards}: {fitting(flags, CARDS_BY_NAME[gpu].gib)[0]}{'*' if is_small else ''}"


def row(recipe: Recipe) -> str:
    cells = " | ".join(cell(flags_of(recipe, gpu), gpu) for gpu in GPUS)
    return f"| {recipe.name} | {recipe.draft} | {cells} | {proof(recipe.architecture)} |"


def proof(architecture: str) -> str:
    if architecture in NOT_RUN:
        return "target not run"
    served = TEXT_MODELS.get(architecture, architecture)
    level = "R" if served in REHEARSED else "C"
    return level if served == architecture else f"{level}: its text model, {served}"


def cell(flags: Mapping[str, str], gpu: str) -> str:
    found = fits(flags, gpu)
    return f"{flags.get('--tp-size', 1)}: {found.requests if found else '?'}"


if __name__ == "__main__":
    print("\n".join([*rows(), "", *card_rows()]))
