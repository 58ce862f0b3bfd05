"""Streamed reasoning and tool calls: the result must not depend on the number of tokens in an increment.

A piece is a part of an increment, about as long as a token. A cut is the boundary between two increments.
"""

import contextlib
import json
import re
from collections.abc import Callable, Iterable, Iterator, Sequence
from random import Random
from types import SimpleNamespace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from sglang.srt.entrypoints.openai.protocol import Tool
from sglang.srt.function_call.core_types import ToolCallItem
from sglang.srt.function_call.function_call_parser import FunctionCallParser
from sglang.srt.function_call.json_array_parser import JsonArrayParser
from sglang.srt.parser.beam import BEAM_RESPONSE_TEMPLATE
from sglang.srt.parser.reasoning_parser import ReasoningParser

from sglang_dflash.engine.host.increments import MARKER, PIECE, joined, parse_calls, parse_thoughts
from tests.tools.tool_answers import ARRAY, MISTRAL_ARRAY, WRITERS, Call

Answer = tuple[str, list[Call]]
PARSERS = sorted(FunctionCallParser.ToolCallParserEnum)
TEMPLATED = SimpleNamespace(response_template=BEAM_RESPONSE_TEMPLATE)  # a tokenizer with a response template
STRING, INTEGER, OBJECT = ({"type": name} for name in ("string", "integer", "object"))


def tool(name: str, **parameters: Any) -> Tool:
    return Tool(function={"name": name, "parameters": {"type": "object", "properties": parameters}})


TOOLS = [tool("now"), tool("get_weather", city=STRING, days=INTEGER), tool("put", path=STRING, body=OBJECT)]
NOW: Call = ("now", {})
WEATHER: Call = ("get_weather", {"city": 'São Paulo, "SP"', "days": 3})
PUT: Call = ("put", {"path": "a/b.py", "body": {"x": ["1", {"y": "z, w"}], "n": True}})
CALLS = ([], [NOW], [WEATHER], [PUT], [NOW, WEATHER], [WEATHER, NOW], [NOW, NOW, PUT], [WEATHER, PUT, NOW])
TEXTS = ("", "Let me look.\nIt is a < b and [5] {x}, 100%. ")

# Faults of SGLang's own parsers that occur even with one token per increment. By parser: the fault, and whether a
# sample shows it.
Shows = Callable[[str, Sequence[Call]], bool]
OWN: dict[str, tuple[str, Shows]] = {
    "cohere_command4": ("calls of one function get one index", lambda _, calls: calls.count(NOW) > 1),
    "gemma4": ("calls of one function get one index", lambda _, calls: calls.count(NOW) > 1),
    "gigachat3": ("the format has one call", lambda _, calls: len(calls) > 1),
    "interns1": ("a stream has one call", lambda _, calls: len(calls) > 1),
    "mistral": ("a text loses its closing brackets", lambda text, _: "]" in text),
}
# Faults of SGLang's parsers if an increment begins with a certain character of plain text. By parser, as in `OWN`.
# Samples that show such a fault are cut by `PIECE`, not between any two characters. `PIECE` keeps the space before the
# character in the same piece, as tokenizers do.
CUT: dict[str, tuple[str, Shows]] = {
    "gpt-oss": ("a '<' that is an increment is emitted twice", lambda text, _: "<" in text),
    "llama3": ("an increment that begins with a brace is read as a call", lambda text, _: "{" in text),
}


def never(text: str, calls: Sequence[Call]) -> bool:
    return False


def samples(parser: str) -> Iterator[tuple[str, list[Call]]]:
    for text in TEXTS if parser not in ("beam", "response_template") else ("",):
        yield from ((text, calls) for calls in CALLS)


def made(parser: str) -> FunctionCallParser:
    return FunctionCallParser(TOOLS, parser, tokenizer=TEMPLATED if parser == "response_template" else None)


def units(answer: str) -> list[str]:
    """Split an answer into its special tokens and the single characters between them."""
    return re.findall(rf"{MARKER}|.", answer, re.DOTALL)


def cuts(parts: list[str]) -> Iterator[list[str]]:
    """Yield `parts` joined into increments of 1, 2, 3, 7, 16, 40 or all parts, and of random numbers of parts."""
    random, n = Random(0), len(parts)
    for sizes in ([1], [2], [3], [7], [16], [40], [n or 1], range(1, 9), range(1, 30)):
        increments, i = [], 0
        while i < n:
            size = random.choice(sizes)
            increments.append("".join(parts[i : i + size]))
            i += size
        yield increments


