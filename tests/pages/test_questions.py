"""Answers to users' first questions are in the README, or at most two links from it."""

import re
from typing import NamedTuple

import pytest

from tests.fixtures.guide import DOCS, ROOT
from tests.pages.test_docs import anchors

README, OF_DOCS = ROOT / "README.md", "sglang_dflash/docs/"
LINKS = 2


class Question(NamedTuple):
    """A question, the links that lead from the README to its answer, and words of the answer.

    `heading` is the section of the last page that has the words; "": the whole page.
    """

    text: str
    links: tuple[str, ...]
    heading: str
    words: tuple[str, ...]


QUESTIONS = (
    Question(
        "Which flags for my RTX 4090 or A100?", (f"{OF_DOCS}recipes.md",), "Smaller cards", ("rtx4090", "a100-80")
    ),
    Question(
        "How much faster is it on my GPU?",
        (f"{OF_DOCS}h200.md#how-much-faster",),
        "How much faster",
        ("acceptance length, times the first row, divided by the third", "On another GPU", "check --server"),
    ),
    Question("DFLASH, MTP or EAGLE?", (), "Performance", ("MTP and EAGLE draft one token after another", "5.3 to 7.4")),
    Question(
        "Why is the acceptance length 1.2?",
        (f"{OF_DOCS}troubleshooting.md#symptoms-without-a-message",),
        "Symptoms without a message",
        ("another target", "thinking mode", "`--draft-steps 20`"),
    ),
    Question(
        "Is it working?",
        (),
        "Install and serve",
        ("serves DFLASH: ...` confirms the plugin", "check --server", "5.5 to 9.2"),
    ),
    Question(
        "How do I turn it off?",
        (),
        "Install and serve",
        ("`SGLANG_DFLASH_WORKER=stock`", "Without the `--speculative-*` flags", "A single request cannot be exempted"),
    ),
    Question(
        "Is there a draft for my fine-tuned model?",
        (f"{OF_DOCS}training.md",),
        "Training your own draft",
        ("fine-tuned target can keep the base model's draft", "`--start-from FOLDER`"),
    ),
    Question(
        "What does training cost?", (f"{OF_DOCS}training.md#cost",), "Cost", ("104 TFLOP", "10,000 steps", "hours")
    ),
    Question(
        "Do drafts of SpecForge load?",
        (f"{OF_DOCS}compatibility.md#kinds-of-drafts",),
        "Kinds of drafts",
        ("SpecForge); full or sliding layers, causal or not | served",),
    ),
    Question("How much memory does it need?", (f"{OF_DOCS}memory.md",), "What takes memory", ("3.22 GiB", "41 MiB")),
    Question("What about contexts of 128k tokens?", (f"{OF_DOCS}memory.md",), "Flags", ("contexts of 128k tokens",)),
    Question(
        "Does it run on several GPUs?", (f"{OF_DOCS}machines.md",), "One model over several nodes", ("`--node-rank`",)
    ),
    Question("Is there a Docker image?", ("env/README.md",), "Files", ("`Dockerfile`", "`hopper.sh`")),
    Question(
        "What if SGLang is upgraded?",
        (),
        "Install and serve",
        ("With another version of SGLang, launches with DFLASH",),
    ),
    Question(
        "What should I alert on?", (f"{OF_DOCS}metrics.md",), "Metrics", ("when it is bad", "`accepted_drafts_total`")
    ),
    Question("Where do I report a fault?", (".github/ISSUE_TEMPLATE/bug.yml",), "", ("sglang-dflash check",)),
)


def section(text: str, heading: str) -> str:
    """Return the text below a heading, up to the next heading of any level."""
    if not heading:
        return text
    parts = re.split(r"^#+ (?=[A-Z])(.*)$", text, flags=re.MULTILINE)  # a comment in a command is no heading
    return parts[parts.index(heading) + 1]


@pytest.mark.parametrize("question", QUESTIONS, ids=lambda question: question.text)
def test_answer_is_found(question: Question) -> None:
    page = README
    assert len(question.links) <= LINKS
    for link in question.links:
        assert f"]({link})" in page.read_text(), f"{page.name} has no link to {link}"
        name, _, anchor = link.partition("#")
        page = page.parent / name
        assert not anchor or anchor in anchors(page)
    found = " ".join(section(page.read_text(), question.heading).split())
    assert not [words for words in question.words if words not in found]


def test_the_index_has_the_pages_of_developers_last() -> None:
    for_users, for_developers = (DOCS / "README.md").read_text().split("\nFor developers:\n")
    assert set(re.findall(r"\((\w[\w-]*\.md)\)", for_developers.split("\n## ")[0])) == {
        "rehearsal.md", "reproducing.md", "ragged.md",
    }  # fmt: skip
    assert "(../../env/README.md)" in for_users


def test_a_section_ends_at_the_next_heading() -> None:
    text = "# A\none\n```sh\n# comment\n```\n## B\ntwo\n"
    assert section(text, "A") == "\none\n```sh\n# comment\n```\n"
    assert section(text, "B") == "\ntwo\n"
