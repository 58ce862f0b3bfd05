"""Server of the web demo: source of each token (target, draft block or copy), accepted and refused requests.

tests/server opens the page in a browser.
"""

import json
from collections.abc import Iterator
from http.client import HTTPConnection
from pathlib import Path
from threading import Thread
from types import SimpleNamespace
from typing import Any

import httpx
import openai
import pytest
from tokenizers import Tokenizer
from tokenizers.models import WordLevel
from tokenizers.pre_tokenizers import WhitespaceSplit

from sglang_dflash.pairs.servers.ports import free_port
from sglang_dflash.tools.demo.ask import Step
from sglang_dflash.tools.demo.pairs import Show, tiny_show
from sglang_dflash.tools.demo.web import MOST_BYTES, Demo, Side, StepTrace, Verified, conversation, pieces, web_server
from tests.server.lib.browser import CHROMIUM, opened

QUESTION = [{"role": "user", "content": "</script><b>bold</b>"}]


def trace(folder: Path, *lines: dict[str, Any]) -> StepTrace:
    with (folder / "1.jsonl").open("a") as file:
        file.writelines(json.dumps(line) + "\n" for line in lines)
    return StepTrace(folder)


@pytest.mark.parametrize(
    ("step", "verified", "shown"),
    [
        (Step("a", 1), [], [("own", 1, "a")]),  # from the prefill, or without speculation
        (Step("abc", 3), [Verified(4, 2, 0)], [("block", 1, "a"), ("block", 2, "b"), ("own", 3, "c")]),
        (
            Step("abcd", 4),
            [Verified(8, 3, 2)],
            [("block", 1, "a"), ("copy", 2, "b"), ("copy", 3, "c"), ("own", 4, "d")],
        ),
        (Step("ab", 3), [Verified(8, 2, 0)], [("block", 1, "a"), ("block", 2, "b")]),  # the end token has no text
        (Step("ab", 2), [Verified(8, 5, 0)], [("block", 1, "a"), ("block", 2, "b")]),  # 5 accepted, cut to 2
        (Step("ab", 2), [Verified(1, 0, 0)] * 2, [("own", 1, "a"), ("own", 1, "b")]),  # two steps in one chunk
        # A text of three letters cannot be split into two tokens.
        (Step("abc", 2), [Verified(8, 1, 1)], [("copy", 1, "abc")]),
        (Step("", 1), [Verified(8, 0, 0)], []),  # only the end token
    ],
)
def test_each_token_has_its_source_and_place(step, verified, shown, letters):
    assert pieces(letters, step, verified) == shown


def test_no_space_is_lost_between_tokens():
    """The text shown for a token includes the spaces around it, even if the tokenizer's offsets exclude them."""
    words = Tokenizer(WordLevel({"a": 0, "b": 1}, unk_token="a"))
    words.pre_tokenizer = WhitespaceSplit()
    found = pieces(words, Step(" a  b\n", 2), [Verified(8, 1, 0)])
    assert found == [("block", 1, " a  "), ("own", 2, "b\n")]


def test_steps_of_a_request_are_read_while_others_are_written(tmp_path):
    steps = trace(
        tmp_path,
        {"width": 8, "accepted": {"a": 7, "b": 0}, "copied": {"a": 3, "b": 0}},
        {"width": 4, "accepted": {"b": 2}, "copied": {"b": 2}},
    )
    assert steps.of("b", 1) == [Verified(8, 0, 0)]
    assert steps.of("a", 5) == [Verified(8, 7, 3)]
    assert steps.of("b", 4) == [Verified(4, 2, 2)]
    trace(tmp_path, {"width": 1, "accepted": {"b": 0}}, {"width": 1, "accepted": {"b": 0}})
    assert steps.of("b", 2) == [Verified(1, 0, 0)] * 2
    assert steps.of("b", 1) == []


def client(*chunks: tuple[str, int]) -> Any:
    """Return a client that streams these chunks: a text, and the number of tokens so far. `rids` are those it gets."""
    rids = list[str]()

    def create(**asked: Any) -> Iterator[Any]:
        rids.append(asked["extra_body"]["rid"])
        if asked["messages"][-1]["content"] == "refuse":
            raise openai.APIError("too long", httpx.Request("POST", "http://server"), body=None)
        for text, n in chunks:
            delta = SimpleNamespace(delta=SimpleNamespace(content=text))
            yield SimpleNamespace(choices=[delta], usage=SimpleNamespace(completion_tokens=n), model_extra={})

    return SimpleNamespace(chat=SimpleNamespace(completions=SimpleNamespace(create=create)), rids=rids)