def assembled(parts: Iterable[tuple[str, Iterable[ToolCallItem]]]) -> Answer:
    """Return the text and calls that a client assembles from a stream."""
    text, names, arguments = "", dict[int, str](), dict[int, str]()
    for plain, calls in parts:
        text += plain
        for call in calls:
            names[call.tool_index] = names.get(call.tool_index, "") + (call.name or "")
            arguments[call.tool_index] = arguments.get(call.tool_index, "") + call.parameters
    return text.strip(), [(name, json.loads(arguments[i] or "{}")) for i, name in names.items()]


def left(parser: Any) -> list[ToolCallItem]:
    """Return the arguments that SGLang adds at the end of an answer, as `_check_for_unstreamed_tool_args` does."""
    i = len(parser.prev_tool_call_arr) - 1
    if i < 0 or i >= len(parser.streamed_args_for_tool):
        return []
    whole, sent = parser.prev_tool_call_arr[i].get("arguments", {}), parser.streamed_args_for_tool[i]
    written = whole if isinstance(whole, str) else json.dumps(whole, ensure_ascii=False)
    rest = written[len(sent) :] if written.startswith(sent) else ""
    return [ToolCallItem(tool_index=i, parameters=rest)] if rest else []


def stock_chunk(parser: FunctionCallParser, text: str) -> tuple[str, list[ToolCallItem]]:
    return FunctionCallParser.parse_stream_chunk(parser, text)


def ours_chunk(parser: FunctionCallParser, text: str) -> tuple[str, list[ToolCallItem]]:
    return parse_calls(FunctionCallParser.parse_stream_chunk, parser, text)


def streamed(name: str, increments: Iterable[str], parse: Callable[..., Any] = ours_chunk) -> Answer:
    parser = made(name)
    parts = [parse(parser, increment) for increment in increments]
    return assembled([*parts, parser.parse_stream_end(), ("", left(parser.detector))])


def parsed(name: str, answer: str) -> Answer:
    """Return the text and calls of a whole answer."""
    text, calls = made(name).parse_non_stream(answer)
    return text.strip(), [(call.name or "", json.loads(call.parameters or "{}")) for call in calls]


def test_every_parser_has_its_format() -> None:
    assert sorted(WRITERS) == PARSERS


@pytest.mark.parametrize("name", PARSERS)
def test_a_stream_equals_the_parsed_answer(name: str) -> None:
    _, is_wrong = OWN.get(name, ("", never))
    _, is_cut = CUT.get(name, ("", never))
    for text, calls in samples(name):
        answer, meant = WRITERS[name](text, calls), (text.strip(), calls)
        if calls and name != "gigachat3":
            assert parsed(name, answer) == meant
        if not is_wrong(text, calls):
            parts = PIECE.findall(answer) if is_cut(text, calls) else units(answer)
            for increments in cuts(parts):
                assert streamed(name, increments) == meant, increments


@pytest.mark.parametrize("name", sorted(OWN))
def test_faults_of_sglangs_parsers(name: str) -> None:
    """If this fails, SGLang has fixed the parser: remove the parser from `OWN`."""
    _, is_wrong = OWN[name]
    for text, calls in samples(name):
        if is_wrong(text, calls):
            tokens = PIECE.findall(WRITERS[name](text, calls))
            with contextlib.suppress(json.JSONDecodeError):
                assert streamed(name, tokens, stock_chunk) != (text.strip(), calls)


@pytest.mark.parametrize("name", sorted(CUT))
def test_faults_of_sglangs_parsers_at_cuts(name: str) -> None:
    """If this fails, SGLang has fixed the parser: remove the parser from `CUT`."""
    text = TEXTS[1]
    assert streamed(name, units(WRITERS[name](text, [])), stock_chunk) != (text.strip(), [])


def test_sglangs_parser_loses_calls() -> None:
    """If this fails, SGLang has fixed its parsers: remove `parse_calls`."""
    answer = WRITERS["qwen25"]("", [NOW, WEATHER])
    assert streamed("qwen25", [answer], stock_chunk) != ("", [NOW, WEATHER])


@pytest.mark.parametrize("calls", [[NOW], [WEATHER], [PUT]])
def test_mistral_arrays_of_one_call_are_streamed(calls: list[Call]) -> None:
    """SGLang streams only the first call of an array, even with one token per increment. So one call is tested."""
    for increments in cuts(units(MISTRAL_ARRAY("", calls))):
        assert streamed("mistral", increments) == ("", calls)
    both = PIECE.findall(MISTRAL_ARRAY("", [*calls, NOW]))
    assert streamed("mistral", both, stock_chunk)[1] == calls


