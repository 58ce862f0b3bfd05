"""Training text from a served target: requests, written lines, and resuming after an interruption."""

import asyncio
import json
from collections.abc import Callable
from pathlib import Path

import httpx
import pytest
from openai import AsyncOpenAI
from transformers import AutoTokenizer

from sglang_dflash.pairs.tiny.pairs import DENSE
from sglang_dflash.train import answers, prompts
from sglang_dflash.train.from_server import ServerSource, in_flight


class Server:
    """A server that answers chats with their last message in capitals, and completions with one of two questions."""

    def __init__(self, **more: object) -> None:
        self.asked: list[dict] = []
        self.more = more  # further fields of every chat message
        self.client = AsyncOpenAI(
            base_url="http://server/v1",
            api_key="none",
            http_client=httpx.AsyncClient(transport=httpx.MockTransport(self.answer)),
        )

    def answer(self, request: httpx.Request) -> httpx.Response:
        if request.url.path == "/v1/models":
            model = {"id": "m", "object": "model", "created": 0, "owned_by": "us"}
            return httpx.Response(200, json={"object": "list", "data": [model]})
        body = json.loads(request.content)
        self.asked.append(body)
        if "messages" in body:
            text = body["messages"][-1]["content"].upper()
            message = {"role": "assistant", "content": text} | self.more
            choice = {"index": 0, "message": message, "finish_reason": "stop"}
        else:
            choice = {"index": 0, "text": f" is {body['seed'] % 2}, and why?", "finish_reason": "stop"}
        return httpx.Response(200, json={"id": "1", "object": "o", "created": 0, "model": "m", "choices": [choice]})


def written(server: Server, asked: list[answers.Line], out: Path, *sampling: float, at_once: int = 1) -> int:
    source = ServerSource("http://server/v1", at_once, server.client)
    return answers.write_answers(source, asked, out, answers.Sampling(*sampling))


def turn(text: str) -> answers.Messages:
    return [{"role": "user", "content": text}]


def line(text: str, **more: object) -> answers.Line:
    return {"messages": turn(text)} | more


def test_each_prompt_is_answered_once_even_after_a_cut_line(tmp_path: Path) -> None:
    server, out = Server(), tmp_path / "answers.jsonl"
    asked = [line(f"question {i}") for i in range(7)]
    assert written(server, asked[:4], out, at_once=3) == 4
    out.write_text(out.read_text()[:-9])

    assert written(Server(), asked, out, at_once=3) == 4
    rows = [json.loads(line)["messages"] for line in out.read_text().splitlines()]
    assert sorted(row[0]["content"] for row in rows) == sorted(one["messages"][0]["content"] for one in asked)
    assert all(row[1] == {"role": "assistant", "content": row[0]["content"].upper()} for row in rows)


@pytest.mark.parametrize("at_once", [1, 3, 20])
def test_no_more_requests_than_asked_are_in_flight(at_once: int) -> None:
    running, seen = set[int](), list[int]()

    async def work(number: int) -> int:
        running.add(number)
        seen.append(len(running))
        for _ in range(1 + number % 4):
            await asyncio.sleep(0)
        running.remove(number)
        return number

    async def results() -> list[int]:
        return [result async for result in in_flight(map(work, range(12)), at_once)]

    assert sorted(asyncio.run(results())) == list(range(12))
    assert max(seen) == min(at_once, 12)


def test_every_second_answer_is_greedy(tmp_path: Path) -> None:
    server = Server()
    asked = [line(f"question {i}") for i in range(4)]
    written(server, asked, tmp_path / "out", 0.7)
    assert [body["temperature"] for body in server.asked] == [0.0, 0.7, 0.0, 0.7]
    assert len({body["seed"] for body in server.asked}) == 4


TOOLS = [{"type": "function", "function": {"name": "f"}}]
CALL = {"id": "c", "type": "function", "function": {"name": "f", "arguments": "{}"}}


