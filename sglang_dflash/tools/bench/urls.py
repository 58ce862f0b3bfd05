"""URLs of the running servers that the benchmark measures."""

from collections.abc import Sequence

from sglang_dflash.cli import require_url


def named_urls(given: Sequence[str]) -> dict[str, str]:
    """Return the URLs by arm. A single URL needs no name.

    Raises:
        ValueError: two arms have the same name, one of several URLs has no name, or an argument is no URL.
    """
    found: dict[str, str] = {}
    for text in given:
        name, separator, url = text.partition("=") if not text.startswith(("http://", "https://")) else ("", "", text)
        if not url.startswith(("http://", "https://")) or (separator and not name):
            raise ValueError(f"--base-url {text} is no [NAME=]URL; write it like ours=http://127.0.0.1:30000")
        require_url(url, "--base-url")
        if len(given) > 1 and not separator:
            raise ValueError(f"--base-url {text} has no name; with several servers write NAME=URL for each")
        if name in found:
            raise ValueError(f"--base-url {text}: two arms are called {name}; give each its own name")
        found[name or "server"] = url
    return found
