"""Training text: the three kinds of line in a data file, and the order of documents."""

import json

import pytest
from jinja2 import TemplateError

from sglang_dflash.train.text import Batches, padded, read_documents
from sglang_dflash.train.tiny_pair import CHAT_TEMPLATE
from sglang_dflash.train.tokens import Tokens, packed, text_digest


class Letters:
    """A tokenizer with one token per character, and the chat template of the tiny pair."""

    def __init__(self, chat_template=CHAT_TEMPLATE):
        self.chat_template = chat_template

    def encode(self, text, add_special_tokens):
        assert not add_special_tokens
        return [ord(c) for c in text]

    def apply_chat_template(self, messages, tokenize, tools, add_generation_prompt):
        assert tools is None
        turns = "".join(f"<{m['role']}>{m['content']}</>\n" for m in messages)
        return turns + ("<assistant>" if add_generation_prompt else "")


def read(path, rows, tokenizer=None, max_length=1000):
    path.write_text("\n".join(row if isinstance(row, str) else json.dumps(row) for row in rows))
    return read_documents(path, tokenizer or Letters(), max_length)


def shown(document: Tokens) -> tuple[str, str]:
    """Return a document's text, and the part of the text that is a response."""
    text = "".join(map(chr, document.ids))
    return text, "".join(c for c, answers in zip(text, document.is_response, strict=True) if answers)


def test_the_three_kinds_of_line(tmp_path):
    turns = ("user", "one"), ("assistant", "two"), ("user", "three"), ("assistant", "four")
    chat = [{"role": role, "content": content} for role, content in turns]
    rows = [{"text": "hello"}, {"prompt": "ab", "response": "cd"}, "", {"messages": chat}]
    documents = read(tmp_path / "data.jsonl", rows)
    assert [shown(d) for d in documents] == [
        ("hello", "hello"),
        ("abcd", "cd"),
        ("<user>one</>\n<assistant>two</>\n<user>three</>\n<assistant>four</>", "two</>four</>"),
    ]


def test_a_text_file_is_cut_in_pieces(tmp_path):
    documents = read(tmp_path / "data.txt", ["abcdefgh"], max_length=3)
    assert [shown(d)[0] for d in documents] == ["abc", "def", "gh"]


def test_documents_with_nothing_to_predict_are_left_out(tmp_path):
    rows = [{"prompt": "abc", "response": "d"}, {"text": "ef"}, {"text": "gh"}]
    assert [shown(d)[0] for d in read(tmp_path / "data.jsonl", rows)] == ["ef", "gh"]


@pytest.mark.parametrize(
    ("row", "sentence"),
    [
        ("{", r"line 2: not JSON \(Expecting property name .* at character 2\); write one object per line"),
        ("[1]", "line 2: found '\\[1\\]'; give"),
        ({"content": "x"}, 'line 2: found .* give {"text"}'),
        ({"text": 5}, "line 2: 'text' is 5; it must be a string"),
        ({"response": "a"}, "line 2: 'prompt' is missing; it must be a string"),
        ({"messages": [{"content": "x"}]}, "line 2: found the message .* without a role; add one"),
        ({"messages": [], "toolz": 1}, "line 2: unknown key 'toolz' in a line with messages; .* messages, tools, c"),
        ({"prompt": "x", "response": "y", "system": "z"}, "line 2: unknown key 'system' in a line with a response"),
        ({"text": "x", "messages": []}, "line 2: unknown key 'messages' in a line with text; .* use one of text"),
        ({"messages": {}}, "line 2: 'messages' is {}; it must be a list of objects"),
        ({"messages": [], "tools": {"name": "f"}}, "line 2: 'tools' is .*; it must be a list"),
        ({"messages": [], "chat_template_kwargs": [1]}, r"2: 'chat_template_kwargs' is \[1\]; it must be an object"),
    ],
)
def test_a_bad_line_is_named(tmp_path, row, sentence):
    with pytest.raises(ValueError, match=sentence):
        read(tmp_path / "data.jsonl", [{"text": "good"}, row])


def test_unusable_files_are_refused(tmp_path):
    with pytest.raises(ValueError, match=r"neither \.txt nor \.jsonl"):
        read(tmp_path / "data.csv", ["a,b"])
    with pytest.raises(ValueError, match=r"has one usable document \(up to 1000 tokens, .* lower --max-length"):
        read(tmp_path / "data.txt", ["short"])
    with pytest.raises(ValueError, match=r"has no response of two tokens within 1000 tokens; add answers"):
        read(tmp_path / "data.jsonl", [{"messages": []}])


def test_only_line_feeds_separate_lines(tmp_path):
    """JSON may have U+2028 in a string, at which Python's `splitlines` breaks a line, too."""
    rows = ['{"text": "one\u2028two"}', '{"text": "three"}']
    assert len(read(tmp_path / "data.jsonl", rows)) == 2