def test_tools_and_template_arguments_are_sent_and_written(tmp_path: Path) -> None:
    server, out = Server(content=None, tool_calls=[CALL | {"index": 0}], reasoning_content="hm"), tmp_path / "out"
    asked = [line("a", tools=TOOLS, chat_template_kwargs={"enable_thinking": False}), line("a")]
    assert written(server, asked, out) == 2
    assert [body.get("tools") for body in server.asked] == [TOOLS, None]
    assert [body.get("chat_template_kwargs") for body in server.asked] == [{"enable_thinking": False}, None]
    message = {"role": "assistant", "content": None, "reasoning_content": "hm", "tool_calls": [CALL]}
    rows = [json.loads(text) for text in out.read_text().splitlines()]
    assert rows == [one | {"messages": [*one["messages"], message]} for one in asked]
    assert written(server, asked, out) == 0


@pytest.mark.parametrize("content", ["", " ", None])
def test_an_empty_answer_is_left_out(tmp_path: Path, content: str | None) -> None:
    assert written(Server(content=content), [line("a")], tmp_path / "o") == 0


@pytest.mark.parametrize(
    ("second", "message"),
    [
        (json.dumps(line("a", toolz=1)), "line 2: unknown key 'toolz'"),
        ('{"messages": []}', "line 2: found .*; give"),
        ('{"messages": ["a"]}', "line 2: entry 1 of 'messages' is 'a'; it must be an object"),
        ('{"messages": [{"role": "assistant"}]}', "line 2: the last turn has the role 'assistant'; end with"),
        ("{", r"line 2: not JSON \(Expecting property name .* at character 2\); write one object per line"),
    ],
    ids=["an unknown key", "no question", "no turn", "an answer at the end", "no JSON"],
)
def test_a_bad_prompt_is_named(tmp_path, second, message):
    path = tmp_path / "prompts.jsonl"
    path.write_text(json.dumps(line("a", tools=TOOLS)) + "\n" + second)
    with pytest.raises(ValueError, match=message):
        answers.read_prompts(path)


def test_blank_lines_are_skipped(tmp_path: Path) -> None:
    path = tmp_path / "prompts.jsonl"
    path.write_text(f"{json.dumps(line('a'))}\n\n{json.dumps(line('b'))}\n\n")
    assert answers.read_prompts(path) == [line("a"), line("b")]


@pytest.mark.parametrize("text", ["text\n", "text", "[]\n", '{"text": "a"}\n', '{\n "text": "a"\n}', "{\n"])
def test_another_file_is_not_continued(tmp_path: Path, text: str) -> None:
    (tmp_path / "out").write_text(text)
    with pytest.raises(
        ValueError, match=r"--out .*out, line 1: found .*, (not an answer|no JSON object); give another"
    ):
        written(Server(), [line("a")], tmp_path / "out")
    assert (tmp_path / "out").read_text() == text


def source_of(reply: Callable[[httpx.Request], httpx.Response], url: str = "http://server/v1") -> ServerSource:
    """Return a source whose requests are answered by `reply`."""
    http = httpx.AsyncClient(transport=httpx.MockTransport(reply))
    return ServerSource(url, 1, AsyncOpenAI(base_url=url, api_key="none", http_client=http, max_retries=0))


def test_an_invalid_url_is_refused() -> None:
    with pytest.raises(ValueError, match=r"--server http://HOST:PORT/v1 is no valid URL; write it like"):
        ServerSource("http://HOST:PORT/v1", 1)


def test_a_rejected_prompt_is_named(tmp_path: Path) -> None:
    def reply(request: httpx.Request) -> httpx.Response:
        if request.method == "GET":
            return httpx.Response(200, json={"data": [{"id": "model"}]})
        return httpx.Response(400, json={"message": "too long"})

    with pytest.raises(ValueError, match=r"rejects prompt 1 \(.*too long.*; shorten or remove it"):
        answers.write_answers(source_of(reply), [line("a")], tmp_path / "out", answers.Sampling())


