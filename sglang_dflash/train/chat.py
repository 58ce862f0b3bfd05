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

from sglang_dflash.host import contract
from sglang_dflash.host.names import SECTIONS

Message = dict[str, Any]
Part = tuple[str, bool]  # text, and whether it is a response

LINE_KEYS = ("messages", "tools", "chat_template_kwargs")
USER_KEYS = ("role", "content")
MESSAGE_KEYS = (*USER_KEYS, "name", "reasoning_content", "tool_calls", "tool_call_id")


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
    if not isinstance(row["messages"], list) or not all(isinstance(message, dict) for message in row["messages"]):
        raise ValueError("'messages' must be a list of objects")
    if not isinstance(row.get("tools") or [], list):
        raise ValueError(f"'tools' is {str(row['tools'])[:60]}; it must be a list")
    if not isinstance(row.get("chat_template_kwargs") or {}, dict):
        raise ValueError(f"'chat_template_kwargs' is {str(row['chat_template_kwargs'])[:60]}; it must be an object")


def parts(row: dict[str, Any], tokenizer: PreTrainedTokenizerBase) -> list[Part]:
    """Render a conversation with the chat template and split it into (text, is response) parts.

    Args:
        row: a line of the file: messages, optionally tools and chat_template_kwargs.

    Raises:
        ValueError: the target has no chat template, the template rejects the line, the line is invalid, or the template
            renders earlier turns differently if later ones follow.
        TypeError, KeyError: the template fails on the line.
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
        if not (whole.startswith(answered) and answered.startswith(asked)):
            raise ValueError(
                "the chat template writes earlier turns differently once later ones follow; "
                "split the conversation so that the assistant speaks last"
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
        TypeError, KeyError: the template fails on them.
    """

    def applied(tools: Any) -> str:
        try:
            return str(tokenizer.apply_chat_template(messages, tokenize=False, tools=tools, **variables))
        except TemplateError as error:
            raise ValueError(f"the chat template rejects the messages: {error}") from error

    try:
        return applied(tools or None)
    except (TypeError, KeyError, ValueError):
        if not tools:
            raise
        return applied([tool["function"] for tool in tools])


def served(message: Message) -> Message:
    """Return a message as SGLang passes it to the chat template.

    Raises:
        ValueError: a key is unknown, the content is no text, or a tool call's arguments are no JSON object.
        KeyError: the message has no role.
    """
    found = {"role": message["role"]} | {key: value for key, value in message.items() if value is not None}
    is_user = found["role"] == "user"
    require_keys(found, USER_KEYS if is_user else MESSAGE_KEYS, f"a message of role {found['role']!r}")
    content = found.setdefault("content", "")
    if not isinstance(content, str):
        raise ValueError(f"the content of a message is {str(content)[:60]!r}; it must be a text, or null")
    if "tool_calls" in found:
        found["tool_calls"] = [served_call(call, decode=found["role"] == "assistant") for call in found["tool_calls"]]
    return found


def served_call(call: dict[str, Any], *, decode: bool) -> dict[str, Any]:
    """Return a tool call as SGLang passes it to the chat template; `decode`: parse its arguments.

    Raises:
        ValueError: a key is unknown, or the arguments are no JSON object.
        KeyError: the tool call has no function.
    """
    require_keys(call, ("id", "index", "type", "function"), "a tool call")
    require_keys(call["function"], ("name", "arguments"), "the function of a tool call")
    arguments = call["function"].get("arguments")
    if decode and isinstance(arguments, str):
        arguments = json.loads(arguments)
        if not isinstance(arguments, dict):
            raise ValueError(f"the arguments of a tool call are {arguments!r}; they must be a JSON object")
    function = {"name": call["function"].get("name"), "arguments": arguments}
    return {"id": call.get("id"), "index": call.get("index"), "type": "function", "function": function}


def served_tools(tools: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Return tools as SGLang passes them to the chat template.

    Raises:
        ValueError: an entry of `tools` is no tool of the OpenAI API.
    """
    if not tools:
        return []
    contract.check(SECTIONS["training"])
    from sglang.srt.entrypoints.openai.protocol import Tool

    return [Tool.model_validate(tool).model_dump() for tool in tools]
