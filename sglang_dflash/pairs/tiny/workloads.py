"""Workloads in which the tiny pair's drafts are accepted at different rates, for measuring widths and n-gram copies.

`hard`: drafts are accepted less often than for held-out questions. `hopeless`: drafts are hardly ever accepted.
`repeating`: each question is asked four times, so in three of four prompts the context already contains the answer.
"""

from random import Random

from sglang_dflash.pairs.tiny.corpus import draw

Message = dict[str, str]  # role and content
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
HOPELESS = "random tokens without a chat template; every answer has 48 tokens, because end tokens are ignored"
HOPELESS_TOKENS = 32  # length of a prompt in tokens
HOPELESS_ANSWER = 48  # length of an answer in tokens
WORDS = range(300, 1000)  # token ids of hopeless prompts, without special tokens
REPEATING = "conversations that ask a question of the tiny corpus four times over"
N_TIMES = 4


def asked(*turns: str) -> list[Message]:
    return [{"role": "user", "content": turn} for turn in turns]


def held_out(n: int, seed: int = SEED) -> list[list[Message]]:
    """Return `n` different questions that the tiny pair was not trained on."""
    random, questions = Random(seed), dict[str, None]()
    while len(questions) < n:
        questions[draw(random, held_out=True).prompt] = None
    return [asked(question) for question in questions]


def hard_questions(n: int) -> list[str]:
    return [question.format(subject) for subject in ABOUT for question in ASKED][:n]


def repeating_conversations(n: int) -> list[list[Message]]:
    """Return conversations with about `n` prompts in total. The model's answers between the user turns are missing."""
    random = Random(SEED)
    questions = [draw(random, held_out=True)[1] for _ in range(max(n // N_TIMES, 1))]
    return [asked(*[question] * N_TIMES) for question in questions]


def answered_conversations(n: int) -> list[list[Message]]:
    """Return `n` conversations: a question, the corpus's answer, and the same question again."""
    random, roles = Random(SEED), ("user", "assistant", "user")
    drawn = [draw(random, held_out=True) for _ in range(n)]
    return [
        [Message(role=role, content=turn) for role, turn in zip(roles, (question, answer, question), strict=True)]
        for _, question, answer in drawn
    ]


def hopeless_prompts(n: int) -> list[list[int]]:
    random = Random(SEED)
    return [random.choices(WORDS, k=HOPELESS_TOKENS) for _ in range(n)]
