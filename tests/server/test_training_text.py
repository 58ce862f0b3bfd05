"""Training text has as many tokens as a server's prompt of the same conversation."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from transformers import AutoTokenizer

from sglang_dflash.tiny.pairs import HYBRID
from sglang_dflash.train import chat
from tests.server.lib.talk import post

TEMPLATE = (
    "{% if tools %}<|im_start|>system\n{% for tool in tools %}{{ tool | tojson }}\n{% endfor %}<|im_end|>\n{% endif %}"
    "{% for message in messages %}<|im_start|>{{ message.role }}\n"
    "{% if message.reasoning_content %}<think>{{ message.reasoning_content }}</think>{% endif %}{{ message.content }}"
    "{% for call in message.tool_calls or [] %}<tool_call>\n"
    '{"name": "{{ call.function.name }}", "arguments": {{ call.function.arguments | tojson }}}\n</tool_call>'
    "{% endfor %}"
    "<|im_end|>\n{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant\n"
    "{% if enable_thinking is defined and not enable_thinking %}<think>\n\n</think>\n\n{% endif %}{% endif %}"
)
WEATHER = {"name": "weather", "parameters": {"type": "object", "properties": {"city": {"type": "string"}}}}
TOOLS = [
    {"type": "function", "function": WEATHER},
    {"function": {"strict": True, "name": "now", "description": "Time."}},
]
CALL = {"id": "c", "type": "function", "function": {"name": "weather", "arguments": '{"city":"Rome",  "days": [1, 2]}'}}
ASKED = {"role": "user", "content": "How is the weather in Rome?"}
CALLED = {"role": "assistant", "content": None, "tool_calls": [CALL], "reasoning_content": "I look."}
TOLD = {"role": "tool", "content": "20 degrees", "tool_call_id": "c"}
LINES: dict[str, dict[str, Any]] = {
    "plain": {"messages": [{"role": "system", "content": "Be short."}, ASKED]},
    "tools": {"messages": [ASKED], "tools": TOOLS},
    "template arguments": {"messages": [ASKED], "chat_template_kwargs": {"enable_thinking": False}},
    "calls": {"messages": [ASKED, CALLED, TOLD], "tools": TOOLS},
}


@pytest.mark.parametrize("line", LINES.values(), ids=LINES)
def test_a_prompt_is_the_server_s(
    server: Callable, tmp_path_factory: pytest.TempPathFactory, line: dict[str, Any]
) -> None:
    path = tmp_path_factory.getbasetemp() / "tools.jinja"
    path.write_text(TEMPLATE)
    off = server("off", flags=["--chat-template", str(path)])
    served = post(off, "/v1/chat/completions", {"model": "default", "max_tokens": 1, **line}).json()
    tokenizer = AutoTokenizer.from_pretrained(HYBRID.target)
    tokenizer.chat_template = Path(path).read_text()
    answered = line["messages"] + [{"role": "assistant", "content": "It is warm."}]
    if "chat_template_kwargs" in line:  # what the template writes before an answer is part of the answer to learn
        answered[-1]["content"] = "<think>\n\n</think>\n\nIt is warm."
    *before, (response, _) = chat.parts(line | {"messages": answered}, tokenizer)
    prompt = "".join(text for text, _ in before)
    assert served["usage"]["prompt_tokens"] == len(tokenizer.encode(prompt, add_special_tokens=False))
    assert response == "It is warm.<|im_end|>"