@pytest.fixture
def shown() -> Show:
    return tiny_show()


@pytest.fixture
def url(letters: Tokenizer, tmp_path: Path, shown: Show) -> Iterator[str]:
    steps = trace(tmp_path, {"width": 8, "accepted": {"demo-0": 2}, "copied": {"demo-0": 1}})
    streaming = client(("<", 1), ("bcd", 4))
    port = free_port(29950)
    demo = Demo({"with": Side(streaming, steps), "without": Side(streaming, None)}, letters, shown)
    with web_server(demo, port) as server:
        Thread(target=server.serve_forever, daemon=True).start()
        yield f"http://127.0.0.1:{port}"
        server.shutdown()


def ask(url: str, side: str = "with", body: Any = QUESTION, **headers: str) -> httpx.Response:
    content = body if isinstance(body, bytes) else json.dumps(body).encode()
    return httpx.post(f"{url}/answer/{side}", content=content, headers={"Content-Type": "application/json"} | headers)


def test_an_answer_is_streamed_step_by_step(url):
    first, second = map(json.loads, ask(url).text.splitlines())
    assert (first["pieces"], first["n_tokens"]) == ([["own", 1, "<"]], 1)
    assert "width" not in first
    assert second["pieces"] == [["block", 1, "b"], ["copy", 2, "c"], ["own", 3, "d"]]
    assert (second["n_steps"], second["width"], second["accepted"], second["copied"]) == (1, 8, 2, 1)
    assert 0 < first["s"] < second["s"]
    assert [json.loads(line)["n_tokens"] for line in ask(url, "without").text.splitlines()] == [1, 3]


def test_each_request_is_found_in_the_trace_by_its_id(letters, shown, tmp_path):
    """The server gets the id under which the page looks for the request's steps."""
    steps = trace(tmp_path, {"width": 8, "accepted": {"demo-0": 1}}, {"width": 4, "accepted": {"demo-1": 2}})
    streaming, lines = client(("a", 1), ("bcd", 4)), list[dict[str, Any]]()
    demo = Demo({"with": Side(streaming, steps)}, letters, shown)
    for _ in range(2):
        demo.answer("with", QUESTION, lines.append)
    assert streaming.rids == ["demo-0", "demo-1"]
    assert [line.get("width") for line in lines] == [None, 8, None, 4]


def test_a_chunk_in_one_piece_counts_all_its_tokens(letters, shown):
    """The text has fewer letters than the chunk has tokens, so it does not encode to them."""
    demo, lines = Demo({"without": Side(client(("ab", 5)), None)}, letters, shown), list[dict[str, Any]]()
    demo.answer("without", QUESTION, lines.append)
    assert [(len(line["pieces"]), line["n_tokens"]) for line in lines] == [(1, 4)]  # the fifth may be the end token


def test_errors_of_the_server_are_passed_on(url):
    sentence = "The server sent no whole answer: too long"
    assert json.loads(ask(url, body=[{"role": "user", "content": "refuse"}]).text) == {"error": sentence}


def test_the_page_runs_its_own_script_and_loads_nothing(url):
    reply = httpx.get(url)
    policy = reply.headers["Content-Security-Policy"]
    nonce = policy.split("script-src 'nonce-")[1].split("'")[0]
    assert policy.startswith("default-src 'none'; connect-src 'self'; ")
    assert reply.text.count(f'nonce="{nonce}"') == 2
    assert nonce not in httpx.get(url).text
    script = reply.text.split("<script")[1]
    unsafe = ("innerHTML", "outerHTML", "insertAdjacent", "document.write", "eval(")
    assert [word for word in unsafe if word in script] == []
    assert "http://" not in reply.text.replace("http://www.w3.org/2000/svg", "")


MARKUP = (("markup", '</script><img src=x> & "<!--"'),)


@pytest.mark.parametrize("shown", [tiny_show()._replace(questions=MARKUP)])
def test_examples_cannot_end_the_script(url):
    page = httpx.get(url).text
    assert page.count("</script>") == 1
    (line,) = [line for line in page.splitlines() if line.startswith("const examples = ")]
    assert json.loads(line.removeprefix("const examples = ").removesuffix(";")) == dict(MARKUP)


