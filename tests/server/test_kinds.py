"""Every kind of draft that other trainers publish: the target's answers, in the steps of the PyTorch reference.

The drafts are trained by the test (`fixtures/kinds.py`), so most drafts are accepted, and each is stored in its
published layout. A wrong draft changes no answer, so the steps of every request are compared.
"""

import json
import shutil
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from sglang_dflash.engine.draft.files import MASK_EMBEDDING
from sglang_dflash.pairs.servers.server import Server
from sglang_dflash.pairs.tiny.pairs import DENSE, Pair
from sglang_dflash.reference.torch import generate
from sglang_dflash.tools.bench import __main__ as bench
from tests.fixtures.kinds import KINDS, write_kind
from tests.server.lib.oracle import Expected, Oracle
from tests.server.lib.rehearsals import (
    FA3,
    FA4,
    FLASHINFER,
    GRAPHS,
    PAGES,
    PAGES_64,
    SM100,
    TRITON,
    TRTLLM_BOTH,
    TWO_RANKS,
)
from tests.server.lib.talk import post, push
from tests.server.lib.variants import TWO_NODES, window
from tests.server.test_draft_head import rounded_logits

N_PROMPTS, N_NEW = 6, 64
SM90 = (("SGLANG_DFLASH_REHEARSE", "sm90,streams"),)
# Ways to serve a draft: flags, environment, and the draft window.
WAYS: dict[str, tuple[tuple[str, ...], tuple[tuple[str, str], ...], int | None]] = {
    "cpu": ((), (), None),
    "two-ranks": (("--tp-size", "2"), TWO_NODES, None),
    "fa3-graphs": ((*FA3, *GRAPHS), SM90, None),
    "flashinfer-graphs-window": ((*FLASHINFER, *GRAPHS, *window(64)), SM90, 64),
    "fa3-graphs-two-ranks": ((*FA3, *GRAPHS, "--tp-size", "2"), TWO_RANKS, None),
    "trtllm-graphs": ((*TRTLLM_BOTH, *GRAPHS, *PAGES), SM100, None),
    "fa4-graphs": ((*FA4, *GRAPHS, *PAGES_64), SM100, None),
    "triton-graphs": ((*TRITON, *GRAPHS), SM90, None),
}
# Kinds and ways of `make test-ci`. The others run in `make test-full`.
QUICK = {("reduced-anchor-first", "cpu"), ("laguna", "fa3-graphs"), ("mimo", "fa3-graphs")}
# FlashInfer gives all slots of a block the window of the first, so steps of sliding layers may differ.
SLIDING = {name for name, kind in KINDS.items() if "sliding_window" in kind.fields}
# Kinds of a way that is not for all: those whose code depends on ranks, or on what the way adds.
ONLY = {
    # A forward without graphs fills only the verified slots, which depends on how a kind lays out and chooses drafts.
    "cpu": ("reduced", "anchor-first", "reduced-anchor-first", "jetspec", "domino", "domino-shifted", "lilicorr"),
    "two-ranks": ("reduced", "reduced-anchor-first", "laguna-per-element", "domino", "lilicorr", "gemma-norms"),
    "flashinfer-graphs-window": (
        *("reduced-anchor-first", "laguna", "laguna-per-element", "jetspec", "domino", "lilicorr", "modelopt", "muse"),
    ),
    "fa3-graphs-two-ranks": ("mimo", "reduced", "laguna", "domino-shifted"),
    "trtllm-graphs": ("sinks", "jetspec", "reduced-anchor-first"),
    "fa4-graphs": ("jetspec", "laguna", "reduced-anchor-first"),
    "triton-graphs": ("jetspec", "laguna", "domino"),
}
# Kinds that SGLang's own worker computes, with a way. It serves Domino only in bf16 on a GPU, and ignores the others.
STOCK = {
    "muse": "cpu",
    "laguna": "cpu",
    "laguna-per-element": "cpu",
    "causal": "cpu",
    "gemma-norms": "cpu",
    "swiglu": "cpu",
    "lilicorr": "cpu",
    "mimo-sliding": "fa3-graphs",
}
# Kinds whose files are converted while they load, with a way.
UPDATED = dict.fromkeys(("reduced", "laguna", "gemma-norms", "domino", "lilicorr", "nemotron"), "cpu")
UPDATED |= {"mimo": "fa3-graphs"}


@pytest.fixture(scope="module")
def pairs(questions: Callable, tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Pair]:
    folder = tmp_path_factory.mktemp("kinds")
    return cache(lambda kind: write_kind(kind, DENSE, questions(N_PROMPTS, "dense", seed=11), folder / kind))


@pytest.fixture(scope="module")
def expected(pairs: Callable[[str], Pair], questions: Callable) -> Callable[..., Expected]:
    @cache
    def expect(kind: str, draft_window: int | None) -> Expected:
        return Oracle(pairs(kind), None, draft_window).expect(questions(N_PROMPTS, "dense", seed=11), N_NEW)

    return expect


def rows() -> list[Any]:
    every = [(kind, way) for way in WAYS for kind in KINDS if runs(kind, way)]
    marks = {row: () if row in QUICK else pytest.mark.full for row in every}
    return [pytest.param(*row, marks=mark, id="-".join(row)) for row, mark in marks.items()]


def runs(kind: str, way: str) -> bool:
    """Return whether the kind is tested in this way."""
    return kind in ONLY.get(way, KINDS)


