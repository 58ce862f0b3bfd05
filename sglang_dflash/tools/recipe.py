"""Launch commands for published drafts, by GPU: `sglang-dflash recipe NAME --gpu h200`.

The command prints a launch command that can be pasted into a shell, with the reason for each flag. With `--run` it
starts the server instead. Flags after `--` are appended to the recipe's and take precedence. The recipes are in
`assets/recipes.toml`. For GPUs other than Hopper, B200 and B300 the command adds computed flags with which a request
fits.
"""

import argparse
import os
import shlex
import sys
import tomllib
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import NamedTuple

from sglang_dflash.cli import Parser, nearest
from sglang_dflash.flags import Worker
from sglang_dflash.tools.capacity import known_models as models

FILE = Path(__file__).parents[1] / "assets" / "recipes.toml"
SERVER = ("-m", "sglang.launch_server")


class Flag(NamedTuple):
    """One flag of a launch. `value` is "" for a switch; `why`, the reason, is "" for flags that need none."""

    name: str
    value: str
    why: str

    @property
    def words(self) -> tuple[str, ...]:
        return (self.name, self.value) if self.value else (self.name,)


class Recipe(NamedTuple):
    """Launch of one target with its draft. `architecture` is the name in the target's config.json."""

    name: str
    target: str
    architecture: str
    draft: str
    note: str
    flags: Mapping[str, Sequence[Flag]]  # by GPU or generation, without duplicate names
    devices: tuple[str, ...] = ()  # generations that have kernels for the weights; empty: all


class Card(NamedTuple):
    """A GPU. `gib`: memory, as its driver reports it; `like`: key of `Recipe.flags`."""

    gib: float
    device: str  # generation, as in `arguments.device_of`
    like: str


def read_flags(pairs: Iterable[Sequence[str]]) -> list[Flag]:
    split = ((text.partition(" "), why) for text, why in pairs)
    return [Flag(name, value, why) for (name, _, value), why in split]


def read(text: str) -> dict[str, Recipe]:
    """Return the recipes in `text`, the content of recipes.toml, by name."""
    document = tomllib.loads(text)
    gpus = {gpu: read_flags(pairs) for gpu, pairs in (document["gpus"] | document.get("generations", {})).items()}
    found = {}
    for name, fields in document["recipes"].items():
        pair = [
            Flag("--model-path", fields["target"], ""),
            Flag("--speculative-algorithm", "DFLASH", ""),
            Flag("--speculative-draft-model-path", fields["draft"], ""),
        ]
        flags = {
            gpu: last_of_each([*pair, *own, *read_flags(fields["flags"]), *read_flags(fields.get(f"flags_{gpu}", ()))])
            for gpu, own in gpus.items()
        }
        found[name] = Recipe(
            name,
            fields["target"],
            fields["architecture"],
            fields["draft"],
            fields.get("note", ""),
            flags,
            tuple(fields.get("devices", ())),
        )
    return found


def last_of_each(flags: Iterable[Flag]) -> list[Flag]:
    return list({flag.name: flag for flag in flags}.values())


RECIPES = read(FILE.read_text())
GPUS = tuple(tomllib.loads(FILE.read_text())["gpus"])
CARDS = {name: Card(**fields) for name, fields in tomllib.loads(FILE.read_text())["cards"].items()}
SMALLER = ("h100", "gh200")  # cards with an H200's flags and less memory
TP_SIZES = (1, 2, 4, 8)
FRACTION = "--mem-fraction-static"  # model cards set it below SGLang's default


