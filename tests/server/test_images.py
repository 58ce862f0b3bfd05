"""Requests with images: answers and steps equal those of Transformers and the PyTorch reference.

Images take fewer positions than tokens (M-RoPE), so the target's positions differ from the draft's.
"""

from collections import Counter
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from itertools import takewhile
from typing import Any, NamedTuple

import pytest
import torch
import transformers

from sglang_dflash.pairs.servers.server import Generation, Server
from sglang_dflash.pairs.tiny.pairs import Pair
from sglang_dflash.reference.torch import DraftModel
from sglang_dflash.reference.torch.generate import DecodedStep, Options, spec_steps
from tests.server.lib import images as lib
from tests.server.lib.images import CAPTURED, FLAGS, Prompt
from tests.server.lib.rehearsals import SM90
from tests.server.lib.talk import steps, tokens_of
from tests.server.lib.variants import RANDOM_WIDTHS

N_IMAGES = (1, 2, 0, 1, 3, 1, 0, 2)  # per prompt
MAX_NEW_TOKENS = 32
COMMITTED_PER_STEP = 2.0  # least acceptance length
COPIES = dict(RANDOM_WIDTHS) | {"SGLANG_DFLASH_COPY": "on"}


class Seen(NamedTuple):
    """A pair, prompts with images, and the reference's steps for each prompt, the prefill first."""

    pair: Pair
    prompts: list[Prompt]
    expected: list[list[DecodedStep]]
    target: transformers.PreTrainedModel
    draft: DraftModel

    def expect(self, prompts: Sequence[Prompt]) -> list[list[DecodedStep]]:
        processor, options = (
            transformers.AutoProcessor.from_pretrained(self.pair.target),
            Options(max_new_tokens=MAX_NEW_TOKENS),
        )
        inputs = [lib.read(processor, prompt) for prompt in prompts]
        return [list(spec_steps(self.draft, self.target, ids, options, images=further)) for ids, further in inputs]

    @property
    def answers(self) -> list[list[int]]:
        return [committed(generation) for generation in self.expected]


def committed(generation: list[DecodedStep]) -> list[int]:
    return [token for step in generation for token in step.committed]


def histogram(generation: list[DecodedStep]) -> dict[int, int]:
    return dict(Counter(step.n_accepted for step in generation[1:]))


@pytest.fixture(scope="module")
def seen(tmp_path_factory: pytest.TempPathFactory) -> Seen:
    prompts = lib.prompts(1, N_IMAGES)
    pair = lib.write_seeing_pair(tmp_path_factory.mktemp("images"), prompts)
    target = transformers.AutoModelForImageTextToText.from_pretrained(pair.target, dtype=torch.float32).eval()
    draft = DraftModel.from_pretrained(pair.draft, dtype=torch.float32)
    blank = Seen(pair, prompts, [], target, draft)
    return blank._replace(expected=blank.expect(blank.prompts))


@pytest.fixture(
    scope="module",
    params=["cpu", pytest.param("fa3-graphs", marks=pytest.mark.full), pytest.param("stock", marks=pytest.mark.full)],
)
def server(request: pytest.FixtureRequest, pool: Any, seen: Seen) -> Iterator[Server]:
    is_captured, is_stock = request.param == "fa3-graphs", request.param == "stock"
    env = dict(SM90) if is_captured else {}
    running = pool.get(
        "stock" if is_stock else "plugin", target="images", pair=seen.pair, flags=CAPTURED if is_captured else FLAGS,
        env=env,
    )  # fmt: skip
    yield running
    pool.drop(running)


def ask(server: Server, prompts: Sequence[Prompt], concurrency: int = 8) -> list[Generation]:
    def answer(prompt: Prompt) -> Generation:
        return server.generate(prompt.text, fields=prompt.fields, max_new_tokens=MAX_NEW_TOKENS, ignore_eos=True)

    with ThreadPoolExecutor(concurrency) as pool:
        return list(pool.map(answer, prompts))


