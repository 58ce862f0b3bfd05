"""DFlash 2 drafts against SGLang's built-in worker: the same tokens, in the same steps.

`test_exact.py` compares DFlash 2 drafts with the PyTorch reference, as does `test_rehearsal.py` with captured graphs.
"""

from collections.abc import Callable
from typing import Any

import pytest

from tests.server.conftest import SECOND
from tests.server.lib.talk import steps
from tests.server.lib.variants import TRACK

pytestmark = pytest.mark.full

N_PROMPTS = 12
MAX_NEW_TOKENS = 80
FLAGS = {"hybrid": TRACK, "dense": ()}


@pytest.mark.parametrize("target", FLAGS)
def test_tokens_and_steps_are_the_built_in_workers(target: str, pool: Any, questions: Callable) -> None:
    outcomes = {}
    prompts = questions(N_PROMPTS, target)
    for arm in ("stock", "plugin"):
        running = pool.get(arm, target=target, pair=SECOND[target], flags=FLAGS[target])
        answers = running.generate_many(prompts, concurrency=1, max_new_tokens=MAX_NEW_TOKENS)
        outcomes[arm] = [(answer.token_ids, steps(answer)) for answer in answers]
        pool.drop(running)
    assert outcomes["plugin"] == outcomes["stock"]
    committed = sum(len(token_ids) - 1 for token_ids, _ in outcomes["plugin"])
    assert committed / sum(sum(counts.values()) for _, counts in outcomes["plugin"]) > 5
