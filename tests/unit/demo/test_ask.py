"""One streamed question: what each chunk brought, and what the last one says of all steps."""

from types import SimpleNamespace
from typing import Any

from sglang_dflash.demo.ask import Answer, Step, ask


def chunk(text: str | None, n_tokens: int | None, **extra: Any) -> Any:
    """Of a stream; SGLang tells of the steps in one without a choice, and of tokens in those that bring text."""
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
    said, shown = dict[str, Any](), list[Step]()

    def create(**request: Any) -> Any:
        said.update(request)
        return iter(chunks)

    client: Any = SimpleNamespace(chat=SimpleNamespace(completions=SimpleNamespace(create=create)))
    return ask(client, "Why?", shown.append, rid="one"), shown, said


def test_each_chunk_is_a_step_and_the_last_ones_count_them() -> None:
    answer, shown, said = asked(*CHUNKS)
    assert shown == [Step("a", 1), Step("bcd", 3), Step("efgh", 4)]
    assert (answer.text, answer.n_tokens, answer.n_steps, answer.n_accepted) == ("abcdefgh", 8, 2, 5)
    assert answer.committed_per_step == 1 + 5 / 2
    assert (said["messages"], said["extra_body"]["rid"]) == ([{"role": "user", "content": "Why?"}], "one")


def test_a_server_without_speculation_commits_one_token_a_step() -> None:
    answer, _, _ = asked(*CHUNKS[:4])
    assert (answer.n_steps, answer.n_accepted, answer.committed_per_step) == (0, 0, 1.0)
