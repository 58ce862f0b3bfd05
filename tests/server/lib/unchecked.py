"""Requests to a server whose tokenizing process checks nothing (`tests/server/unchecked_tokenizer/`)."""

from pathlib import Path
from typing import Any

import httpx

from sglang_dflash.pairs.servers.server import Server
from tests.server.lib.bad_requests import Bad
from tests.tools.parameters import path_with

UNCHECKED = path_with(Path(__file__).parents[1] / "unchecked_tokenizer")


def refusal(server: Server, bad: Bad, **more: Any) -> tuple[int, str]:
    """Send a request with the fields `more`; return the status and the answer's text."""
    reply = httpx.post(f"{server.url}{bad.path}", json=bad.body | more, timeout=60)
    return reply.status_code, reply.text