def test_the_reference_is_transformers_own_answer(seen: Seen) -> None:
    processor = transformers.AutoProcessor.from_pretrained(seen.pair.target)
    for prompt, expected in zip(seen.prompts, seen.answers, strict=True):
        ids_1S, further = lib.read(processor, prompt)
        out = lib.continued(seen.target, ids_1S, further, MAX_NEW_TOKENS)
        assert out[0, ids_1S.shape[1] :].tolist() == expected


@pytest.mark.parametrize("concurrency", [1, 8])
def test_answers_and_steps_are_the_references(server: Server, seen: Seen, concurrency: int) -> None:
    server.flush_cache()
    answers = ask(server, seen.prompts, concurrency)
    assert tokens_of(answers) == seen.answers
    assert [steps(answer) for answer in answers] == [histogram(generation) for generation in seen.expected]
    n_steps = sum(len(generation) - 1 for generation in seen.expected)
    assert len(seen.prompts) * (MAX_NEW_TOKENS - 1) / n_steps > COMMITTED_PER_STEP


def test_a_second_turn_uses_the_cached_image(server: Server, seen: Seen) -> None:
    server.flush_cache()
    first = ask(server, seen.prompts)
    tokenizer = transformers.AutoTokenizer.from_pretrained(seen.pair.target)
    # A target of random weights may answer with tokens of images, which no second prompt may have.
    kept = [list(takewhile(lambda token: token in lib.WORDS, answer.token_ids)) for answer in first]
    longer = [
        prompt._replace(text=f"{prompt.text}{tokenizer.decode(tokens)}w050w060")
        for prompt, tokens in zip(seen.prompts, kept, strict=True)
    ]
    expected = seen.expect(longer)
    answers = ask(server, longer)
    assert tokens_of(answers) == [committed(generation) for generation in expected]
    assert [steps(answer) for answer in answers] == [histogram(generation) for generation in expected]
    # SGLang caches states of recurrent layers every 64 tokens, and the prompt without an image is shorter.
    cached = [answer.meta["cached_tokens"] for answer, prompt in zip(answers, longer, strict=True) if prompt.images]
    assert min(cached) > 0, cached


def test_another_image_gives_another_answer(server: Server, seen: Seen) -> None:
    """Two images of one size have equal tokens, and the prefix cache must not mix them up."""
    one, other = (prompt.images[0].resize(lib.SIZES[0]) for prompt in (seen.prompts[0], seen.prompts[3]))
    prompts = [Prompt(f"{lib.IMAGE}w007", (image,)) for image in (one, other)]
    expected = [committed(generation) for generation in seen.expect(prompts)]
    assert expected[0] != expected[1]
    for concurrency in (1, 2):
        assert tokens_of(ask(server, prompts, concurrency)) == expected


def test_random_widths_and_copies(pool: Any, seen: Seen) -> None:
    server = pool.get(target="images", pair=seen.pair, flags=FLAGS, env=COPIES)
    assert tokens_of(ask(server, seen.prompts)) == seen.answers
    pool.drop(server)


def test_chat_with_an_image(server: Server, seen: Seen) -> None:
    """An image in the OpenAI API's form."""
    image, text = seen.prompts[0].images[0], "w007w009w011"
    parts = [
        {"type": "image_url", "image_url": {"url": lib.as_url(image)}}, {"type": "text", "text": text},
    ]  # fmt: skip
    answer = server.openai().chat.completions.create(
        model="default", messages=[{"role": "user", "content": parts}], temperature=0, max_tokens=MAX_NEW_TOKENS,
        extra_body={"ignore_eos": True},
    )  # fmt: skip
    prompt = Prompt(f"<|im_start|>{lib.IMAGE}{text}<|im_end|><|im_start|>", (image,))
    (expected,) = seen.expect([prompt])
    tokenizer = transformers.AutoTokenizer.from_pretrained(seen.pair.target)
    assert answer.choices[0].message.content == tokenizer.decode(committed(expected), skip_special_tokens=True)
