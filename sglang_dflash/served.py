"""What a running server says of its DFLASH: `GET /server_info`, under `internal_states[0]["dflash"]`.

python -m sglang_dflash.check --server http://127.0.0.1:30000
"""

from __future__ import annotations

import json
from typing import Any
from urllib.error import URLError
from urllib.request import urlopen


def add_dflash(result: Any, controller: Any, *_: object) -> Any:
    """AFTER `SchedulerInternalStateController.get_internal_state`: our worker's report beside SGLang's state."""
    result.internal_state["dflash"] = controller.scheduler.draft_worker.describe()
    return result


def fetch(url: str) -> dict[str, Any]:
    """
    Raises:
        OSError: nobody answers.
        ValueError: the server is another one, or does not serve DFLASH with our worker.
    """
    try:
        with urlopen(f"{url.rstrip('/')}/server_info", timeout=30) as response:
            states = json.load(response)["internal_states"]
    except URLError as error:
        raise OSError(f"no SGLang server answers at {url}: {error}; give the URL it listens on") from error
    except (KeyError, TypeError, json.JSONDecodeError) as error:
        raise ValueError(f"{url} is no SGLang server: its /server_info has no internal_states") from error
    try:
        return states[0]["dflash"]
    except (KeyError, IndexError) as error:
        raise ValueError(f"the server at {url} does not serve DFLASH with our worker") from error


def render(dflash: dict[str, Any]) -> str:
    width, costs = dflash["width"], dflash["width"]["seconds"]
    lines = [f"sglang-dflash {dflash['version']}, blocks of {dflash['block_size']}, width {width['policy']}"]
    if costs:
        lines.append("seconds per step, requests x width:")
        lines.append(table(costs))
    if width["n_steps"]:
        lines.append(width["account"])
    return "\n".join(lines)


def table(seconds: dict[str, dict[str, float]]) -> str:
    """By requests, then by width, in milliseconds."""
    rows = [["", *next(iter(seconds.values()))]]
    rows += [[size, *(f"{1e3 * s:.2f} ms" for s in by_width.values())] for size, by_width in seconds.items()]
    return "\n".join("".join(f"{cell:>10}" for cell in row) for row in rows)