def test_messages_need_a_chat_template(tmp_path):
    chat = {"messages": [{"role": "user", "content": "hi"}]}
    with pytest.raises(ValueError, match="has no chat template"):
        read(tmp_path / "data.jsonl", [chat], Letters(chat_template=None))


def test_a_line_that_the_template_refuses_is_named(tmp_path):
    class Strict(Letters):
        def apply_chat_template(self, messages, tokenize, tools, add_generation_prompt):
            raise TemplateError("roles must alternate")

    with pytest.raises(
        ValueError, match=r"line 1: the chat template rejects the messages \(roles must alternate\); ch"
    ):
        read(tmp_path / "data.jsonl", [{"messages": [{"role": "user", "content": "a"}]}], Strict())


def test_a_template_that_rewrites_earlier_turns_is_refused(tmp_path):
    class LastTurnOnly(Letters):
        def apply_chat_template(self, messages, tokenize, tools, add_generation_prompt):
            return super().apply_chat_template(messages[-1:], tokenize, tools, add_generation_prompt)

    chat = [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}, {"role": "user", "content": "c"}]
    with pytest.raises(ValueError, match="give each answer with its rendered conversation"):
        read(tmp_path / "data.jsonl", [{"messages": chat}], LastTurnOnly())


def batches_of(n_documents: int, n_rows: int) -> Batches:
    """Return batches of documents of two tokens. Both token ids are the document's index."""
    return Batches([Tokens([i, i], [True, True]) for i in range(n_documents)], n_rows=n_rows, pad_id=99, seed=1)


def test_every_epoch_shows_every_document_once_in_a_new_order():
    batches = batches_of(9, n_rows=2)
    (kept,) = batches.held_out
    assert kept.ids_RL.shape == (1, 2)
    held_out = kept.ids_RL[0, 0].item()
    seen = [i for step in range(8) for i in batches.at(step).ids_RL[:, 0].tolist()]
    first, second = seen[:8], seen[8:]
    assert sorted(first) == sorted(second) == [i for i in range(9) if i != held_out]
    assert first != second
    assert batches.at(5).ids_RL.tolist() == batches_of(9, n_rows=2).at(5).ids_RL.tolist(), "a batch depends on its step"


def test_held_out_documents_are_not_trained_on():
    batches = batches_of(100, n_rows=4)
    held_out = {i for rows in batches.held_out for i in rows.document_R.tolist()}
    trained = {i for step in range(24) for i in batches.at(step).document_R.tolist()}
    assert len(held_out) == 6
    assert trained == set(range(100)) - held_out
    for rows in [*batches.held_out, batches.at(0), batches.at(1)]:
        assert rows.ids_RL[:, 0].tolist() == rows.document_R.tolist(), "document_R does not match the row"


def test_a_prompt_ends_where_the_response_begins():
    assert Tokens([1, 2, 3, 4], [False, False, True, True]).prompt == [1, 2]
    assert Tokens([1, 2, 3, 4], [True] * 4).prompt == [1, 2]
    assert Tokens([1, 2, 3], [True] * 3).prompt == [1, 2]
    batches = Batches([Tokens([i, i, i], [False, True, True]) for i in range(9)], n_rows=2, pad_id=0, seed=1)
    (prompt,) = batches.prompts(8)
    assert prompt.tolist() == [[batches.held_out[0].ids_RL[0, 0].item()]]


def test_rows_are_padded_at_the_end_and_shared_disjointly():
    rows = padded([Tokens([1, 2, 3], [False, True, True]), Tokens([4], [True])], pad_id=0)
    assert rows.ids_RL.tolist() == [[1, 2, 3], [4, 0, 0]]
    assert rows.is_response_RL.tolist() == [[False, True, True], [True, False, False]]
    rows = padded([Tokens([i], [True]) for i in range(6)], pad_id=0)
    assert [rows.share(rank, 3).ids_RL[:, 0].tolist() for rank in range(3)] == [[0, 3], [1, 4], [2, 5]]


def test_the_digest_depends_on_tokens_responses_and_order():
    a, b = Tokens([1, 23], [True, True]), Tokens([12, 3], [True, True])
    texts = [[a], [b], [a, b], [b, a], [a, Tokens([12, 3], [False, True])]]
    assert len({text_digest(text) for text in texts}) == len(texts)
    assert text_digest([a, b]) == text_digest([a, b])


def test_packed_rows_start_with_a_document():
    documents = [Tokens([i] * 3, [True] * 3) for i in range(6)]
    assert [row.ids for row in packed(documents, 4)] == [[0, 0, 0, 1], [2, 2, 2, 3], [4, 4, 4, 5]]
