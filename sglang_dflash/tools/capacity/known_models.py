"""Targets and drafts whose published configs are in `assets/models.json`.

The file contains only the fields from which memory is computed, named as in config.json, and each config's source. A
quantized target has the config of the target named `like`, and the bytes of its files, as its page states them.
"""

import json
from collections.abc import Mapping
from pathlib import Path
from types import MappingProxyType
from typing import Any, NamedTuple

FILE = Path(__file__).parents[2] / "assets" / "models.json"


class Model(NamedTuple):
    """A known model."""

    config: Mapping[str, Any]
    source: str
    draft: str = ""  # if the model is a target, the name of its DFlash draft
    total_size: int = 0  # bytes of its files, its own drafter included, if config.json does not determine them


def _read(kind: str) -> Mapping[str, Model]:
    listed, found = json.loads(FILE.read_text())[kind], {}
    for name, fields in listed.items():
        like = listed.get(fields.pop("like", ""), {"config": {}})
        found[name] = Model(**{"draft": like.get("draft", "")} | fields | {"config": like["config"] | fields["config"]})
    return MappingProxyType(found)


TARGETS, DRAFTS = _read("targets"), _read("drafts")
# Targets with a published DFlash draft, but whose own configs are not in this package.
NOT_AT_HAND: tuple[str, ...] = tuple(json.loads(FILE.read_text())["not_at_hand"])


def find(name: str, known: Mapping[str, Model]) -> Model:
    """Return the model called `name`, case-insensitive, with or without its organisation.

    Raises:
        ValueError: the model is unknown, or its config is not in this package.
    """
    for other in known:
        if is_called(other, name):
            return known[other]
    for other in NOT_AT_HAND:
        if is_called(other, name):
            raise ValueError(f"{other}: its config is not in this package; pass a directory with its config.json")
    if Path(name).is_dir():
        raise ValueError(
            f"{name} has no config.json; give the directory that holds it (of the hub's cache: a snapshot)"
        )
    raise ValueError(
        f"{name} is no directory, no config.json and none of the models known here "
        f"({', '.join(other.split('/')[-1] for other in known)}); pass a directory with its config.json"
    )


def draft_of(target: str) -> str:
    """Return the published draft of a known target.

    Raises:
        ValueError: the target is unknown.
    """
    for name, model in TARGETS.items():
        if is_called(name, target):
            return model.draft
    raise ValueError(f"no draft is known for {target}; give --draft")


def is_called(name: str, given: str) -> bool:
    """Return whether `given` equals `name`, case-insensitive, with or without the organisation."""
    return given.lower() in (name.lower(), name.split("/")[-1].lower())