@pytest.mark.parametrize(("kind", "way"), rows())
def test_answers_and_steps_are_plain_torchs(
    kind: str, way: str, pool: Any, pairs: Callable[[str], Pair], expected: Callable[..., Expected]
) -> None:
    flags, env, draft_window = WAYS[way]
    wanted = expected(kind, draft_window)
    assert acceptance(wanted) > 2.5, "hardly any draft is accepted, so a wrong draft would not be seen"
    server = pool.get(target=kind, pair=pairs(kind), flags=flags, env=dict(env))
    if kind in SLIDING and "flashinfer" in way:
        require_answers(server, wanted)
        return
    for concurrency in (1, 4):
        wanted.require_from(server, concurrency)
    wanted.require_from(server, 4)  # with a cached prefix
    pool.drop(server)


@pytest.mark.full
def test_sinks_with_an_fp8_head(
    pool: Any, pairs: Callable[[str], Pair], questions: Callable, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The draft was not trained on these prompts, so its choices are less certain, and rounding changes some."""
    flags, env, _ = WAYS["fa3-graphs"]
    pair, prompts = pairs("sinks"), questions(10, "dense", seed=21)
    plain = Oracle(pair, None, None).expect(prompts, N_NEW)
    monkeypatch.setattr(generate, "draft_logits", rounded_logits)
    wanted = Oracle(pair, None, None).expect(prompts, N_NEW)
    assert (wanted.token_ids, wanted.steps != plain.steps) == (plain.token_ids, True), "rounding changes no step"
    server = pool.get(target="sinks", pair=pair, flags=flags, env=dict(env) | {"SGLANG_DFLASH_DRAFT_HEAD": "fp8"})
    wanted.require_from(server, 4)
    pool.drop(server)


@pytest.mark.full
def test_bench_counts_the_drafts_of_an_anchor_first_block(
    pool: Any, pairs: Callable[[str], Pair], tmp_path: Path
) -> None:
    """Such a block of N slots has N drafts, one more than z-lab's."""
    kind = "reduced-anchor-first"
    server = pool.get(target=kind, pair=pairs(kind))
    output = tmp_path / "out"
    asked = ["--num-prompts", "4", "--max-new-tokens", "32", "--concurrency", "4", "--repeats", "1", "--no-latency"]
    bench.main(["--base-url", f"ours={server.url}", *asked, "--output", str(output)])
    (line,) = json.loads(output.with_suffix(".json").read_text())["summary"]
    shares = line["acceptance_by_position"]
    assert len(shares) == json.loads((pairs(kind).draft / "config.json").read_text())["block_size"]
    assert line["committed_per_step"] == pytest.approx(1 + sum(shares), abs=0.01)
    pool.drop(server)


@pytest.mark.full
@pytest.mark.parametrize("kind", STOCK)
def test_sglangs_own_worker_takes_the_same_steps(
    kind: str, pool: Any, pairs: Callable[[str], Pair], expected: Callable[..., Expected]
) -> None:
    """The reference is this package's, so it may have the server's mistakes. SGLang's worker is independent."""
    flags, env, _ = WAYS[STOCK[kind]]
    env = {name: value.removesuffix(",streams") for name, value in env}  # which this package's worker needs
    server = pool.get("stock", target=kind, pair=pairs(kind), flags=flags, env=env)
    expected(kind, None).require_from(server, 1)
    pool.drop(server)


@pytest.mark.full
@pytest.mark.parametrize("kind", UPDATED)
def test_new_weights_are_converted_like_files(
    kind: str, pool: Any, pairs: Callable[[str], Pair], expected: Callable[..., Expected], tmp_path: Path
) -> None:
    """A draft loaded from disk while serving, and the first one's tensors pushed by their published names."""
    flags, env, _ = WAYS[UPDATED[kind]]
    old, before = pairs(kind), expected(kind, None)
    new = old._replace(draft=changed_copy(old.draft, tmp_path / "new"))
    after = Oracle(new, None, None).expect(before.prompts, N_NEW)
    assert after.steps != before.steps, "the change is too small to see"
    server = pool.get(target=kind, pair=old, flags=flags, env=dict(env))
    before.require_from(server, 1)
    assert post(server, "/update_weights_from_disk", {"model_path": str(new.draft)}).status_code == 200
    after.require_from(server, 1)
    if kind != "mimo":  # whose mask row no push brings
        assert push(server, load_file(old.draft / "model.safetensors"), selector="draft").status_code == 200
        before.require_from(server, 1)
    pool.drop(server)


def changed_copy(draft: Path, folder: Path) -> Path:
    """Copy a draft's files, and change some of its weights."""
    shutil.copytree(draft, folder)
    torch.manual_seed(1)
    tensors = load_file(draft / "model.safetensors")
    for name, tensor in tensors.items():
        if "fc.weight" in name or ".o_proj" in name or name.endswith("norm.weight"):
            tensor += 0.6 * tensor.std() * torch.randn_like(tensor)
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    if (folder / MASK_EMBEDDING).exists():
        row = torch.load(folder / MASK_EMBEDDING)
        torch.save(row | {"embedding": row["embedding"].flip(0)}, folder / MASK_EMBEDDING)
    return folder


def acceptance(wanted: Expected) -> float:
    """Return the committed tokens per step."""
    n_steps = sum(sum(steps.values()) for steps in wanted.steps)
    return sum(len(ids) - 1 for ids in wanted.token_ids) / n_steps


def require_answers(server: Server, wanted: Expected) -> None:
    answers = server.generate_many(wanted.prompts, concurrency=4, max_new_tokens=wanted.max_new_tokens)
    assert [answer.token_ids for answer in answers] == wanted.token_ids
