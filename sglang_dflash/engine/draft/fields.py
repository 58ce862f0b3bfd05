"""Typed look-up in a config.json."""

from collections.abc import Mapping
from math import inf
from typing import Any


class Fields:
    """Fields of a config.json. Fields of the nested object `inner` take precedence over top-level fields.

    Null counts as missing. `count`, `optional_count` and `number` raise ValueError if a value is not a number of their
    kind, or is too small. `count` and `number` also raise ValueError if a field is missing and there is no default.
    """

    def __init__(self, config: Mapping[str, Any], name: str, inner: str, *, home: str = "") -> None:
        """Merge the nested object under the key `inner` into `config`.

        Args:
            name: the config's name in messages.
            home: key of the object to which a missing field belongs; "": the top level.
        """
        self.whole, self.name = config, name
        self.cure = f"add it to {home}" if home else "add it"
        nested = config.get(inner)
        self.fields = {**config, **nested} if isinstance(nested, dict) else config

    def get(self, field: str, default: Any = None) -> Any:
        value = self.fields.get(field)
        return default if value is None else value

    def count(self, field: str, default: int | None = None, *, least: int = 1) -> int:
        value = self.get(field, default)
        if value is None:
            raise ValueError(f"{self.name}: config.json has no {field}; {self.cure}")
        if type(value) is not int or value < least:
            raise ValueError(f"{self.name}: {field} is {value!r}, not an integer of at least {least}; fix config.json")
        return value

    def number(self, field: str, default: float | None = None) -> float:
        """Return a number above 0."""
        value = self.get(field, default)
        if value is None:
            raise ValueError(f"{self.name}: config.json has no {field}; {self.cure}")
        if type(value) not in (int, float) or not 0 < value < inf:
            raise ValueError(f"{self.name}: {field} {value!r} is not a number above 0; fix config.json")
        return value

    def optional_count(self, field: str) -> int | None:
        """Return an integer of at least 1, or None if the field is missing."""
        return None if self.get(field) is None else self.count(field)
