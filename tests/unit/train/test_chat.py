"""Chats that the chat template renders for training must equal SGLang's rendering in serving."""

import json
from typing import Any

import pytest
from jinja2 import TemplateError
from transformers import AutoTokenizer, PreTrainedTokenizerBase

from sglang_dflash.pairs.tiny.pairs import DENSE
from sglang_dflash.train import chat

# This template writes everything it receives.
EVERYTHING = (
    "{{ messages | tojson }}|{{ tools | tojson }}|{{ enable_thinking | default(7) }}|{{ add_generation_prompt }}"
)
TOOLS_AND_CALLS = (
    "{% for tool in tools or [] %}[{{ tool.function.name }}]{% endfor %}"
    "{% for m in messages %}<{{ m.role }}>{{ m.content }}"
    "{% for call in m.tool_calls or [] %}({{ call.function.name }} {{ call.function.arguments | tojson }}){% endfor %}"
    "</>{% endfor %}{% if add_generation_prompt %}<assistant>{% if enable_thinking is defined %}!{% endif %}{% endif %}"
)
CALL = {"id": "c1", "type": "function", "function": {"name": "f", "arguments": '{"city": "Rome", "days": [1, 2]}'}}
TOOL = {"type": "function", "function": {"name": "f", "parameters": {"type": "object", "properties": {}}}}
STRICT = {"function": {"strict": True, "description": "d", "name": "g"}}
MESSAGES: list[dict[str, Any]] = [
    {"role": "system", "content": "s", "name": None},
    {"role": "user", "content": "u"},
    {"role": "assistant", "content": None, "tool_calls": [CALL], "reasoning_content": "r"},
    {"role": "tool", "content": "20 degrees", "tool_call_id": "c1"},
    {"role": "assistant", "content": "It is warm."},
]


def tokenizer(template: str) -> PreTrainedTokenizerBase:
    found = AutoTokenizer.from_pretrained(DENSE.target)
    found.chat_template = template
    return found


def as_served(row: dict[str, Any], writer: PreTrainedTokenizerBase) -> str:
    """Return the prompt of SGLang's chat endpoint, made with SGLang's own functions."""
    from sglang.srt.entrypoints.openai import serving_chat as openai
    from sglang.srt.entrypoints.openai.protocol import ChatCompletionRequest

    request = ChatCompletionRequest(model="m", **row)
    messages = [message.model_dump() for message in request.messages]
    for message in messages:
        openai.normalize_assistant_tool_call_arguments(message)
        message["content"] = "" if message["content"] is None else message["content"]
    return writer.apply_chat_template(
        [openai.process_content_for_template_format(message, "string", [], [], [], []) for message in messages],
        tokenize=False,
        add_generation_prompt=True,
        tools=[tool.model_dump() for tool in request.tools] if request.tools else None,
        **(request.chat_template_kwargs or {}),
    )


@pytest.mark.parametrize("tools", [None, [], [TOOL], [STRICT, TOOL]], ids=["null", "none", "one", "two"])
def test_the_template_gets_the_same_input_as_in_sglang(tools: Any) -> None:
    row = {"messages": MESSAGES[:4], "tools": tools, "chat_template_kwargs": {"enable_thinking": False}}
    writer = tokenizer(EVERYTHING)
    messages, options = [*map(chat.served, MESSAGES[:4])], {"enable_thinking": False, "add_generation_prompt": True}
    ours = chat.render(writer, messages, chat.served_tools(tools or []), options)
    found, meant = (text.split("|") for text in (ours, as_served(row, writer)))
    assert json.loads(found[0]) == json.loads(meant[0])
    assert found[1:] == meant[1:]
    assert meant[2:] == ["False", "True"]


def test_tool_calls_and_results_are_rendered() -> None:
    row = {"messages": MESSAGES, "tools": [TOOL], "chat_template_kwargs": {"enable_thinking": False}}
    call = '(f {"city": "Rome", "days": [1, 2]})</>'
    assert chat.parts({"messages": MESSAGES, "tools": [TOOL]}, tokenizer(TOOLS_AND_CALLS)) == [
        ("[f]<system>s</><user>u</><assistant>", False),
        (call, True),
        ("<tool>20 degrees</><assistant>", False),
        ("It is warm.</>", True),
    ]
    with pytest.raises(
        ValueError, match="generation prompt is not the beginning of an answer"
    ):  # "!" is only in the prompt
        chat.parts(row, tokenizer(TOOLS_AND_CALLS))


def test_a_template_that_takes_functions_only() -> None:
    """If a template rejects tools, it gets only their `function` fields, as in SGLang."""
    template = "{% if tools[0].type is defined %}{{ raise_exception('no tools') }}{% endif %}{{ tools[0].name }}"
    writer = tokenizer(template)
    assert chat.render(writer, MESSAGES[1:2], chat.served_tools([TOOL]), {}) == "f"
    with pytest.raises(TemplateError, match="no tools"):
        writer.apply_chat_template(MESSAGES[1:2], tokenize=False, tools=[TOOL])


@pytest.mark.parametrize(
    ("message", "sentence"),
    [
        ({"role": "user", "content": "x", "name": "a"}, "key 'name' in a message of role 'user'; .* role, content"),
        ({"role": "assistant", "thoughts": "x"}, "unknown key 'thoughts' in a message of role 'assistant'"),
        ({"role": "user", "content": [{"type": "text", "text": "x"}]}, "content of a message is .* a text, or null"),
        ({"role": "assistant", "tool_calls": [{"function": {"arguments": "[1]"}}]}, "must be a JSON object"),
        ({"role": "assistant", "tool_calls": [{"function": {"arguments": [1]}}]}, "must be a JSON object"),
        (
            {"role": "assistant", "tool_calls": [{"function": {"arguments": "{"}}]},
            "are '{'; they must be a JSON object",
        ),
        ({"role": "assistant", "tool_calls": [{"id": "c"}]}, "the tool call .* has no function that is an object"),
        ({"role": "assistant", "tool_calls": "f"}, "'tool_calls' is 'f'; it must be a list of objects"),
        ({"content": "x"}, "found the message .* without a role; add one"),
        ({"role": "assistant", "tool_calls": [{"name": "f"}]}, "unknown key 'name' in a tool call"),
        ({"role": "assistant", "tool_calls": [{"function": {"args": {}}}]}, "unknown key 'args' in the function of a"),
    ],
)
def test_messages_that_serving_would_render_differently_are_refused(message: dict[str, Any], sentence: str) -> None:
    with pytest.raises(ValueError, match=sentence):
        chat.served(message)


def test_null_fields_are_dropped() -> None:
    assert chat.served({"role": "assistant", "content": None, "refusal": None}) == {"role": "assistant", "content": ""}


def test_a_tool_without_a_function_is_refused() -> None:
    with pytest.raises(ValueError, match=r"^a tool is not as in the OpenAI API \(function: Field required\); correct"):
        chat.served_tools([{"type": "function"}])


def test_messages_on_which_the_template_fails_are_refused() -> None:
    with pytest.raises(ValueError, match=r"rejects the messages \(TypeError: .*\); change or remove the line"):
        chat.render(tokenizer("{{ 'a' + 1 }}"), MESSAGES[:1], [], {})