@pytest.mark.parametrize("calls", CALLS[1:])
def test_required_calls_need_no_pieces(calls: list[Call]) -> None:
    """If a request requires a tool call, SGLang parses it with `JsonArrayParser`, which loses nothing.

    If this fails, `JsonArrayParser.parse_streaming_increment` needs a hook as well.
    """
    for increments in cuts(units(ARRAY("", calls))):
        parser = JsonArrayParser()
        parts = [parser.parse_streaming_increment(one, TOOLS) for one in increments]
        found = assembled((part.normal_text, part.calls) for part in [*parts, parser.finish(TOOLS)])
        assert found[1] == calls, increments


def test_text_is_unchanged_without_tools() -> None:
    parser = FunctionCallParser([], "qwen25")
    assert ours_chunk(parser, "a <tool_call> b, {") == ("a <tool_call> b, {", [])


@given(st.text() | st.text(alphabet="<>|/[]{} \n\"',:｜▁aZ_1"))
def test_pieces_join_to_the_whole_text(text: str) -> None:
    assert "".join(PIECE.findall(text)) == text


def test_pieces_are_about_as_long_as_tokens() -> None:
    text = '\n<tool_call>\n{"name": "f", "arguments": {}}</tool_call> (a < b)'
    assert PIECE.findall(text) == [
        *("\n", "<tool_call>", '\n{"', "name", '":', ' "', "f", '",', ' "', "arguments", '":', " {}}"),
        *("</tool_call>", " (", "a", " <", " b", ")"),
    ]


def item(i: int, name: str | None, arguments: str) -> ToolCallItem:
    return ToolCallItem(tool_index=i, name=name, parameters=arguments)


def test_arguments_of_one_call_are_one_event() -> None:
    calls = [item(0, "f", ""), item(0, None, "{"), item(0, None, "}"), item(1, "g", "{}"), item(1, "g", "{}")]
    assert joined(calls) == [item(0, "f", "{}"), item(1, "g", "{}"), item(1, "g", "{}")]
    assert calls[0].parameters == ""


def thoughts(name: str, thought: str, answer: str) -> str:
    """Return a thought and an answer as models with this reasoning parser write them."""
    match name:
        case "gpt-oss" | "beam" | "response_template":
            rest_of_answer = f"<|channel|>final<|message|>{answer}<|return|>"
            return f"<|channel|>analysis<|message|>{thought}<|end|><|start|>assistant{rest_of_answer}"
        case "muse":
            return f" to=self<|message|>{thought}<|eom|><|start|>assistant to=user<|message|>{answer}<|eot|>"
        case "inkling":
            rest_of_answer = f"<|message_model|><|content_text|>{answer}<|end_message|>"
            return f"<|message_model|><|content_thinking|>{thought}<|end_message|>{rest_of_answer}"
        case "kimi_k3":
            rest_of_answer = f"<|open|>response<|sep|>{answer}<|close|>response<|sep|><|close|>message<|sep|>"
            return f"<|open|>think<|sep|>{thought}<|close|>think<|sep|>{rest_of_answer}"
        case "cohere_command4":
            return f"<|START_THINKING|>{thought}<|END_THINKING|><|START_TEXT|>{answer}<|END_TEXT|>"
    marks = reasoning(name).detector
    return f"{marks.think_start_token}{thought}{marks.think_end_token}{answer}"


def reasoning(name: str) -> ReasoningParser:
    return ReasoningParser(name, tokenizer=TEMPLATED if name == "response_template" else None)


THOUGHT, ANSWER = "Let me think.\n5 < 7, {x}", "It is [5] {x}, a < b."


def thought(name: str, increments: Iterable[str], parse: Callable[..., Any]) -> tuple[str, ...]:
    parser = reasoning(name)
    parts = [*(parse(parser, increment) for increment in increments), parser.parse_stream_end()]
    return tuple("".join(part[i] or "" for part in parts) for i in range(2))


def ours_thought(parser: ReasoningParser, text: str) -> tuple[str | None, str | None]:
    return parse_thoughts(ReasoningParser.parse_stream_chunk, parser, text)


@pytest.mark.parametrize("name", sorted(ReasoningParser.DetectorMap))
def test_streamed_thoughts_do_not_depend_on_cuts(name: str) -> None:
    parts = units(thoughts(name, THOUGHT, ANSWER))
    (one,) = {thought(name, increments, ours_thought) for increments in cuts(parts)}
    assert THOUGHT in "".join(one)
    assert one[1].endswith(ANSWER)


def test_sglangs_parser_loses_an_answer() -> None:
    """If this fails, SGLang has fixed its parser: remove `parse_thoughts`."""
    whole = thoughts("cohere_command4", THOUGHT, ANSWER)
    assert thought("cohere_command4", [whole], ReasoningParser.parse_stream_chunk)[1] == ""
