"""Typed look-up in a config.json."""

from collections.abc import Mapping
from typing import Any


class Fields:
    """The fields of a config.json, those of the object `inner` in it first.

    A field that is missing, or is not what is asked for, is a ValueError that names it. Null counts as missing.
    """

    def __init__(self, config: Mapping[str, Any], name: str, inner: str) -> None:
        """name: what the config is called in messages."""
        self.whole, self.name = config, name
        nested = config.get(inner)
        self.fields = {**config, **nested} if isinstance(nested, dict) else config

    def get(self, field: str, default: Any = None) -> Any:
        """Return the field's value, or the default."""
        value = self.fields.get(field)
        return default if value is None else value

    def count(self, field: str, default: int | None = None, *, least: int = 1) -> int:
        """Return an integer of at least `least`."""
        value = self.get(field, default)
        if value is None:
            raise ValueError(f"{self.name}: config.json has no {field}; add it")
        if type(value) is not int or value < least:
            raise ValueError(f"{self.name}: {field} is {value!r}, not an integer of at least {least}; fix config.json")
        return value

    def count_if_said(self, field: str) -> int | None:
        """Return an integer of at least 1, or None where the config does not say."""
        return None if self.get(field) is None else self.count(field)
