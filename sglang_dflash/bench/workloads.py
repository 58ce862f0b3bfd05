"""Texts by how often drafts of the tiny pair are accepted: `hard`, less often than of its own questions; `hopeless`,
hardly ever; and `repeating`, whose answers are in their own context. Widths and copies are measured with them."""

from random import Random

from sglang_dflash.bench.chat import Message
from sglang_dflash.train.corpus import draw

SEED = 42
HARD = "everyday questions in English, of which the tiny corpus has none"
ASKED = (
    "Explain {} to a child.",
    "Write a short poem about {}.",
    "What are three common mistakes people make with {}?",
    "Why does {} matter, and to whom?",
)
ABOUT = (
    *("the sea", "quantum entanglement", "sourdough bread", "the French Revolution", "vaccines", "chess openings"),
    *("tax law", "jazz", "photosynthesis", "bicycle repair", "black holes", "learning to swim"),
)
HOPELESS = "random tokens, no chat template; answers of 48 tokens, past their end"
HOPELESS_TOKENS = 32  # of a prompt
HOPELESS_ANSWER = 48  # tokens
WORDS = range(300, 1000)  # token ids that are text, none of them special
REPEATING = "questions of the tiny corpus that their conversation has answered before, asked again in four ways"
AGAIN = ("{}", "Again: {}", "{} Answer as before.", "Write your answer again.")


def hard_questions(n: int) -> list[str]:
    return [question.format(subject) for subject in ABOUT for question in ASKED][:n]


def repeating_conversations(n: int) -> list[list[Message]]:
    """The answer that is given is the corpus's own. The tiny pair was trained on the first way of asking alone."""
    random, asked = Random(SEED), []
    for i in range(n):
        _, question, answer = draw(random, held_out=True)
        turns = question, answer, AGAIN[i % len(AGAIN)].format(question)
        asked.append([Message(role=("user", "assistant")[k % 2], content=turn) for k, turn in enumerate(turns)])
    return asked


def hopeless_prompts(n: int) -> list[list[int]]:
    random = Random(SEED)
    return [random.choices(WORDS, k=HOPELESS_TOKENS) for _ in range(n)]