def flags_on(recipe: Recipe, gpu: str) -> Sequence[Flag]:
    """Return the recipe's flags for a card. Unless it is like a GPU in `GPUS`, add flags with which a request fits.

    Raises:
        ValueError: the card lacks kernels for the weights, sizes are unknown, or no request fits on eight cards.
    """
    card = CARDS[gpu]
    flags = recipe.flags[card.like]
    if recipe.devices and card.device not in recipe.devices:
        raise ValueError(
            f"{recipe.target} needs kernels that {gpu} ({card.device}) lacks; use weights in another format, which "
            "`sglang-dflash recipe` lists"
        )
    if card.like in GPUS:
        return flags
    if recipe.target not in models.TARGETS or recipe.draft not in models.DRAFTS:
        raise ValueError(f"the sizes of {recipe.name} are not known, so its flags for {gpu} cannot be computed")
    for tp_size in TP_SIZES:
        several = [Flag("--tp-size", str(tp_size), "")] if tp_size > 1 else []
        if added := fitting([*flags, *several], card.gib):
            n_requests, further = added
            why = f"computed: {counted(n_requests)} of 8,192 tokens at once"
            return last_of_each([*flags, *(flag._replace(why=why) for flag in [*several, *further])])
    raise ValueError(f"no request of {recipe.name} fits on {TP_SIZES[-1]} {gpu} (computed); use larger cards")


def fitting(flags: Sequence[Flag], gib: float) -> tuple[int, list[Flag]] | None:
    """Return how many requests fit on a card, and the flags to add; None if no request fits even with added flags."""
    from sglang_dflash.tools.capacity import report  # imports take a tenth of a second

    words = [*(word for flag in flags for word in flag.words), "--gpu-memory", str(gib)]
    found = report.answer(report.arguments(raises=True).parse_args(words))
    if n_requests := found.results[Worker.PLUGIN].requests:
        return n_requests, []
    for text, n_requests in report.lifts(found, Worker.PLUGIN):
        if text.startswith("--mem-fraction-static"):
            words = text.split()
            return n_requests, [Flag(*pair, "") for pair in zip(words[::2], words[1::2], strict=True)]
    return None


def arguments(recipe: Recipe, gpu: str, further: Sequence[str] = ()) -> list[str]:
    """Return the arguments with which Python starts the recipe's server; `further`: flags to append."""
    return [*SERVER, *(word for flag in flags_on(recipe, gpu) for word in flag.words), *further]


def text(recipe: Recipe, gpu: str, further: Sequence[str] = ()) -> str:
    """Return the command for a shell, with comments above it that give the reasons for its flags."""
    flags = flags_on(recipe, gpu)
    comments = [f"{recipe.target} on {gpu.upper()}. {recipe.note}".strip()]
    sized = "These flags are sized for an H200. " if gpu in SMALLER else ""
    comments += [f"{sized}{sentence}" for sentence in [at_once(recipe, gpu, flags, further)] if sentence]
    comments += [f"  {flag.name}: {flag.why}" for flag in flags if flag.why]
    lines = [shlex.join(["python", *SERVER]), *(shlex.join(flag.words) for flag in flags)]
    lines += [shlex.join(further)] if further else []
    return "\n".join([*(f"# {comment}" for comment in comments), " \\\n    ".join(lines)])


def counted(n_requests: int) -> str:
    return f"{n_requests} request{'s' * (n_requests != 1)}"


def at_once(recipe: Recipe, gpu: str, flags: Iterable[Flag], further: Sequence[str]) -> str:
    """Return a sentence with the number of requests at once on a card.

    If the target's sizes are not known, return advice for cards in `SMALLER`, and "" for other cards.
    """
    if recipe.target not in models.TARGETS:
        cure = "If the model does not fit, set a larger --tp-size in the command."
        share = CARDS[gpu].gib / CARDS["h200"].gib
        return f"This card has {share:.0%} of its memory. {cure}" if gpu in SMALLER else ""
    from sglang_dflash.tools.capacity import report  # imports take a tenth of a second

    words = [*(word for flag in flags for word in flag.words), *further, "--gpu-memory", str(CARDS[gpu].gib)]
    options = report.arguments(raises=True)
    try:
        found = report.answer(options.parse_args(words))
        by_default = report.answer(options.parse_args(without(FRACTION, words)))
    except ValueError as error:
        return f"The number of requests on {gpu.upper()} cannot be computed: {error}."
    n_requests, better = found.results[Worker.PLUGIN].requests, dict(report.lifts(found, Worker.PLUGIN))
    cards = f"{found.serving.tp_size} {gpu.upper()} of {CARDS[gpu].gib} GiB"
    if n_requests:
        n_default = by_default.results[Worker.PLUGIN].requests
        more = f"; {n_default} fit without {FRACTION}" if n_default > n_requests else ""
        fit = "fits" if n_requests == 1 else "fit"
        n = counted(n_requests)
        fitting = f"On {cards}, {n} of {found.serving.context:,} tokens {fit} at once (computed){more}."
        return " ".join((fitting, *found.not_counted))
    ways = {
        f"set {flag} in the command, with which {n} fit": flag for flag, n in better.items() if flag.startswith("--tp")
    }
    cure = next(iter(ways), report.more(found.serving))
    none = f"On {cards}, no request of {found.serving.context:,} tokens fits (computed); {cure}."
    return " ".join((none, *found.not_counted))


