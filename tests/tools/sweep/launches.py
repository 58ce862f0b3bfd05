"""Launches of `tests.tools.flag_sweep`: flags of `flags.toml`, the tiny pairs, and the results so far."""

import json
import tomllib
from argparse import ArgumentParser
from collections.abc import Iterator, Sequence
from functools import cache
from pathlib import Path
from typing import Any, NamedTuple

from sglang_dflash.pairs.servers.arms import without_speculation
from sglang_dflash.pairs.tiny import pairs as tiny
from sglang_dflash.pairs.tiny.pairs import Arm, Pair
from tests.server.lib.talk import chat
from tests.tools.parameters import QUESTIONS

OUT = Path(__file__).parents[3] / ".run" / "flag_sweep"
TABLE = tomllib.loads(Path(__file__).with_name("flags.toml").read_text())
KIND_FLAGS = {"dense": (), "hybrid": tiny.HYBRID_FLAGS, "moe": ("--skip-server-warmup",)}
N_PROMPTS = 6


class Ask(NamedTuple):
    """Flags of one launch: a string of the table."""

    kind: str  # tiny pair: "dense", "hybrid" or "moe"
    text: str
    alone: bool = False

    @property
    def flags(self) -> list[str]:
        """Return the flags as a command line. JSON values have no blanks, so that their quotes may stay."""
        return [word.replace("{dir}", str(OUT / "files")) for word in self.text.split(" ")]


def asks() -> list[Ask]:
    """Return what is launched, and all switches and choices of the other flags, for `resolve` only (`kind` "")."""
    return [
        Ask(kind, text, section == "alone")
        for section in ("serve", "alone")
        for kind, texts in TABLE[section].items()
        for text in texts
    ]


@cache
def actions() -> list[Any]:
    """Return the actions of SGLang's parser that have a flag."""
    from sglang.srt.server_args import ServerArgs

    parser = ArgumentParser()
    ServerArgs.add_cli_args(parser)
    return [action for action in parser._actions if action.option_strings]


def choices() -> Iterator[Ask]:
    """Yield, to be resolved only, every switch that is not launched, and every choice of every flag."""
    launched = {ask.text for ask in asks()}
    named = {word for ask in asks() for word in ask.flags}
    for action in actions():
        flag = action.option_strings[0]
        if flag in ("-h", "--config"):
            continue
        if action.nargs == 0 and flag not in named:
            yield Ask("dense", flag)
        for choice in action.choices or ():
            if f"{flag} {choice}" not in launched:
                yield Ask("dense", f"{flag} {choice}")


@cache
def pair_of(kind: str) -> Pair:
    """Return a tiny pair; "moe" is made once."""
    if kind != "moe":
        return {"dense": tiny.DENSE, "hybrid": tiny.HYBRID}[kind]
    from tests.server.lib.families import FAMILIES, write_pair

    folder = OUT / "moe"
    if not (folder / "prompts.json").exists():
        _, prompts = write_pair(FAMILIES["qwen3-moe"], folder)
        (folder / "prompts.json").write_text(json.dumps(prompts))
    return Pair(folder / "target", folder / "draft")


@cache
def prompts_of(kind: str) -> list[list[int]]:
    if kind == "moe":
        return json.loads((OUT / "moe" / "prompts.json").read_text())[:N_PROMPTS]
    return [chat(question, kind) for question in QUESTIONS[:N_PROMPTS]]


def argv_of(arm: Arm, kind: str, flags: Sequence[str]) -> list[str]:
    own = [word.replace("{port}", "32999") for word in flags]
    whole = [*tiny.launch_flags(pair_of(kind)), *tiny.FLAGS, *KIND_FLAGS[kind], *own]
    return without_speculation(whole) if arm is Arm.OFF else whole


# -- results ----------------------------------------------------------------------------------------------------------


def read(name: str) -> list[dict[str, Any]]:
    file = OUT / f"{name}.jsonl"
    return [json.loads(line) for line in file.read_text().splitlines()] if file.exists() else []


def append(name: str, result: dict[str, Any]) -> None:
    OUT.mkdir(parents=True, exist_ok=True)
    with (OUT / f"{name}.jsonl").open("a") as file:
        file.write(json.dumps(result) + "\n")
