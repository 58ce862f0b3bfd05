"""Conversations as SGLang renders them with a chat template, split into the assistant's turns and all other text.

SGLang drops null fields, replaces null content by an empty text, and decodes the arguments of tool calls. It passes
tools to the template with all fields of its `Tool` class, even unset ones, and the fields of `chat_template_kwargs` as
variables.
"""

import json
from collections.abc import Iterable, Sequence
from typing import Any

from jinja2 import TemplateError
from transformers import PreTrainedTokenizerBase

from sglang_dflash.engine.host import contract
from sglang_dflash.engine.host.names import SECTIONS

Message = dict[str, Any]
Part = tuple[str, bool]  # text, and whether it is a response

LINE_KEYS = ("messages", "tools", "chat_template_kwargs")
USER_KEYS = ("role", "content")
MESSAGE_KEYS = (*USER_KEYS, "name", "reasoning_content", "tool_calls", "tool_call_id")


def parsed(line: str) -> Any:
    """Parse a line of a .jsonl file, or raise ValueError."""
    try:
        return json.loads(line)
    except json.JSONDecodeError as error:
        raise ValueError(f"not JSON ({error.msg} at character {error.pos + 1}); write one object per line") from error


def require_keys(found: Iterable[str], allowed: Sequence[str], where: str) -> None:
    """Check that all keys are known, because unknown keys would be ignored.

    Args:
        where: the object's name in the error message.
    Raises:
        ValueError: a key is not in `allowed`.
    """
    for key in found:
        if key not in allowed:
            raise ValueError(f"unknown key {key!r} in {where}; take it out, or use one of {', '.join(allowed)}")


def require_line(row: dict[str, Any]) -> None:
    """Check the keys of a line with a conversation, and the types of their values.

    Raises:
        ValueError: a key is unknown, or a value has the wrong type.
    """
    require_keys(row, LINE_KEYS, "a line with messages")
    require_objects(row["messages"], "messages")
    if not isinstance(row.get("tools") or [], list):
        raise ValueError(f"'tools' is {row['tools']!r:.60}; it must be a list")
    if not isinstance(row.get("chat_template_kwargs") or {}, dict):
        raise ValueError(f"'chat_template_kwargs' is {row['chat_template_kwargs']!r:.60}; it must be an object")


def require_objects(value: Any, name: str) -> None:
    """Check that the value of the key `name` is a list of objects, or raise ValueError."""
    if not isinstance(value, list):
        raise ValueError(f"{name!r} is {value!r:.60}; it must be a list of objects")
    for number, entry in enumerate(value, start=1):
        if not isinstance(entry, dict):
            raise ValueError(f"entry {number} of {name!r} is {entry!r:.60}; it must be an object")


def parts(row: dict[str, Any], tokenizer: PreTrainedTokenizerBase) -> list[Part]:
    """Render a conversation with the chat template and split it into (text, is response) parts.

    Args:
        row: a line of the file: messages, optionally tools and chat_template_kwargs.

    Raises:
        ValueError: the target has no chat template, the template rejects the line, the line is invalid, or the template
            renders a turn of the assistant in two ways.
        HostMismatch: the line has tools, and the installed SGLang lacks a required name, see `contract.check`.
    """
    if tokenizer.chat_template is None:
        raise ValueError('this target has no chat template; give {"prompt", "response"} instead of {"messages"}')
    require_line(row)
    messages = [served(message) for message in row["messages"]]
    tools = served_tools(row.get("tools") or [])
    variables = row.get("chat_template_kwargs") or {}

    def written(n: int, *, ask: bool) -> str:
        return render(tokenizer, messages[:n], tools, variables | {"add_generation_prompt": ask})

    whole, found, end = written(len(messages), ask=False), [], 0
    for i, message in enumerate(messages):
        if message["role"] != "assistant":
            continue
        asked, answered = written(i, ask=True), written(i + 1, ask=False)
        if not whole.startswith(answered):
            raise ValueError(
                "the chat template writes an assistant turn differently once later turns follow; give each answer with "
                'its rendered conversation, as {"prompt", "response"}'
            )
        if not answered.startswith(asked):
            raise ValueError(
                "the chat template's generation prompt is not the beginning of an answer (as with <think>); give the "
                'rendered text as {"prompt", "response"}, or set chat_template_kwargs such as enable_thinking'
            )
        found += [(whole[end : len(asked)], False), (whole[len(asked) : len(answered.rstrip())], True)]
        end = len(answered.rstrip())
    return found


