"""Terminal demo: the display of steps, and the counts of an answer."""

from collections.abc import Callable
from io import StringIO
from types import SimpleNamespace
from typing import Any

import pytest
from rich.console import Console
from tokenizers import Tokenizer

from sglang_dflash.pairs.servers.errors import ServerError
from sglang_dflash.tools.demo import terminal
from sglang_dflash.tools.demo.ask import Answer, Step, ask
from sglang_dflash.tools.demo.pairs import tiny_show
from sglang_dflash.tools.demo.terminal import Painter, compare, summary

STEPS = [Step("", 0), Step("a", 1), Step("bcd", 3), Step("b", 1), Step("cd", 2), Step("a", 2)]


def test_accepted_drafts_are_bracketed_without_colours(letters: Tokenizer) -> None:
    out = StringIO()
    painter = Painter(Console(file=out), letters)
    for step in STEPS:
        painter.show(step)
    # The steps: prefill (one token), two drafts + bonus, bonus alone, draft + bonus, draft + end token without text.
    assert out.getvalue() == "a[bc]db[c]d[a]"


def test_each_step_has_its_own_colour(letters: Tokenizer) -> None:
    out = StringIO()
    painter = Painter(Console(file=out, force_terminal=True, color_system="standard", no_color=False), letters)
    for step in STEPS[1:3] + STEPS[4:5]:
        painter.show(step)
    cyan, green, bold, end = "\x1b[36m", "\x1b[32m", "\x1b[1m", "\x1b[0m"
    assert out.getvalue() == f"{bold}a{end}{cyan}bc{end}{bold}d{end}{green}c{end}{bold}d{end}"


def test_the_last_row_of_the_summary_is_over_all_questions() -> None:
    on = [Answer("x", 40, 1.0, 5, 35), Answer("y", 60, 1.0, 5, 55)]
    off = [Answer("x", 40, 2.0, 0, 0), Answer("y", 60, 3.0, 0, 0)]
    out = StringIO()
    Console(file=out, width=120).print(summary(list(zip(("one", "two"), on, off, strict=True))))
    last = out.getvalue().split("\n")[-3]
    # tokens, steps, (90 accepted + 10 bonus) / 10 steps, tokens/s with (100 / 2 s) and without (100 / 5 s) speculation
    assert last.split() == ["all", "100", "10", "10.0", "50", "20", "2.5x"]


def test_different_answers_of_equal_length_are_reported(letters: Tokenizer, monkeypatch: pytest.MonkeyPatch) -> None:
    """The texts differ only in their last letter and have four tokens each."""
    texts = {"with": "abcd", "without": "abcd"}

    def answer(client: str, messages: object, show: Callable[[Step], None]) -> Answer:
        show(Step(texts[client], 4))
        return Answer(texts[client], 4, 1.0, 1, 3)

    monkeypatch.setattr(terminal, "ask", answer)
    on, off = (SimpleNamespace(openai=lambda side=side: side) for side in texts)
    assert len(compare(on, off, tiny_show(), Console(file=StringIO()), letters)) == 4
    texts["without"] = "abca"
    with pytest.raises(ServerError, match=r"differ after 3 tokens, which is a bug to report. Without .*\nabca"):
        compare(on, off, tiny_show(), Console(file=StringIO()), letters)


def chunk(text: str | None, n_tokens: int | None, **extra: Any) -> Any:
    """Return a chunk of a stream.

    SGLang sends step counters in a chunk without choices, and the token count in every chunk with text.
    """
    choices = [] if text is None else [SimpleNamespace(delta=SimpleNamespace(content=text))]
    usage = None if n_tokens is None else SimpleNamespace(completion_tokens=n_tokens)
    return SimpleNamespace(choices=choices, usage=usage, model_extra=extra)


COUNTERS = {"spec_verify_ct": 2, "spec_num_correct_drafts": 5}
CHUNKS = [
    chunk("", None),
    chunk("a", 1),
    chunk("bcd", 4),
    chunk("efgh", 8),
    chunk(None, None, sglext={"spec_tokens_details": COUNTERS}),
    chunk(None, 8),
]


def asked(*chunks: Any) -> tuple[Answer, list[Step], dict[str, Any]]:
    request_sent, shown = dict[str, Any](), list[Step]()

    def create(**request: Any) -> Any:
        request_sent.update(request)
        return iter(chunks)

    client: Any = SimpleNamespace(chat=SimpleNamespace(completions=SimpleNamespace(create=create)))
    return ask(client, "Why?", shown.append, rid="one"), shown, request_sent


def test_chunks_are_steps_and_the_last_ones_have_the_counts() -> None:
    answer, shown, request_sent = asked(*CHUNKS)
    assert shown == [Step("a", 1), Step("bcd", 3), Step("efgh", 4)]
    assert (answer.text, answer.n_tokens, answer.n_steps, answer.n_accepted) == ("abcdefgh", 8, 2, 5)
    assert answer.committed_per_step == 1 + 5 / 2
    assert request_sent["messages"] == [{"role": "user", "content": "Why?"}]
    assert request_sent["extra_body"]["rid"] == "one"
    assert request_sent["stream_options"] == {"include_usage": True, "continuous_usage_stats": True}


def test_a_server_without_speculation_commits_one_token_per_step() -> None:
    answer, _, _ = asked(*CHUNKS[:4])
    assert (answer.n_steps, answer.n_accepted, answer.committed_per_step) == (0, 0, 1.0)
