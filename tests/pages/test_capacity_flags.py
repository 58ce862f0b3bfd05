"""Launch flags of recipes and pages in `check --gpu-memory`, which must accept every flag of a pasted command."""

import re

import pytest

from sglang_dflash.tools.capacity.options import OF_FRACTION, WITHOUT_EFFECT, arguments, uncounted
from sglang_dflash.tools.recipe import GPUS, RECIPES
from sglang_dflash.tools.recipe import arguments as launch_of
from tests.fixtures.guide import source_of_sglang
from tests.pages.test_docs import MODULES, for_sglang

ASKED = ["--gpu-memory", "80"]
LAUNCHES = [words[3:] for words in MODULES if for_sglang(words)] + [
    words[words.index("--") + 1 :]
    for words in MODULES
    if words[2] == "sglang_dflash.tools.bench" and "--" in words and "..." not in words
]
FIELDS = re.findall(r"^    (\w+): A\[", source_of_sglang("srt/arg_groups/fields"), re.MULTILINE)
FLAGS = [f"--{field.replace('_', '-')}" for field in FIELDS if not field.startswith("_")]
PARSERS = {"--reasoning-parser", "--tool-call-parser"}  # added by SGLang without a field


@pytest.mark.parametrize("gpu", GPUS)
@pytest.mark.parametrize("name", RECIPES)
def test_every_flag_of_a_recipe_is_counted(name: str, gpu: str) -> None:
    options = arguments().parse_args([*ASKED, *launch_of(RECIPES[name], gpu)[2:]])
    assert uncounted(options) == ([], [])


@pytest.mark.parametrize("words", LAUNCHES, ids=" ".join)
def test_launch_commands_of_the_pages_are_accepted(words: tuple[str, ...]) -> None:
    others, of_fraction = uncounted(arguments().parse_args([*ASKED, *words]))
    assert set(others) <= {"--disaggregation-mode", "--dp-size", "--enable-return-hidden-states"}
    prefill = ("--chunked-prefill-size", "--max-prefill-tokens")
    assert all(name.startswith(("--cuda-graph-", *prefill)) for name in of_fraction)


def test_no_flag_of_sglang_counts_as_misspelt() -> None:
    """SGLang's flags are counted, without effect, or named in the report."""
    parser = arguments()
    own = set(parser.option_names())
    assert len(FLAGS) > 400
    for flag in set(FLAGS) - own:
        assert parser.parse_args([*ASKED, "--model", "x", flag, "1"]).not_counted == (flag,)


def test_flags_without_an_effect_exist() -> None:
    assert set(WITHOUT_EFFECT) <= set(FLAGS) | PARSERS
    assert all(any(flag.startswith(name) for flag in FLAGS) for name in OF_FRACTION if "disable-cuda" not in name)
