"""Weight versions of an answer across a pause in place, in which new weights of the target arrive."""

import json
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import httpx
import pytest
from safetensors.torch import load_file

from sglang_dflash.pairs.servers.server import REQUEST_TIMEOUT_S, Server
from sglang_dflash.pairs.tiny.pairs import HYBRID
from tests.server.lib.rehearsals import REHEARSALS
from tests.server.lib.talk import post, push
from tests.server.lib.variants import VARIANTS

N_NEW, N_TRIALS, HEAD = 200, 4, "lm_head.weight"


def chunks(server: Server, prompt: list[int]) -> Iterator[dict[str, Any]]:
    """Yield the increments of a streamed greedy answer."""
    body = {
        "input_ids": prompt,
        "stream": True,
        "sampling_params": {"temperature": 0, "max_new_tokens": N_NEW, "ignore_eos": True},
    }
    with httpx.stream("POST", f"{server.url}/generate", json=body, timeout=REQUEST_TIMEOUT_S) as answer:
        for line in answer.iter_lines():
            if line.startswith("data: {"):
                yield json.loads(line.removeprefix("data: "))


def update(server: Server, tensors: dict[str, Any], version: str) -> None:
    """Push weights of the target while requests are paused where they are."""
    assert post(server, "/pause_generation", {"mode": "in_place"}).status_code == 200
    assert push(server, tensors, weight_version=version, flush_cache=False).status_code == 200
    assert post(server, "/continue_generation").status_code == 200


def updated_answer(
    server: Server, prompt: list[int], n_before: int, tensors: dict[str, Any], version: str
) -> dict[str, Any]:
    """Return the last chunk of a streamed answer. The update is sent when more than `n_before` tokens have arrived."""
    pushed = None
    with ThreadPoolExecutor(1) as trainer:
        for chunk in chunks(server, prompt):
            if pushed is None and chunk["meta_info"]["completion_tokens"] > n_before:
                pushed = trainer.submit(update, server, tensors, version)
        assert pushed is not None
        pushed.result()
    return chunk


@pytest.mark.parametrize("row", ["hybrid", pytest.param("fa3-graphs", marks=pytest.mark.full)])
def test_a_version_begins_at_the_first_token_of_new_weights(server: Callable, questions: Callable, row: str) -> None:
    """The new head is the negative of the old one, so that the first token of the new weights differs."""
    found = VARIANTS["hybrid"] if row == "hybrid" else REHEARSALS[row]
    served, head = server(flags=found.flags, env=dict(found.env)), load_file(HYBRID.target / "model.safetensors")[HEAD]
    boundaries = []
    for trial, prompt in enumerate(questions(10 * N_TRIALS, seed=90)):
        expected = served.generate(prompt, max_new_tokens=N_NEW, ignore_eos=True).token_ids
        answer = updated_answer(served, prompt, 4 * (trial + 1), {HEAD: -head}, f"negated-{trial}")
        update(served, {HEAD: head}, f"restored-{trial}")
        served.flush_cache()
        if len(answer["meta_info"]["weight_versions"]) == 1:
            continue  # the weights arrived after the answer's end, on a busy machine
        old, new = answer["meta_info"]["weight_versions"]
        pairs = zip(answer["output_ids"], expected, strict=True)
        first = next(i for i, (token, before) in enumerate(pairs) if token != before)
        assert (old["start"], new["end"], new["version"]) == (0, N_NEW, f"negated-{trial}")
        assert old["end"] == new["start"] == first
        boundaries.append(first)
        if len(boundaries) == N_TRIALS:
            break
    assert len(boundaries) == N_TRIALS
    assert served.generate(prompt, max_new_tokens=N_NEW, ignore_eos=True).token_ids == expected
