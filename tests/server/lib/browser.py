"""A page in headless Chromium, driven over its DevTools protocol."""

import asyncio
import base64
import json
import re
import shutil
import subprocess
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import aiohttp
import httpx

CHROMIUM = shutil.which("chromium")
FLAGS = ("--headless=new", "--no-sandbox", "--disable-gpu", "--hide-scrollbars", "--remote-debugging-port=0")
TIMEOUT_S = 60.0


class Page:
    """Browser tab; `console` holds the messages and errors that its console has shown."""

    def __init__(self, address: str) -> None:
        self.address, self.n_sent, self.console = address, 0, list[str]()

    def evaluate(self, expression: str) -> Any:
        """Return the value of an expression in the page, awaiting promises; raise RuntimeError if it throws."""
        asked = {"expression": expression, "awaitPromise": True, "returnByValue": True}
        result = self.send("Runtime.evaluate", **asked)
        if "exceptionDetails" in result:
            raise RuntimeError(str(result["exceptionDetails"]))
        return result["result"].get("value")

    def wait_for(self, expression: str, timeout_s: float = TIMEOUT_S) -> None:
        deadline = time.monotonic() + timeout_s
        while not self.evaluate(expression):
            assert time.monotonic() < deadline, (
                f"{expression} is false after {timeout_s:.0f} s; console: {self.console}"
            )
            time.sleep(0.1)

    def screenshot(self, path: Path) -> None:
        path.write_bytes(base64.b64decode(self.send("Page.captureScreenshot", format="png")["data"]))

    def send(self, method: str, **parameters: Any) -> dict[str, Any]:
        return asyncio.run(self._send(method, parameters))

    async def _send(self, method: str, parameters: dict[str, Any]) -> dict[str, Any]:
        self.n_sent += 1
        async with aiohttp.ClientSession() as session, session.ws_connect(self.address, max_msg_size=0) as socket:
            for domain in ("Runtime.enable", "Log.enable"):  # both also report earlier messages
                await socket.send_json({"id": 0, "method": domain})
            await socket.send_json({"id": self.n_sent, "method": method, "params": parameters})
            messages: list[str] = []
            while True:
                message = await socket.receive_json(timeout=TIMEOUT_S)
                if message.get("method") in ("Runtime.exceptionThrown", "Runtime.consoleAPICalled", "Log.entryAdded"):
                    messages.append(json.dumps(message["params"]))
                if message.get("id") == self.n_sent:
                    self.console = messages
                    return message["result"]


@contextmanager
def opened(url: str, *, width: int = 1200, height: int = 900) -> Iterator[Page]:
    """Open the page at `url` and wait until it is loaded."""
    assert CHROMIUM, "no chromium on PATH"
    with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as folder:  # Chromium's processes still write to it
        command = [CHROMIUM, *FLAGS, f"--window-size={width},{height}", f"--user-data-dir={folder}", "about:blank"]
        with subprocess.Popen(command, stderr=subprocess.PIPE, stdout=subprocess.DEVNULL, text=True) as process:
            try:
                yield Page(new_tab(process, url))
            finally:
                process.terminate()
                process.wait(20)


def new_tab(process: subprocess.Popen[str], url: str) -> str:
    assert process.stderr is not None
    for line in process.stderr:
        if found := re.search(r"DevTools listening on ws://([\w.:]+)/", line):
            tab = httpx.put(f"http://{found[1]}/json/new?{url}", timeout=TIMEOUT_S, trust_env=False).json()
            page = Page(tab["webSocketDebuggerUrl"])
            page.wait_for("document.readyState === 'complete' && location.href !== 'about:blank'")
            return page.address
    raise AssertionError(f"chromium ended with status {process.wait()}")
