"""Texts by how often drafts of the tiny pair are accepted: `hard`, less often than of its own questions; `hopeless`,
hardly ever. The width policy is measured with them."""

from random import Random

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


def hard_questions(n: int) -> list[str]:
    return [question.format(subject) for subject in ABOUT for question in ASKED][:n]


def hopeless_prompts(n: int) -> list[list[int]]:
    random = Random(SEED)
    return [random.choices(WORDS, k=HOPELESS_TOKENS) for _ in range(n)]
