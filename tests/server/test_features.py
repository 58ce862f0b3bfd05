"""Features of accepted tokens, returned in place of hidden states, equal those that the trainer computes itself."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch

from sglang_dflash.engine.draft import checkpoint
from sglang_dflash.pairs.servers.errors import ServerError
from sglang_dflash.pairs.servers.server import Generation, Server
from sglang_dflash.reference.torch import DraftModel
from sglang_dflash.train.__main__ import main
from sglang_dflash.train.features import read_rows
from sglang_dflash.train.rollouts import Rollouts, features_of, read_rollouts
from sglang_dflash.train.text import Batches
from tests.server.conftest import PAIRS
from tests.server.lib.rehearsals import BREAKABLE, FA3, SM90
from tests.server.lib.rows import GAP, model
from tests.server.lib.talk import post, together, tokens_of
from tests.server.lib.variants import RANDOM_WIDTHS, RETRACT, TRACK

FEATURES = {"SGLANG_DFLASH_HIDDEN_STATES": "features"}
ASKED = {"return_hidden_states": True}
# Every prefill reads whole prompts.
WHOLE = ("--disable-radix-cache", "--chunked-prefill-size", "-1", "--max-prefill-tokens", "2048")
MAX_NEW_TOKENS = 40


class Way(NamedTuple):
    target: str
    flags: tuple[str, ...]
    env: tuple[tuple[str, str], ...] = ()
    fields: tuple[tuple[str, Any], ...] = ()  # of a request, in addition to `ASKED`


WAYS = {
    # With a prefix cache, logprobs from position 0 on make a prefill read the whole prompt.
    "hybrid-cached": Way("hybrid", TRACK, fields=(("return_logprob", True), ("logprob_start_len", 0))),
    "dense-retract-random-widths": Way("dense", WHOLE, RETRACT + RANDOM_WIDTHS),
    "fa3-graphs": Way("hybrid", (*FA3, *BREAKABLE, *WHOLE), SM90),
    "fa3-graphs-dense": Way("dense", (*FA3, *BREAKABLE, *WHOLE), SM90 + RANDOM_WIDTHS),
}


class Serving(NamedTuple):
    server: Server
    way: Way


@pytest.fixture(
    scope="module",
    params=[
        pytest.param(way, id=name, marks=() if name == "hybrid-cached" else pytest.mark.full)
        for name, way in WAYS.items()
    ],
)
def serving(request: pytest.FixtureRequest, pool: Any) -> Any:
    way: Way = request.param
    server = pool.get(
        target=way.target, flags=("--enable-return-hidden-states", *way.flags), env=FEATURES | dict(way.env)
    )
    yield Serving(server, way)
    pool.drop(server)


def line(prompt: list[int], answer: Generation) -> str:
    return json.dumps({"prompt_token_ids": prompt, "output_ids": answer.token_ids, "meta_info": answer.meta})


def answered(serving: Serving, prompts: list[list[int]], **sampling: Any) -> list[Generation]:
    """Return answers with features, computed in batches with answers without."""
    fields = ASKED | dict(serving.way.fields)
    requests = [{"fields": given, "max_new_tokens": MAX_NEW_TOKENS} | sampling for given in (fields, {})]
    return together(serving.server, [(prompt, given) for prompt in prompts for given in requests])[::2]


def require_features(rollouts: Rollouts, target: str, *, greedy: bool) -> None:
    """Require the features, and with greedy answers the choices, that the trainer computes with the target itself."""
    layers = checkpoint.read(str(PAIRS[target].draft)).target_layer_ids
    batches = Batches(rollouts.documents, n_rows=2, pad_id=0, seed=0)
    n = len(batches.trained_documents)
    for rows in [*map(batches.at, range((n + 1) // 2)), *batches.held_out]:
        choices_RL, features_RLC = rollouts.read(rows)
        want_RL, want_RLC = read_rows(model(PAIRS[target].target), rows, layers)
        for r, document in enumerate(rows.document_R.tolist()):
            ids, is_response = rollouts.documents[document]
            answer = slice(is_response.index(True) - 1, len(ids) - 1)
            assert features_RLC.shape[-1] == want_RLC.shape[-1]
            torch.testing.assert_close(features_RLC[r, : len(ids) - 1], want_RLC[r, : len(ids) - 1], atol=GAP, rtol=GAP)
            assert not greedy or torch.equal(choices_RL[r, answer], want_RL[r, answer])


@pytest.mark.parametrize("sampling", [{}, {"temperature": 1.0, "top_k": 20}], ids=["greedy", "sampled"])
def test_features_are_those_of_the_trainer(
    serving: Serving, questions: Callable, reference: Callable, tmp_path: Path, sampling: dict[str, Any]
) -> None:
    target = serving.way.target
    prompts = questions(8, target, seed=61)
    answers = answered(serving, prompts, **sampling)
    if not sampling:
        assert tokens_of(answers) == [reference(prompt, MAX_NEW_TOKENS, target) for prompt in prompts]
    path = tmp_path / "rollouts.jsonl"
    path.write_text("\n".join(map(line, prompts, answers)))
    rollouts = read_rollouts(path, 1000, torch.float32)
    assert len(rollouts.documents) == len(prompts)
    require_features(rollouts, target, greedy=not sampling)


def test_a_cached_prefix_has_no_features(serving: Serving, questions: Callable) -> None:
    """Without the flags or fields of `WAYS` the trainer refuses such an answer."""
    prompt = [token for one in questions(8, serving.way.target, seed=62) for token in one][:200]
    first, second = (serving.server.generate(prompt, fields=ASKED, max_new_tokens=8) for _ in range(2))
    for answer in (first, second):
        states = answer.meta["hidden_states"]
        n_cached = answer.meta["cached_tokens"]
        assert len(states[0]) == len(prompt) - n_cached
        if n_cached:
            with pytest.raises(ValueError, match=f"from position {n_cached} on.*--disable-radix-cache"):
                features_of(len(prompt), states)
    assert bool(second.meta["cached_tokens"]) == ("--disable-radix-cache" not in serving.way.flags)


@pytest.mark.full
def test_rollouts_train_the_draft(serving: Serving, questions: Callable, tmp_path: Path) -> None:
    """The file has the answers of `/generate` as they are."""
    pair, prompts = PAIRS[serving.way.target], questions(8, serving.way.target, seed=64)
    path, out = tmp_path / "rollouts.jsonl", tmp_path / "draft"
    asked = ASKED | dict(serving.way.fields) | {"return_prompt_token_ids": True, "sampling_params": {"temperature": 0}}
    path.write_text("\n".join(post(serving.server, "/generate", asked | {"input_ids": one}).text for one in prompts))
    config = checkpoint.read(str(pair.draft))
    layers = ",".join(map(str, config.target_layer_ids))
    options = {
        "target": pair.target, "rollouts": path, "out": out, "start-from": pair.draft, "target-layer-ids": layers,
        "layers": config.num_hidden_layers, "block-size": config.block_size, "mask-token-id": config.mask_token_id,
        "rows": 2, "anchors": 4, "steps": 2, "warmup-steps": 1, "eval-prompts": 0, "dtype": "fp32", "device": "cpu",
    }  # fmt: skip
    assert main(["draft", *(str(word) for name, value in options.items() for word in (f"--{name}", value))]) == 0
    before, after = (DraftModel.from_pretrained(folder).state_dict() for folder in (pair.draft, out))
    assert before.keys() == after.keys()
    assert any(not torch.equal(before[name], after[name]) for name in before)


@pytest.mark.full
def test_features_without_requests_that_may_ask_are_refused(pool: Any) -> None:
    with pytest.raises(ServerError, match="=features has no effect without --enable-return-hidden-states; add the"):
        pool.get(target="dense", env=FEATURES)
