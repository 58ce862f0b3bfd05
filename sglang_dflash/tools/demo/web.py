"""Web page of the demo, on localhost: answers stream in two columns, with and without speculation.

Security: the page puts texts into text nodes only, loads nothing, and runs only its own script. The server listens on
localhost only, and checks the `Host` and `Origin` of every request.
"""

import json
import secrets
import time
from collections import defaultdict, deque
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from itertools import count, pairwise
from pathlib import Path
from typing import Any, NamedTuple

import httpx
import openai
from tokenizers import Tokenizer

from sglang_dflash.pairs.servers.ports import HOST
from sglang_dflash.tools.demo.ask import Message, Step, ask
from sglang_dflash.tools.demo.pairs import Show
from sglang_dflash.tools.demo.verdict import difference

PAGE = Path(__file__).with_name("page.html")
MOST_BYTES = 64 * 1024  # limit of a request's body
POLICY = "default-src 'none'; connect-src 'self'; style-src 'nonce-{0}'; script-src 'nonce-{0}'; base-uri 'none'"


class Verified(NamedTuple):
    """Counts of one step of one request: verified tokens, accepted drafts, and n-gram copies among the accepted drafts.

    The copies are the last of the accepted drafts.
    """

    width: int
    n_accepted: int
    n_copied: int

    @property
    def kinds(self) -> list[str]:
        """Return the kind of each committed token: drafted block, n-gram copy, or the target's own."""
        return ["block"] * (self.n_accepted - self.n_copied) + ["copy"] * self.n_copied + ["own"]


class StepTrace:
    """Reader of a running server's step trace (`SGLANG_DFLASH_WIDTH_TRACE`). It sorts the steps by request."""

    def __init__(self, folder: Path) -> None:
        self.files = [path.open() for path in sorted(folder.glob("*.jsonl"))]
        self.unread: dict[str, deque[Verified]] = defaultdict(deque)

    def of(self, rid: str, n_tokens: int) -> list[Verified]:
        """Pop a request's next steps: enough to commit `n_tokens` tokens, or all that are traced so far."""
        for file in self.files:
            for line in map(json.loads, file):
                for one, n_accepted in line["accepted"].items():
                    copied = line.get("copied", {}).get(one, 0)
                    self.unread[one].append(Verified(line["width"], n_accepted, copied))
        found: list[Verified] = []
        while self.unread[rid] and sum(len(step.kinds) for step in found) < n_tokens:
            found.append(self.unread[rid].popleft())
        return found


def pieces(tokenizer: Tokenizer, step: Step, verified: Sequence[Verified]) -> list[tuple[str, int, str]]:
    """Return a piece for each token of a chunk: (kind, index in its verify step from 1, text).

    An end token has no text and no piece. If the text does not encode to the chunk's tokens, it is one piece.
    """
    if not step.text:  # the end token alone
        return []
    places = [(kind, place) for one in verified for place, kind in enumerate(one.kinds, 1)]
    places = places or [("own", 1)] * max(step.n_tokens, 1)
    offsets = tokenizer.encode(step.text, add_special_tokens=False).offsets
    if not 0 <= step.n_tokens - len(offsets) <= 1:  # the counts may differ by one: an end token has no text
        return [(*places[0], step.text)]
    cuts = [0, *(begin for begin, _ in offsets[1:]), len(step.text)]  # some tokenizers' offsets omit spaces
    texts = (step.text[begin:end] for begin, end in pairwise(cuts))
    return [(*place, text) for place, text in zip(places, texts, strict=False)]


class Side(NamedTuple):
    """A server to query, and its step trace."""

    client: openai.OpenAI
    steps: StepTrace | None  # None without speculation


class Demo:
    """Answers to the page's requests."""

    def __init__(self, sides: Mapping[str, Side], tokenizer: Tokenizer, show: Show) -> None:
        self.sides, self.tokenizer, self.show = sides, tokenizer, show
        self.n_asked = count()

    def page(self, nonce: str) -> str:
        # The script must not contain its own end tag.
        examples = json.dumps(dict(self.show.questions)).replace("<", "\\u003c")
        return PAGE.read_text().replace("{nonce}", nonce).replace("{examples}", examples)

    def answer(self, side: str, messages: Sequence[Message], show: Callable[[dict[str, Any]], None]) -> None:
        """Query one server. Pass each step to `show` as an object: one line of the HTTP response to the page."""
        client, steps = self.sides[side]
        rid, asked_s, n_tokens = f"demo-{next(self.n_asked)}", time.perf_counter(), 0

        def seen(step: Step) -> None:
            nonlocal n_tokens
            verified = steps.of(rid, step.n_tokens) if steps and n_tokens else []  # the prefill has no traced step
            n_tokens += step.n_tokens
            shown = pieces(self.tokenizer, step, verified)
            # An end token has no piece. A chunk whose text does not encode to its tokens has one piece for all of them.
            line: dict[str, Any] = {"pieces": shown, "n_tokens": max(len(shown), step.n_tokens - 1) if shown else 0}
            if verified:
                line["n_steps"] = len(verified)
                line["width"] = max(one.width for one in verified)
                line["accepted"] = sum(one.n_accepted for one in verified)
                line["copied"] = sum(one.n_copied for one in verified)
            show(line | {"s": time.perf_counter() - asked_s})

        ask(client, messages, seen, rid=rid)

    def compare(self, answers: tuple[str, str], show: Callable[[dict[str, Any]], None]) -> None:
        """Compare the answers with and without speculation, and pass a sentence about them to `show`."""
        show({"verdict": difference(answers, self.tokenizer) or "The answers are equal, character for character."})