@pytest.mark.parametrize(
    ("found", "cure"),
    [({"json": {"data": []}}, "start a model there"), ({"html": "<p>a page</p>"}, "give the URL of an OpenAI")],
    ids=["none", "a page"],
)
def test_a_server_without_a_model_is_refused(tmp_path: Path, found: dict, cure: str) -> None:
    source = source_of(lambda request: httpx.Response(200, **found))
    with pytest.raises(ValueError, match=rf"--server http://server/v1 lists no model; {cure}"):
        answers.write_answers(source, [line("a")], tmp_path / "out", answers.Sampling())


@pytest.mark.parametrize(
    ("url", "answer", "cure"),
    [
        ("http://server/v1", httpx.ConnectError("refused"), "refused.*; start the server or correct --server"),
        ("http://server/", httpx.Response(404), "repeat the command with --server http://server/v1"),
        ("http://v1/x/v1/", httpx.Response(404), "see the server's log"),
        ("http://server/v1/chat", httpx.Response(404), "repeat the command with --server http://server/v1[.]"),
        ("http://server/v1", httpx.Response(404, json={"message": "no m"}), "no m.*; see the server's log"),
        ("http://server/v1", httpx.Response(401), "repeat the command with the server's key as --api-key"),
        ("http://server/v1", httpx.ReadTimeout("slow"), "timed out.*; see the server's log, then repeat"),
    ],
    ids=["no server", "no /v1", "a host called v1", "a longer path", "refused", "no key", "slow"],
)
def test_a_failed_request_has_its_cure(tmp_path: Path, url: str, answer: object, cure: str) -> None:
    def reply(request: httpx.Request) -> httpx.Response:
        if isinstance(answer, httpx.HTTPError):
            raise answer
        return answer

    source = source_of(reply, url)
    with pytest.raises(ValueError, match=rf"a request to {url} failed \(.*{cure}.* Written lines are kept"):
        answers.write_answers(source, [line("a")], tmp_path / "out", answers.Sampling())


def test_a_url_needs_http() -> None:
    with pytest.raises(
        ValueError, match=r"--server 127\.0\.0\.1:35200 has no http://; did you mean http://127\.0\.0\.1:35200/v1"
    ):
        ServerSource("127.0.0.1:35200", 1)


def test_user_turns_continue_the_targets_user_header() -> None:
    server, tokenizer, found = Server(), AutoTokenizer.from_pretrained(DENSE.target), []
    before, _ = prompts.user_header(tokenizer)
    prompts.user_turns(ServerSource("http://server/v1", 2, server.client), tokenizer, 4, 0, found.append)
    assert all(body["prompt"].startswith(before) for body in server.asked)
    assert turn("What is 1, and why?") in found


class Cut(ServerSource):
    """A server that fails after `at_once` user turns."""

    def user_turns(self, starts, stop, seed, write):
        for i in range(self.at_once):
            write(f"{starts[i][1]} question {seed + i}?")
        if self.at_once < len(starts):
            raise ValueError("the server is gone")


def test_interrupted_prompts_resume(tmp_path: Path) -> None:
    tokenizer, out, folder = AutoTokenizer.from_pretrained(DENSE.target), tmp_path / "p.jsonl", tmp_path / "code"
    folder.mkdir()
    (folder / "a.py").write_text(
        "def f(a, b):\n" + "".join(f"    a = a + b * {i}\n" for i in range(9)) + "    return a\n"
    )

    def write(n: int) -> int:
        return prompts.write_prompts(Cut("http://server/v1", n), tokenizer, [folder], out, turns=5, n_tasks=4, seed=7)

    with pytest.raises(ValueError, match="gone"):
        write(3)
    first = out.read_text()
    assert len(first.splitlines()) == 4, "one task and three turns"
    out.write_text(first + '{"mess')
    assert write(2) == 6
    lines = out.read_text().splitlines()
    assert lines[:4] == first.splitlines()
    assert len(set(lines)) == 6
    assert write(0) == 6, "nothing is missing"
