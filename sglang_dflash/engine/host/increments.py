"""Parsing of streamed answers, independent of the number of tokens in an increment (the text that a step adds).

An increment of a speculative step has several tokens. Most of SGLang's tool-call parsers report at most one event per
increment. If an increment contains several events, these parsers lose arguments or whole calls. One reasoning parser
loses an answer. So increments are split into pieces of about a token, the pieces are parsed one by one, and the results
are joined.

A special token is not split, because some parsers do not recognise its parts. As in most tokenizers, runs of
punctuation are not split, and white space stays with the following piece. So a brace after punctuation or white space
does not start a piece. Llama's parser would read a piece that starts with a brace as a call.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable

from sglang.srt.function_call.core_types import ToolCallItem
from sglang.srt.function_call.function_call_parser import FunctionCallParser
from sglang.srt.parser.reasoning_parser import ReasoningParser
from sglang.srt.plugins.hook_registry import HookType

from sglang_dflash.engine.host import contract
from sglang_dflash.engine.host.names import HOOKS, SECTIONS

# Pattern of special tokens: <tool_call>, </tool_calls:1a2b>, <|tool_call_end|>, <|"|>, <｜tool▁sep｜>, [TOOL_CALLS]
MARKER = r"</?[|｜]?[^\W\d][\w▁:|｜ ]{0,40}>|<[|｜/][^<>\n]{1,40}>|\[[A-Z_]+\]"
PIECE = re.compile(rf"{MARKER}|\s*(?:\w+|(?:(?!{MARKER})[^\w\s])+)|\s+")

Parsed = tuple[str, list[ToolCallItem]]


def hook_parsers() -> None:
    """Set the hooks that parse the tool calls and the reasoning of each increment piece by piece."""
    contract.check(SECTIONS["increments"])
    contract.set_hooks(
        {
            HOOKS["thoughts"]: (parse_thoughts, HookType.AROUND),
            HOOKS["tool_calls"]: (parse_calls, HookType.AROUND),
        }
    )


def parse_calls(stock: Callable[..., Parsed], parser: FunctionCallParser, text: str) -> Parsed:
    """Return an increment's plain text and parts of tool calls. Hook around `FunctionCallParser.parse_stream_chunk`."""
    pieces = PIECE.findall(text)
    if len(pieces) < 2:
        return stock(parser, text)
    results = [stock(parser, piece) for piece in pieces]
    return "".join(plain for plain, _ in results), joined(call for _, calls in results for call in calls)


def parse_thoughts(
    stock: Callable[..., tuple[str | None, str | None]], parser: ReasoningParser, text: str
) -> tuple[str | None, str | None]:
    """Return an increment's reasoning, and its other text. Hook around `ReasoningParser.parse_stream_chunk`."""
    pieces = PIECE.findall(text)
    if len(pieces) < 2:
        return stock(parser, text)
    results = [stock(parser, piece) for piece in pieces]
    return "".join(thought or "" for thought, _ in results), "".join(rest or "" for _, rest in results)


def joined(calls: Iterable[ToolCallItem]) -> list[ToolCallItem]:
    """Join consecutive parts of the same tool call, so that a client gets fewer events."""
    found: list[ToolCallItem] = []
    for call in calls:
        if found and not call.name and call.tool_index == found[-1].tool_index:
            found[-1] = found[-1].model_copy(update={"parameters": found[-1].parameters + call.parameters})
        else:
            found.append(call)
    return found