def conversation(body: bytes) -> list[Message]:
    """Parse a conversation that ends with a question, or raise ValueError."""
    return require_question(parsed(body))


def comparison(body: bytes) -> tuple[str, str]:
    """Parse the two answers to a question, or raise ValueError."""
    match parsed(body):
        case [str(one), str(other)]:
            return one, other
    raise ValueError("send a list of two answers")


def parsed(body: bytes) -> Any:
    """Parse JSON, or raise ValueError."""
    try:
        return json.loads(body)
    except RecursionError:
        raise ValueError("lists and objects are nested too deeply") from None


def require_question(messages: Any) -> list[Message]:
    """Return the messages if they are a conversation that ends with a question, or raise ValueError."""
    match messages:
        case [*turns, {"role": "user"}] if all(map(is_message, messages)):
            if [one["role"] for one in turns] == ["user", "assistant"] * (len(turns) // 2):
                return messages
    raise ValueError(
        "send a list of messages with only role and content, both text; user and assistant alternate, the "
        "user first and last"
    )


def is_message(one: object) -> bool:
    return isinstance(one, dict) and one.keys() == {"role", "content"} and all(isinstance(v, str) for v in one.values())


class Handler(BaseHTTPRequestHandler):
    """HTTP handler of the page and its answers; `web_server` sets `demo` and `port`."""

    demo: Demo
    port: int

    def is_ours(self) -> bool:
        """Return whether `Host` is localhost with this port, and `Origin`, if sent, is this page's."""
        names = {f"{name}:{self.port}" for name in (HOST, "localhost")}
        origin = self.headers.get("Origin")
        return self.headers.get("Host") in names and (origin is None or origin.removeprefix("http://") in names)

    def do_GET(self) -> None:
        if not self.is_ours() or self.path != "/":
            self.send_error(404)
            return
        nonce = secrets.token_urlsafe(16)
        self.begin("text/html; charset=utf-8", POLICY.format(nonce))
        self.wfile.write(self.demo.page(nonce).encode())

    def do_POST(self) -> None:
        side, length = self.path.removeprefix("/answer/"), self.headers.get("Content-Length") or "0"
        known = side in self.demo.sides or side == "/verdict"
        if not self.is_ours() or not known or self.headers.get("Content-Type") != "application/json":
            self.send_error(404)
            return
        if not length.isdecimal():
            self.send_error(400, "Content-Length must be a number of bytes")
            return
        if len(length) > 9 or int(length) > MOST_BYTES:
            self.send_error(413, "The conversation is too long: begin a new one")
            return
        try:
            body = self.rfile.read(int(length))
            reply = (
                partial(self.demo.compare, comparison(body))
                if side == "/verdict"
                else partial(self.demo.answer, side, conversation(body))
            )
        except ValueError as error:
            self.send_error(400, str(error))
            return
        self.begin("application/x-ndjson", POLICY.format(""))
        try:
            reply(self.say)
        except (openai.APIError, httpx.TransportError) as error:
            self.say({"error": f"The server sent no whole answer: {error}"})
        except ConnectionError:  # the page was closed, which ends the request
            return

    def begin(self, kind: str, policy: str) -> None:
        self.send_response(200)
        self.send_header("Content-Type", kind)
        self.send_header("Content-Security-Policy", policy)
        self.send_header("X-Content-Type-Options", "nosniff")
        self.send_header("Cache-Control", "no-store")
        self.end_headers()

    def say(self, line: Mapping[str, Any]) -> None:
        self.wfile.write(json.dumps(line).encode() + b"\n")
        self.wfile.flush()

    def log_message(self, *_: object) -> None:
        return


def web_server(demo: Demo, port: int) -> ThreadingHTTPServer:
    """Return a server that listens on localhost only. It answers once `serve_forever` is called."""
    return ThreadingHTTPServer((HOST, port), type("DemoHandler", (Handler,), {"demo": demo, "port": port}))