def without(flag: str, words: Sequence[str]) -> list[str]:
    """Return a command line without a flag and its value."""
    kept, after = list[str](), ""
    for word in words:
        if flag not in (word, after, word.split("=")[0]):
            kept.append(word)
        after = word
    return kept


def table(recipes: Iterable[Recipe]) -> str:
    """Return a table of the recipes, with each recipe's draft and its number of cards by GPU type."""
    rows = [("recipe", "draft", *(gpu.upper() for gpu in GPUS))]
    rows += [(recipe.name, recipe.draft, *(n_cards(recipe, gpu) for gpu in GPUS)) for recipe in recipes]
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    lines = ["  ".join(map(str.ljust, row, widths)).rstrip() for row in rows]
    return "\n".join(
        [*lines, "", "The columns show numbers of cards. `sglang-dflash docs recipes` has the requests at once."]
    )


def n_cards(recipe: Recipe, gpu: str) -> str:
    return next((flag.value for flag in recipe.flags[gpu] if flag.name == "--tp-size"), "1")


def find(name: str) -> str | None:
    """Return the name of the recipe whose own name, target or draft is `name`; None if there is no such recipe.

    Targets and drafts are named as on the hub, with or without the organisation. Case is ignored.
    """
    for recipe in RECIPES.values():
        hub = (recipe.target, recipe.draft)
        if name.lower() in {known.lower() for path in (recipe.name, *hub) for known in (path, path.split("/")[-1])}:
            return recipe.name
    return None


def unknown(name: str) -> str:
    """Return the error for a name without a recipe."""
    cure = nearest(name.split("/")[-1], RECIPES) or "; `sglang-dflash recipe` lists all"
    return f"there is no recipe {name}{cure}"


def parse(argv: Sequence[str]) -> tuple[argparse.Namespace, list[str]]:
    """Return the parsed options, and the words after `--`."""
    words = list(argv)
    at = words.index("--") if "--" in words else len(words)
    parser = Parser(
        prog="sglang-dflash recipe",
        usage="%(prog)s [NAME --gpu GPU [--run] [-- SERVER FLAGS]]",
        description="Print or run the launch command of a published draft; without NAME, list all recipes.",
        elsewhere="flags of the server go after a bare `--`",
    )
    names = "name of a recipe, or of its target or draft on the hub; case is ignored"
    parser.add_argument("name", nargs="?", metavar="NAME", help=names)
    parser.add_argument("--gpu", type=str.lower, choices=tuple(CARDS), help="GPU to serve on")
    parser.add_argument("--run", action="store_true", help="start the server instead of printing its command")
    options = parser.parse_args(words[:at])
    if options.name:
        options.name = find(options.name) or parser.error(unknown(options.name))
    if not options.name and (options.gpu or options.run or at < len(words)):
        parser.error("found no NAME; `sglang-dflash recipe` lists all")
    if options.name and not options.gpu:
        parser.error(f"no GPU is named for {options.name}; give --gpu with one of {', '.join(CARDS)}")
    return options, words[at + 1 :]


def main(argv: Sequence[str]) -> int:
    options, further = parse(argv)
    if not options.name:
        print(table(RECIPES.values()))
        return 0
    recipe = RECIPES[options.name]
    try:
        words, printed = arguments(recipe, options.gpu, further), text(recipe, options.gpu, further)
    except ValueError as error:
        print(f"recipe: {error}", file=sys.stderr)
        return 1
    if options.run:
        os.execv(sys.executable, [sys.executable, *words])
    print(printed)
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
