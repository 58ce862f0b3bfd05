"""What the demo shows of a step."""

from collections.abc import Callable
from io import StringIO
from types import SimpleNamespace

import pytest
from rich.console import Console
from tokenizers import Tokenizer
from tokenizers.models import WordLevel
from tokenizers.pre_tokenizers import Split

from sglang_dflash.demo import terminal
from sglang_dflash.demo.ask import Answer, Step, questions
from sglang_dflash.demo.terminal import Painter, compare, summary
from sglang_dflash.servers.errors import ServerError

VOCABULARY = {"a": 0, "b": 1, "c": 2, "d": 3}


@pytest.fixture
def letters() -> Tokenizer:
    """One token per letter."""
    tokenizer = Tokenizer(WordLevel(VOCABULARY, unk_token="a"))
    tokenizer.pre_tokenizer = Split("", "isolated")
    return tokenizer


STEPS = [Step("", 0), Step("a", 1), Step("bcd", 3), Step("b", 1), Step("cd", 2), Step("a", 2)]


def test_without_colours_accepted_drafts_stand_in_brackets(letters: Tokenizer) -> None:
    out = StringIO()
    painter = Painter(Console(file=out), letters)
    for step in STEPS:
        painter.show(step)
    # the prefill's token; two drafts and a bonus; a bonus alone; a draft and a bonus; a draft and the end token
    assert out.getvalue() == "a[bc]db[c]d[a]"


def test_with_colours_each_step_has_its_own(letters: Tokenizer) -> None:
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
    # 100 tokens in 10 steps, (90 accepted + 10 bonus) / 10 steps, 50/s against 20/s
    assert last.split() == ["all", "100", "10", "10.0", "50", "20", "2.5x"]


def test_answers_of_the_same_length_that_differ_are_told(letters: Tokenizer, monkeypatch: pytest.MonkeyPatch) -> None:
    """The text is the same but for its last letter, and both are of four tokens."""
    said = {"with": "abcd", "without": "abcd"}

    def answer(client: str, messages: object, show: Callable[[Step], None]) -> Answer:
        show(Step(said[client], 4))
        return Answer(said[client], 4, 1.0, 1, 3)

    monkeypatch.setattr(terminal, "ask", answer)
    on, off = (SimpleNamespace(openai=lambda side=side: side) for side in said)
    assert len(compare(on, off, Console(file=StringIO()), letters)) == 4
    said["without"] = "abca"
    with pytest.raises(ServerError, match=r"the answer differs without speculation, .*\nabca"):
        compare(on, off, Console(file=StringIO()), letters)


def test_the_questions_are_held_out() -> None:
    from sglang_dflash.tiny.corpus import is_held_out

    assert len(questions()) == 4
    assert all(is_held_out(question) for _, question in questions())
