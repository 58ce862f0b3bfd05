"""The demo's page in Chromium shows two equal answers and the source of each token, and shows markup as text."""

import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from sglang_dflash.pairs.servers.ports import free_port
from tests.server.lib.browser import CHROMIUM, Page, opened

pytestmark = [pytest.mark.full, pytest.mark.skipif(CHROMIUM is None, reason="needs Chromium: apt-get install chromium")]
ANSWERED = "document.querySelector('#verdict').textContent"
MARKUP = "<img src=x onerror=window.broken=1></script><script>window.broken=1</script>"


@pytest.fixture(scope="module")
def page(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Page]:
    folder, port = tmp_path_factory.mktemp("demo"), free_port(29700)
    command = [sys.executable, "-m", "sglang_dflash", "demo", "--web", "--port", str(port), "--logs", str(folder)]
    with subprocess.Popen(
        [*command, "--web-port", str(port + 50)],
        env=os.environ | {"SGLANG_DFLASH_WIDTHS": "fixed"},  # on a busy machine `auto` may choose to draft nothing
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    ) as demo:
        assert demo.stdout is not None
        url = f"http://127.0.0.1:{port + 50}"
        lines = []
        for line in demo.stdout:
            lines.append(line)
            if url in line:
                break
        try:
            assert url in lines[-1], "".join(lines)
            with opened(url) as page:
                yield page
        finally:
            demo.send_signal(signal.SIGTERM)
            demo.wait(60)


def ask(page: Page, question: str | None = None) -> None:
    if question is not None:
        page.evaluate(f"document.forms[0].question.value = {question!r}")
    page.evaluate("document.forms[0].requestSubmit()")
    page.wait_for(f"{ANSWERED} !== '' && !document.forms[0].question.disabled")


def kinds(page: Page, side: str) -> list[str]:
    return page.evaluate(f"[...document.querySelectorAll('#{side} pre span')].map(one => one.className)")


def test_both_answers_stream_side_by_side_and_are_equal(page: Page) -> None:
    ask(page)
    assert page.evaluate(ANSWERED) == "The answers are equal, character for character."
    texts = [page.evaluate(f"document.querySelector('#{side} pre').textContent") for side in ("with", "without")]
    assert texts[0] == texts[1]
    assert {"asked", "block", "own"} <= set(kinds(page, "with"))
    assert set(kinds(page, "without")) == {"asked", "own"}
    assert "tokens each; the last verified" in page.evaluate("document.querySelector('#with .steps').textContent")
    assert page.evaluate("document.querySelectorAll('#with svg rect').length") >= 3


def test_repeated_question_copies_the_answer(page: Page) -> None:
    before = kinds(page, "with").count("copy")
    ask(page)
    assert kinds(page, "with").count("copy") > before + 8
    assert page.evaluate(ANSWERED) == "The answers are equal, character for character."
    if folder := os.environ.get("SCREENSHOTS"):
        page.screenshot(Path(folder) / "demo-web.png")


def test_a_new_conversation_begins_empty(page: Page) -> None:
    page.evaluate("document.forms[0].elements.new.click()")
    assert kinds(page, "with") == []


def test_text_is_never_markup(page: Page) -> None:
    ask(page, MARKUP)
    assert page.evaluate("document.querySelector('#with .asked').textContent").strip() == f"> {MARKUP}"
    assert page.evaluate("document.querySelectorAll('pre img, pre script').length") == 0
    assert page.evaluate("window.broken") is None


def test_a_refusal_is_shown(page: Page) -> None:
    ask(page, "apple " * 5000)
    assert "longer than the model's context" in page.evaluate(ANSWERED)


def test_console_is_empty(page: Page) -> None:
    """Chromium logs violations of the page's content security policy, and exceptions of its script, to the console."""
    page.evaluate("1")
    assert page.console == []