def test_every_kind_of_token_has_a_style_and_stays_text(url):
    """The page has a CSS rule for every kind of token that the server sends, and inserts tokens as plain text."""
    page = httpx.get(url).text
    assert {f"\n.{kind} {{" in page for kind in ("asked", *Verified(8, 2, 1).kinds)} == {True}
    assert "for (const [kind, place, piece] of step.pieces) {\n        add(text, piece, kind, " in page
    assert "  span.textContent = text;\n  span.className = kind;\n" in page
    for reply in (httpx.get(url), ask(url)):  # without the header a browser may treat an answer as HTML
        assert reply.headers["X-Content-Type-Options"] == "nosniff"


LONG_ANSWERS = """
for (const text of document.querySelectorAll("pre")) add(text, "word ".repeat(900), "own");
document.querySelector(".steps").textContent = verdict.textContent = "One line.";
verdict.getBoundingClientRect().bottom - innerHeight"""


@pytest.mark.skipif(CHROMIUM is None, reason="no chromium on PATH")
@pytest.mark.parametrize("height", [767, 900])
def test_long_answers_leave_the_verdict_in_view(url, height):
    with opened(url, height=height) as page:
        assert page.evaluate(LONG_ANSWERS) < 0
        assert page.console == []


@pytest.mark.parametrize(
    "headers", [{"Host": "evil.example"}, {"Origin": "http://evil.example"}, {"Content-Type": "text/plain"}]
)
def test_foreign_origins_get_no_answer(url, headers):
    assert ask(url, **headers).status_code == 404


def test_foreign_hosts_and_paths_get_no_page(url):
    assert httpx.get(url, headers={"Host": "evil.example"}).status_code == 404
    assert httpx.get(url + "/etc/passwd").status_code == 404
    assert httpx.get(url.replace("127.0.0.1", "localhost"), trust_env=False).status_code == 200


def test_oversized_and_misdirected_requests_are_refused(url):
    refused = ask(url, body=b" " * (MOST_BYTES + 1))
    assert (refused.status_code, refused.reason_phrase) == (413, "The conversation is too long: begin a new one")
    assert "statusText" in httpx.get(url).text, "the page shows the reason, and no HTML"
    assert ask(url, side="aside").status_code == 404


def test_a_length_that_is_no_number_is_refused(url):
    connection = HTTPConnection(url.removeprefix("http://"))
    connection.putrequest("POST", "/answer/with")
    for name, value in (("Content-Type", "application/json"), ("Content-Length", "ten")):
        connection.putheader(name, value)
    connection.endheaders()
    assert connection.getresponse().status == 400


@pytest.mark.parametrize(
    "body",
    [
        b"{",
        [],
        {},
        ["hello"],
        [{"role": "assistant", "content": "hello"}],
        [{"role": "user", "content": 5}],
        [{"role": "user", "content": "a", "name": "b"}],
        [*QUESTION, *QUESTION],
        [*QUESTION, {"role": "assistant", "content": "a"}],
    ],
)
def test_malformed_conversations_are_refused(url, body):
    assert ask(url, body=body).status_code == 400


def test_a_deeply_nested_body_is_refused():
    with pytest.raises(ValueError, match="nested too deeply"):
        conversation(b"[" * MOST_BYTES)


def test_a_conversation_ends_with_a_question():
    turns = [*QUESTION, {"role": "assistant", "content": "a"}, *QUESTION]
    assert conversation(json.dumps(turns).encode()) == turns


@pytest.mark.parametrize(
    ("answers", "sentence"),
    [
        (["ab", "ab"], "The answers are equal, character for character."),
        (["ab", "ac"], "The answers differ after 1 tokens, which is a bug to report."),
    ],
)
def test_the_answers_are_compared(url, answers, sentence):
    body = json.dumps(answers).encode()
    assert httpx.post(f"{url}/verdict", content=body, headers={"Content-Type": "application/json"}).json() == {
        "verdict": sentence
    }


@pytest.mark.parametrize("body", [QUESTION, {"answers": ["a", "b"]}, ["a"], ["a", 1]])
def test_a_comparison_needs_two_answers(url, body):
    headers = {"Content-Type": "application/json"}
    assert httpx.post(f"{url}/verdict", content=json.dumps(body).encode(), headers=headers).status_code == 400
