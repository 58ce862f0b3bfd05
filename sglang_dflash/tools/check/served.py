"""Report about DFLASH on a running server: step times, chosen widths, and counts of n-gram copies."""

import json
import sys
from collections.abc import Sequence
from http.client import BadStatusLine, HTTPException
from typing import Any
from urllib.error import HTTPError
from urllib.request import ProxyHandler, build_opener

from sglang_dflash.engine.width.cost import table


def fetch(url: str) -> dict[str, Any]:
    """Fetch a running server's `/server_info`, and return its `internal_states[0]["dflash"]`.

    Raises:
        OSError: no server answers, it refuses the request, or it does not speak HTTP.
        ValueError: `url` has no scheme, or the server is not SGLang, or it does not serve DFLASH with this plugin's
            worker, or does not report it.
    """
    info = server_info(url)
    if info.get("frontend") == "rust" and info.get("speculative_algorithm") == "DFLASH":
        raise ValueError(
            f"SGLang's Rust server (SGLANG_RUST_SERVER=1) at {url} serves DFLASH, but reports no step times or widths; "
            "its log names the worker, and with --enable-metrics its /metrics has the dflash metrics"
        )
    try:
        states = info["internal_states"]
    except KeyError as error:
        raise ValueError(
            f"{url} is no SGLang server: its /server_info has no internal_states; give an SGLang server's URL"
        ) from error
    try:
        return states[0]["dflash"]
    except (KeyError, IndexError) as error:
        raise ValueError(
            f"the server at {url} does not serve DFLASH with this plugin; start it with sglang-dflash installed, "
            "--speculative-algorithm DFLASH, and without SGLANG_DFLASH_WORKER=stock"
        ) from error


def server_info(url: str) -> dict[str, Any]:
    """Fetch `/server_info`. Raises OSError and ValueError, see `fetch`."""
    if "://" not in url:
        raise ValueError(f"--server {url} has no http://; did you mean http://{url}?")
    info = f"{url.rstrip('/')}/server_info"
    try:
        with build_opener(ProxyHandler({})).open(info, timeout=30) as response:
            found = json.load(response)
    except HTTPError as error:
        with_key = "check sends no API key: use curl with the header `Authorization: Bearer KEY`"
        cure = "give the URL of an SGLang server, without a path such as /v1"
        if error.code in (401, 403):
            cure = with_key
        elif error.code >= 500:
            cure = "wait until the server is ready, or look at its log"
        raise OSError(f"{info} answers {error.code} {error.reason}; {cure}") from error
    except (BadStatusLine, ConnectionResetError) as error:
        raise OSError(
            f"{url} does not speak HTTP/1.1 ({type(error).__name__}); if it is a gRPC port (--smg-grpc-mode), "
            "see the server's log, which names the worker"
        ) from error
    except (OSError, HTTPException) as error:
        raise OSError(
            f"no SGLang server answers at {url}: {error}; start it, or give the URL it listens on"
            + (" (https needs a trusted certificate)" if url.startswith("https:") else "")
        ) from error
    except (json.JSONDecodeError, UnicodeDecodeError):
        found = None
    if not isinstance(found, dict):
        raise ValueError(f"{url} is no SGLang server: its /server_info is no JSON object; give an SGLang server's URL")
    return found


def render(dflash: dict[str, Any]) -> str:
    """Format a server's report as lines of text."""
    width, costs = dflash["width"], dflash["width"]["seconds"]
    lines = [f"sglang-dflash {dflash['version']}, blocks of {dflash['block_size']}, width {width['policy']}"]
    if dflash["simulated"]:
        lines.append(f"acceptance is simulated, so answers are meaningless: {dflash['simulated']}")
    if costs:
        lines.append("seconds per step, requests x width:")
        lines.append(table(costs))
    if width["n_steps"]:
        lines.append(width["account"])
    if dflash["copies"]:
        n_blocks, n_drafts = (sum(counts) for counts in zip(*dflash["copies"], strict=True))
        lines.append(f"n-gram copies: {n_blocks} blocks had a copy, and {n_drafts} copied drafts were accepted")
    return "\n".join(lines)


def main(argv: Sequence[str], *, as_json: bool) -> int:
    """Print the report of one server and return the exit status; `argv`: `--server`, a URL, and maybe `--json`."""
    words = [word for argument in argv for word in argument.split("=", argument.startswith("--"))]
    urls = [word for word in words if word not in ("--server", "--json")]
    if len(urls) != 1:
        found = " ".join(urls) or "nothing"
        cure = "give one URL, such as http://127.0.0.1:30000, and no option but --json"
        print(f"check: found {found} with --server; {cure}", file=sys.stderr)
        return 1
    try:
        dflash = fetch(urls[0])
    except (OSError, ValueError) as error:
        print(f"check: {error}", file=sys.stderr)
        return 1
    print(json.dumps(dflash) if as_json else render(dflash))
    return 0
