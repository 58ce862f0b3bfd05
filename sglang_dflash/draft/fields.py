"""Typed look-up in a config.json."""

from collections.abc import Mapping
from typing import Any


class Fields:
    """Fields of a config.json. Fields of the nested object `inner` take precedence over top-level fields.

    Null counts as missing. `count` and `optional_count` raise ValueError if a value is not an integer, or is too small.
    `count` also raises ValueError if the field is missing and there is no default.
    """

    def __init__(self, config: Mapping[str, Any], name: str, inner: str) -> None:
        """Merge the nested object under the key `inner` into `config`. Messages call the config `name`."""
        self.whole, self.name = config, name
        nested = config.get(inner)
        self.fields = {**config, **nested} if isinstance(nested, dict) else config

    def get(self, field: str, default: Any = None) -> Any:
        value = self.fields.get(field)
        return default if value is None else value

    def count(self, field: str, default: int | None = None, *, least: int = 1) -> int:
        value = self.get(field, default)
        if value is None:
            raise ValueError(f"{self.name}: config.json has no {field}; add it")
        if type(value) is not int or value < least:
            raise ValueError(f"{self.name}: {field} is {value!r}, not an integer of at least {least}; fix config.json")
        return value

    def optional_count(self, field: str) -> int | None:
        """Return an integer of at least 1, or None if the field is missing."""
        return None if self.get(field) is None else self.count(field)
