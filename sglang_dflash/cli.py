"""Parser, help format, suggestions and reading of text files, shared by all subcommands of `sglang-dflash`."""

import math
import re
from argparse import (
    SUPPRESS,
    Action,
    ArgumentDefaultsHelpFormatter,
    ArgumentParser,
    ArgumentTypeError,
    RawDescriptionHelpFormatter,
)
from collections.abc import Callable, Iterable, Iterator
from difflib import get_close_matches
from pathlib import Path
from typing import Any, NoReturn
from urllib.parse import urlsplit

Add = Callable[..., Action]  # `add_argument` of a parser or of a group


def count(text: str) -> int:
    """Parse an option's value, a whole number above 0, or raise ArgumentTypeError."""
    if not text.isdecimal() or not int(text):
        raise ArgumentTypeError(f"{text!r} is not a whole number above 0")
    return int(text)


def count_or_zero(text: str) -> int:
    """Parse an option's value, a whole number of at least 0, or raise ArgumentTypeError."""
    if not text.isdecimal():
        raise ArgumentTypeError(f"{text!r} is not a whole number of 0 or more")
    return int(text)


def positive(text: str) -> float:
    """Parse an option's value, a finite number above 0, or raise ArgumentTypeError."""
    if not 0 < (number := _number(text)) < math.inf:
        raise ArgumentTypeError(f"{text!r} is not a number above 0")
    return number


def gib(text: str) -> float:
    """Parse an option's value, a number of GiB above 0, or raise ArgumentTypeError.

    A card of "80GB" has 80 GiB, less what its driver keeps, so all units have the same meaning here.
    """
    return positive(re.sub(r"\s*(g|gb|gib)$", "", text, flags=re.IGNORECASE))


def positive_or_zero(text: str) -> float:
    """Parse an option's value, a finite number of at least 0, or raise ArgumentTypeError."""
    if not 0 <= (number := _number(text)) < math.inf:
        raise ArgumentTypeError(f"{text!r} is not a number of 0 or more")
    return number


def _number(text: str) -> float:
    """Parse a number; any other text gives NaN, which no range contains."""
    try:
        return float(text)
    except ValueError:
        return math.nan


def require_url(url: str, option: str) -> None:
    """Check the host and port of a URL, the value of `option`, or raise ValueError."""
    try:
        parts = urlsplit(url)
        is_valid = bool(parts.hostname) and parts.port != 0
    except ValueError:  # no number, or above 65535
        is_valid = False
    if not is_valid:
        raise ValueError(f"{option} {url} is no valid URL; write it like http://127.0.0.1:30000")


def read_text(path: Path) -> str:
    """Return the content of a file in UTF-8.

    Raises:
        ValueError: there is no such file, it has another encoding, or it may not be read.
    """
    try:
        return path.read_text("utf-8")
    except (FileNotFoundError, IsADirectoryError):
        raise ValueError(f"{path} is no file; correct the path") from None
    except UnicodeDecodeError as error:
        raise ValueError(f"{path} is not UTF-8 text (byte {error.start}); convert it to UTF-8") from None
    except PermissionError:
        raise ValueError(f"{path} cannot be read; change its permissions") from None


def nearest(word: str, known: Iterable[str], cutoff: float = 0.6, prefix: str = "") -> str:
    """Return `; did you mean NAME?` with the known name most like `word`; "" if no name is similar.

    Case, leading dashes and `prefix` are ignored, so that names are not similar only by these.
    """

    def bare(name: str) -> str:
        return name.removeprefix(prefix).lower().lstrip("-")

    names = {bare(name): name for name in known}
    found = get_close_matches(bare(word), names, n=1, cutoff=cutoff)
    return f"; did you mean {names[found[0]]}?" if found else ""


def nearest_or_all(word: str, known: Iterable[str], prefix: str = "") -> str:
    """Return the result of `nearest`; if no name is similar, return `; use one of NAME, ...` with all names."""
    names = list(known)
    return nearest(word, names, prefix=prefix) or f"; use one of {', '.join(names)}"


class Help(ArgumentDefaultsHelpFormatter):
    """Help format that appends an option's default, except an empty, bool or list default.

    If the help of an option mentions a default, nothing is appended.
    """

    def _get_help_string(self, action: Action) -> str | None:
        is_plain = action.default in (None, SUPPRESS, "") or isinstance(action.default, bool | list | tuple)
        return action.help if is_plain or "default" in (action.help or "") else super()._get_help_string(action)


class RawHelp(Help, RawDescriptionHelpFormatter):
    """`Help` that keeps the line breaks of a command's description and examples."""


class Parser(ArgumentParser):
    """Parser whose errors name the option or choice nearest to a misspelt one.

    Args:
        elsewhere: where options that this parser does not know belong, as a sentence for the error.
    """

    def __init__(self, *args: Any, elsewhere: str = "", **options: Any) -> None:
        super().__init__(*args, **{"formatter_class": Help} | options)
        self.elsewhere = elsewhere

    def error(self, message: str) -> NoReturn:
        super().error(message + self.suggestion(message))

    def suggestion(self, message: str) -> str:
        """Return a suggestion, see `nearest`, for an argparse message about unknown options or an invalid choice."""
        if unknown := re.match(r"unrecognized arguments: (.*)", message):
            words = [word.split("=")[0] for word in unknown[1].split() if word.startswith("--")]
            of_others = set(self.option_names()) - set(self._option_string_actions)
            if of_another := next(filter(of_others.__contains__, words), ""):
                return f"; {of_another} is an option of another command, or stands before its command; see --help"
            found = next(filter(None, (nearest(word, self.option_names()) for word in words)), "")
            return found or (f"; {self.elsewhere}" if self.elsewhere else "")
        if choice := re.search(r"invalid choice: '(.*?)' \(choose from (.*)\)$", message):
            return nearest(choice[1], [name.strip("'") for name in choice[2].split(", ")])
        return ""

    def option_names(self) -> Iterator[str]:
        """Yield the names of all `--` options, including those of subcommands."""
        yield from (name for name in self._option_string_actions if name.startswith("--"))
        for action in self._actions:
            choices = action.choices.values() if isinstance(action.choices, dict) else ()
            yield from (name for one in choices if isinstance(one, Parser) for name in one.option_names())
