"""Answers with tool calls, written by hand in the format of each of SGLang's tool-call parsers.

`WRITERS[parser](text, calls)` returns an answer that has `text`, then `calls`, in the format of SGLang's `parser`.
"""

import json
from collections.abc import Callable, Sequence
from typing import Any

Arguments = dict[str, Any]
Call = tuple[str, Arguments]
Writer = Callable[[str, Sequence[Call]], str]
Written = Callable[[Arguments], str]


def js(value: Any) -> str:
    return json.dumps(value, ensure_ascii=False)


def between_tags(value: Any) -> str:
    return value if isinstance(value, str) else js(value)


def tags(form: str) -> Written:
    """Return a function that writes each argument as `form`, with KEY, VALUE, TYPE and IS_STRING replaced."""

    def write(arguments: Arguments) -> str:
        parts = []
        for key, value in arguments.items():
            is_string = isinstance(value, str)
            named = form.replace("KEY", key).replace("IS_STRING", js(is_string))
            typed = named.replace("TYPE", "string" if is_string else "object")
            parts.append(typed.replace("VALUE", between_tags(value)))
        return "".join(parts)

    return write


def each(form: str, *, start: str = "", end: str = "", between: str = "", arguments: Written = js) -> Writer:
    """Return a writer of calls as `form`, with NAME, ARGUMENTS and NUMBER replaced, all between `start` and `end`."""

    def write(text: str, calls: Sequence[Call]) -> str:
        written = [
            form.replace("NAME", name).replace("NUMBER", str(i)).replace("ARGUMENTS", arguments(given))
            for i, (name, given) in enumerate(calls)
        ]
        return text + (start + between.join(written) + end if calls else "")

    return write


def python(arguments: Arguments) -> str:
    return ", ".join(f"{key}={value!r}" for key, value in arguments.items())


def gemma(value: Any) -> str:
    match value:
        case dict():
            return "{" + ",".join(f"{key}:{gemma(item)}" for key, item in value.items()) + "}"
        case list():
            return "[" + ",".join(map(gemma, value)) + "]"
        case str():
            return f'<|"|>{value}<|"|>'
    return js(value)


M3 = "]<]minimax[>["


def minimax(value: Any) -> str:
    match value:
        case dict():
            return "".join(f"{M3}<{key}>{minimax(item)}{M3}</{key}>" for key, item in value.items())
        case list():
            return "".join(f"{M3}<item>{minimax(item)}{M3}</item>" for item in value)
    return between_tags(value)


def dsml(block: str, space: str = "", mark: str = "｜DSML｜") -> Writer:
    parameter = f'<{mark}{space}parameter name="KEY" string="IS_STRING">VALUE</{mark}{space}parameter>\n'
    return each(
        f'<{mark}{space}invoke name="NAME">\nARGUMENTS</{mark}{space}invoke>\n',
        start=f"<{mark}{space}{block}>\n",
        end=f"</{mark}{space}{block}>",
        arguments=tags(parameter),
    )


def apertus(text: str, calls: Sequence[Call]) -> str:
    listed = ", ".join(js({name: arguments}) for name, arguments in calls)
    return text + (f"<|tools_prefix|>[{listed}]<|tools_suffix|>" if calls else "")


def harmony(text: str, calls: Sequence[Call]) -> str:
    if not calls:
        return f"<|channel|>final<|message|>{text}<|return|>"
    call = each(
        "<|start|>assistant<|channel|>commentary to=functions.NAME<|constrain|>json<|message|>ARGUMENTS<|call|>"
    )
    return call(f"<|channel|>commentary<|message|>{text}<|end|>", calls)


def beam(_: str, calls: Sequence[Call]) -> str:
    """Write calls only: this format has no text before a call except thoughts, which another parser reads."""
    return each(
        " to=NAME<|channel|>analysis <|constrain|>xml<|message|>ARGUMENTS",
        between="<|end|><|start|>assistant",
        end="<|call|>",
        arguments=tags('<rfl:parameter name="KEY">\nVALUE\n</rfl:parameter>'),
    )("", calls)


