"""Feature cache: cached features must equal the target's. A cache of another target or text must be refused."""

from collections import namedtuple

import pytest
import torch
from transformers import Qwen3Config, Qwen3ForCausalLM

from sglang_dflash.train import features
from sglang_dflash.train.features import FACTS, FeatureCache, read_rows, shown_bytes, weights_digest
from sglang_dflash.train.ranks import ALONE, Ranks
from sglang_dflash.train.text import Batches
from sglang_dflash.train.tokens import Tokens

LAYERS = (0, 2)
DOCUMENTS = [Tokens(list(range(i, i + length)), [True] * length) for i, length in enumerate((7, 3, 12, 5, 9))]


@pytest.fixture(scope="module")
def target():
    torch.manual_seed(0)
    config = Qwen3Config(
        vocab_size=32, hidden_size=16, intermediate_size=24, num_hidden_layers=4, num_attention_heads=2,
        num_key_value_heads=1, head_dim=8, initializer_range=0.3, eos_token_id=None, bos_token_id=None,
    )  # fmt: skip
    return Qwen3ForCausalLM(config).eval()


def cache_of(folder, target, documents=DOCUMENTS, layers=LAYERS, lines=None) -> FeatureCache:
    cache = FeatureCache(folder, documents, target, layers, dtype=target.dtype)
    cache.prepare(say=(lines if lines is not None else []).append)
    cache.fill(ALONE)
    return cache


def test_cached_features_equal_the_targets(tmp_path, target):
    cache, batches = cache_of(tmp_path, target), Batches(DOCUMENTS, n_rows=2, pad_id=0, seed=0)
    for rows in [batches.at(0), batches.at(1), *batches.held_out]:
        choices_RL, features_RLC = cache.read(rows)
        want_RL, want_RLC = read_rows(target, rows, LAYERS)
        for r, document in enumerate(rows.document_R.tolist()):
            n = len(DOCUMENTS[document].ids)
            assert torch.equal(choices_RL[r, :n], want_RL[r, :n])
            torch.testing.assert_close(features_RLC[r, :n], want_RLC[r, :n], atol=1e-5, rtol=0)
            assert not features_RLC[r, n:].any()


def test_the_size_is_announced_before_writing(tmp_path, target):
    lines = []
    cache = cache_of(tmp_path, target, lines=lines)
    assert f"36 tokens x (32 features x 4 bytes + 4) = {shown_bytes(36 * 132 + 5)}; " in lines[0]
    assert {name: (tmp_path / name).stat().st_size for name in cache.sizes} == cache.sizes
    assert sum(cache.sizes.values()) == 36 * (32 * 4 + 4) + 5


def test_nothing_is_written_without_enough_space(tmp_path, target, monkeypatch):
    usage = namedtuple("usage", "free")
    monkeypatch.setattr(features.shutil, "disk_usage", lambda _: usage(free=1000))
    with pytest.raises(ValueError, match=r"needs 4\.8 kB and 1\.0 kB are free; give less text"):
        cache_of(tmp_path, target)
    assert list(tmp_path.iterdir()) == []


def test_an_interrupted_filling_resumes(tmp_path, target, monkeypatch):
    read = []

    def counted(target, rows, layer_ids):
        if len(read) == 2:
            raise KeyboardInterrupt
        read.append(rows.ids_RL[:, 0].tolist())
        return read_rows(target, rows, layer_ids)

    monkeypatch.setattr(features, "TOKENS_AT_ONCE", 12)
    monkeypatch.setattr(features, "read_rows", counted)
    with pytest.raises(KeyboardInterrupt):
        cache_of(tmp_path, target)
    left = []
    monkeypatch.setattr(
        features, "read_rows", lambda *args: left.append(args[1].ids_RL[:, 0].tolist()) or read_rows(*args)
    )
    cache_of(tmp_path, target)
    assert (read, left) == ([[1, 3], [0]], [[4], [2]]), "of similar length, at most 12 tokens"


def test_processes_share_the_reading(tmp_path, target):
    cache = FeatureCache(tmp_path, DOCUMENTS, target, LAYERS, dtype=torch.float32)
    cache.prepare(say=[].append)
    done = cache._mapped[2]
    for rank, now in ((0, [1, 0, 1, 0, 1]), (1, [1, 1, 1, 1, 1])):
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(Ranks, "wait", lambda self: None)
            cache.fill(Ranks(rank, 2))
        assert done.tolist() == now


def test_a_cache_of_another_run_is_refused(tmp_path, target):
    cache_of(tmp_path, target)
    before = (tmp_path / FACTS).read_text()
    torch.manual_seed(1)
    other_target = Qwen3ForCausalLM(target.config)
    other_text = [*DOCUMENTS[1:], DOCUMENTS[0]]  # the same documents in another order
    for name, options in {
        "target ": {"target": other_target},
        "text ": {"documents": other_text},
        "target_layer_ids ": {"layers": (0, 1)},
        "dtype float32, now bfloat16": {"target": Qwen3ForCausalLM(target.config).bfloat16()},
    }.items():
        with pytest.raises(ValueError, match=rf"was made with other settings \(.*{name}.*; repeat the old options"):
            cache_of(tmp_path, **({"target": target} | options))
    assert (tmp_path / FACTS).read_text() == before


def test_one_changed_value_changes_the_digest(target):
    before = weights_digest(target)
    assert weights_digest(target) == before
    with torch.no_grad():
        target.model.norm.weight[3] += 1
        assert weights_digest(target) != before
        target.model.norm.weight[3] -= 1
    assert weights_digest(target) == before


def test_bytes_are_shown_in_units():
    assert [shown_bytes(n) for n in (999, 1000, 12_345_678_901)] == ["999 bytes", "1.0 kB", "12.3 GB"]


def test_features_are_stored_in_the_given_dtype(tmp_path, target):
    cache = FeatureCache(tmp_path, DOCUMENTS, target, LAYERS, dtype=torch.bfloat16)
    cache.prepare(say=[].append)
    cache.fill(ALONE)
    (rows,) = Batches(DOCUMENTS[:2], n_rows=1, pad_id=0, seed=0).held_out
    _, want_RLC = read_rows(target, rows, LAYERS)
    _, features_RLC = cache.read(rows)
    assert (target.dtype, features_RLC.dtype) == (torch.float32, torch.bfloat16)
    torch.testing.assert_close(features_RLC.float(), want_RLC, atol=0, rtol=2**-8)
