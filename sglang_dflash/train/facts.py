"""What a run or a cache depends on, by name: kept beside it, and compared before it is used again."""

from collections.abc import Mapping
from typing import Any


def differing(found: Mapping[str, Any], wanted: Mapping[str, Any]) -> str:
    """`steps 6, now 7; text a, now b` of the facts that differ, by name; empty where all agree."""
    pairs = {name: (found.get(name, "unset"), wanted.get(name, "unset")) for name in found.keys() | wanted.keys()}
    return "; ".join(f"{name} {was}, now {now}" for name, (was, now) in sorted(pairs.items()) if was != now)