def muse(text: str, calls: Sequence[Call]) -> str:
    message = f" to=user<|message|>{text}" if text or not calls else ""
    body = '<atem:function_calls>\n<atem:invoke name="NAME">\nARGUMENTS</atem:invoke>\n</atem:function_calls>'
    call = each(
        f" to=NAME<|message|>{body}",
        start="<|eom|><|start|>assistant" if message else "",
        between="<|eom|><|start|>assistant",
        arguments=tags('<atem:parameter name="KEY">VALUE</atem:parameter>\n'),
    )
    return call(message, calls) + "<|eot|>"


def kimi_k3(text: str, calls: Sequence[Call]) -> str:
    call = each(
        '<|open|>call tool="NAME" index="NUMBER"<|sep|>ARGUMENTS<|close|>call<|sep|>',
        start="<|open|>tools<|sep|>",
        end="<|close|>tools<|sep|>",
        arguments=tags('<|open|>argument key="KEY" type="TYPE"<|sep|>VALUE<|close|>argument<|sep|>'),
    )
    return call(f"<|open|>response<|sep|>{text}<|close|>response<|sep|>", calls) + "<|close|>message<|sep|>"


def pairs(space: str, tag: str = "arg_") -> Written:
    return tags(f"<{tag}key>KEY</{tag}key>{space}<{tag}value>VALUE</{tag}value>{space}")


OBJECT = '{"name": "NAME", "arguments": ARGUMENTS}'
OBJECT_2 = '{"name": "NAME", "parameters": ARGUMENTS}'
GLM = each("<tool_call>NAME\nARGUMENTS</tool_call>", between="\n", arguments=pairs("\n"))
QWEN = each(f"<tool_call>\n{OBJECT}\n</tool_call>", between="\n")
CODER = each(
    "<tool_call>\n<function=NAME>\nARGUMENTS</function>\n</tool_call>", between="\n",
    arguments=tags("<parameter=KEY>\nVALUE\n</parameter>\n"),
)  # fmt: skip
DEEPSEEK = {"start": "<｜tool▁calls▁begin｜>", "end": "<｜tool▁calls▁end｜>"}
INVOKE = {
    "form": '<invoke name="NAME">\nARGUMENTS</invoke>\n',
    "arguments": tags('<parameter name="KEY">VALUE</parameter>\n'),
}