def rendered_prompt(row: dict[str, Any], tokenizer: PreTrainedTokenizerBase) -> str:
    """Render a conversation that has no answer yet, followed by the header of the answer."""
    variables = (row.get("chat_template_kwargs") or {}) | {"add_generation_prompt": True}
    return render(tokenizer, [served(message) for message in row["messages"]], [], variables)


def render(
    tokenizer: PreTrainedTokenizerBase, messages: list[Message], tools: list[dict[str, Any]], variables: dict[str, Any]
) -> str:
    """Render the chat template. If the template fails with `tools`, render it with their `function` objects.

    Raises:
        ValueError: the template rejects the messages.
    """

    def applied(tools: Any) -> str:
        try:
            return str(tokenizer.apply_chat_template(messages, tokenize=False, tools=tools, **variables))
        except (TemplateError, TypeError, KeyError) as error:
            reason = error if isinstance(error, TemplateError) else f"{type(error).__name__}: {error}"
            raise ValueError(f"the chat template rejects the messages ({reason}); change or remove the line") from error

    try:
        return applied(tools or None)
    except ValueError:
        if not tools:
            raise
        return applied([tool["function"] for tool in tools])


def served(message: Message) -> Message:
    """Return a message as SGLang passes it to the chat template.

    Raises:
        ValueError: a key is unknown, the message has no role, the content is no text, or a tool call is invalid.
    """
    if not isinstance(message.get("role"), str):
        raise ValueError(f'found the message {str(message)[:60]} without a role; add one, such as "role": "user"')
    found = {"role": message["role"]} | {key: value for key, value in message.items() if value is not None}
    is_user = found["role"] == "user"
    require_keys(found, USER_KEYS if is_user else MESSAGE_KEYS, f"a message of role {found['role']!r}")
    content = found.setdefault("content", "")
    if not isinstance(content, str):
        raise ValueError(f"the content of a message is {content!r:.60}; it must be a text, or null")
    if "tool_calls" in found:
        require_objects(found["tool_calls"], "tool_calls")
        found["tool_calls"] = [served_call(call, decode=found["role"] == "assistant") for call in found["tool_calls"]]
    return found


def served_call(call: dict[str, Any], *, decode: bool) -> dict[str, Any]:
    """Return a tool call as SGLang passes it to the chat template; `decode`: parse its arguments.

    Raises:
        ValueError: a key is unknown, there is no function, or the arguments are no JSON object.
    """
    require_keys(call, ("id", "index", "type", "function"), "a tool call")
    if not isinstance(call.get("function"), dict):
        raise ValueError(
            f"the tool call {str(call)[:60]} has no function that is an object; add one with name and arguments"
        )
    require_keys(call["function"], ("name", "arguments"), "the function of a tool call")
    arguments = call["function"].get("arguments")
    if not isinstance(arguments, str | dict | None):
        raise ValueError(f"the arguments of a tool call are {str(arguments)[:60]}; they must be a JSON object")
    if decode and isinstance(arguments, str):
        arguments = json_object(arguments)
    function = {"name": call["function"].get("name"), "arguments": arguments}
    return {"id": call.get("id"), "index": call.get("index"), "type": "function", "function": function}


def json_object(text: str) -> dict[str, Any]:
    """Parse the arguments of a tool call, or raise ValueError if they are no JSON object."""
    wrong = ValueError(f"the arguments of a tool call are {text[:60]!r}; they must be a JSON object")
    try:
        found = json.loads(text)
    except json.JSONDecodeError:
        raise wrong from None
    if not isinstance(found, dict):
        raise wrong
    return found


def served_tools(tools: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Return tools as SGLang passes them to the chat template.

    Raises:
        ValueError: an entry of `tools` is no tool of the OpenAI API.
        HostMismatch: the installed SGLang lacks a required name.
    """
    if not tools:
        return []
    contract.check(SECTIONS["training"])
    from pydantic import ValidationError
    from sglang.srt.entrypoints.openai.protocol import Tool

    try:
        return [Tool.model_validate(tool).model_dump() for tool in tools]
    except ValidationError as error:
        first = error.errors()[0]
        what = ": ".join(filter(None, [".".join(map(str, first["loc"])), first["msg"]]))
        raise ValueError(f"a tool is not as in the OpenAI API ({what}); correct it or remove the line") from error