WRITERS: dict[str, Writer] = {
    "apertus2509": apertus,
    "beam": beam,
    "cohere_command4": each(
        '{"tool_call_id": "NUMBER", "tool_name": "NAME", "parameters": ARGUMENTS}', start="<|START_ACTION|>[\n",
        end="\n]<|END_ACTION|>", between=",\n",
    ),
    "deepseekv3": each(
        "<｜tool▁call▁begin｜>function<｜tool▁sep｜>NAME\n```json\nARGUMENTS\n```<｜tool▁call▁end｜>", between="\n",
        **DEEPSEEK,
    ),
    "deepseekv31": each("<｜tool▁call▁begin｜>NAME<｜tool▁sep｜>ARGUMENTS<｜tool▁call▁end｜>", **DEEPSEEK),
    "deepseekv32": dsml("function_calls"),
    "deepseekv4": dsml("tool_calls"),
    "deepseekv41": dsml("calls", space=" "),
    "dots": each(start="<dots_function_call>\n", end="</dots_function_call>", **INVOKE),
    "gemma4": each("<|tool_call>call:NAMEARGUMENTS<tool_call|>", arguments=gemma),
    "gigachat3": each(OBJECT, start="<|message_sep|>\n\nfunction call<|role_sep|>\n"),
    "gigachat35": dsml("tool_calls", mark="｜GCML｜"),
    "glm": GLM,
    "glm45": GLM,
    "glm47": each("<tool_call>NAMEARGUMENTS</tool_call>", arguments=pairs("")),
    "gpt-oss": harmony,
    "hermes": each(f"<tool_call>{OBJECT}</tool_call>", between="\n"),
    "hunyuan": each(
        "<tool_call>NAME<tool_sep>\nARGUMENTS</tool_call>\n", start="<tool_calls>\n", end="</tool_calls>",
        arguments=pairs("\n"),
    ),
    "inkling": each('<|message_model|>NAME<|content_invoke_tool_json|>{"name":"NAME","args":ARGUMENTS}<|end_message|>'),
    "interns1": each(f"<|action_start|> <|plugin|>\n{OBJECT_2}<|action_end|>", between="\n"),
    "iquest_q1": each("<iquest_tool_call>NAMEARGUMENTS</iquest_tool_call>", arguments=pairs("")),
    "k2_horizon": each(
        "<ifm|tool_call>NAME\nARGUMENTS</ifm|tool_call>\n", start="<ifm|tool_calls>\n", end="</ifm|tool_calls>",
        arguments=pairs("\n", "ifm|arg_"),
    ),
    "kimi_k2": each(
        "<|tool_call_begin|>functions.NAME:NUMBER<|tool_call_argument_begin|>ARGUMENTS<|tool_call_end|>",
        start="<|tool_calls_section_begin|>", end="<|tool_calls_section_end|>",
    ),
    "kimi_k3": kimi_k3,
    "lfm2": each(
        "NAME(ARGUMENTS)", start="<|tool_call_start|>[", end="]<|tool_call_end|>", between=", ", arguments=python
    ),
    "ling3": GLM,
    "llama3": each(OBJECT_2, start="<|python_tag|>", between=";"),
    "mimo": each(
        "<tool_call>\n<function=NAME>\nARGUMENTS</function>\n</tool_call>", between="\n",
        arguments=tags("<parameter=KEY>VALUE</parameter>\n"),
    ),
    "minicpm5": each(
        '<function name="NAME">ARGUMENTS</function>', between="\n", arguments=tags('<param name="KEY">VALUE</param>')
    ),
    "minimax-m2": each(start="<minimax:tool_call>\n", end="</minimax:tool_call>", **INVOKE),
    "minimax-m3": each(
        f'{M3}<invoke name="NAME">ARGUMENTS{M3}</invoke>\n', start=f"{M3}<tool_call>\n", end=f"{M3}</tool_call>",
        arguments=minimax,
    ),
    "mistral": each("[TOOL_CALLS]NAME[ARGS]ARGUMENTS"),
    "muse": muse,
    "nanbeige": CODER,
    "poolside_v1": GLM,
    "pythonic": each("NAME(ARGUMENTS)", start="[", end="]", between=", ", arguments=python),
    "qwen": QWEN,
    "qwen25": QWEN,
    "qwen3_coder": CODER,
    "response_template": beam,
    "spark25": each("<tool_call>NAME\nARGUMENTS\n</tool_call>", between="\n", arguments=pairs("")),
    "step3": each(
        '<｜tool_call_begin｜>function<｜tool_sep｜><steptml:invoke name="NAME">\nARGUMENTS</steptml:invoke>'
        "<｜tool_call_end｜>\n",
        start="<｜tool_calls_begin｜>\n",
        end="<｜tool_calls_end｜>",
        arguments=tags('<steptml:parameter name="KEY">VALUE</steptml:parameter>\n'),
    ),
    "step3p5": CODER,
    "trinity": QWEN,
}  # fmt: skip
# Format of older Mistral models, and format of answers that must be tool calls (`tool_choice`).
MISTRAL_ARRAY = each(OBJECT, start="[TOOL_CALLS] [", end="]", between=", ")
ARRAY = each(OBJECT_2, start="[", end="]", between=", ")
