"""Rollouts of a trainer that has SGLang's `Engine` in its process: new weights of target and draft in each round."""

import json
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from sglang_dflash.pairs.tiny import pairs as tiny
from sglang_dflash.pairs.tiny.pairs import HYBRID, Pair
from tests.server.conftest import STRICT, WHOLE_BLOCKS
from tests.server.lib.oracle import Oracle
from tests.server.lib.rehearsals import SM90
from tests.server.test_doors import ROOT
from tests.server.test_weight_update import changed_copy

pytestmark = pytest.mark.full
N_PROMPTS, N_NEW, N_ROUNDS = 4, 32, 5
FIELDS = {
    "model_path": str(HYBRID.target), "speculative_algorithm": "DFLASH",
    "speculative_draft_model_path": str(HYBRID.draft), "device": "cpu", "dtype": "float32", "attention_backend": "fa3",
    "enable_memory_saver": True, "enable_draft_weights_cpu_backup": True, "max_running_requests": 8,
    "max_mamba_cache_size": 64, "mamba_radix_cache_strategy": "extra_buffer", "max_total_tokens": 8192,
    "mem_fraction_static": 0.5, "cuda_graph_bs_decode": [1, 2, 4], "cuda_graph_backend_prefill": "disabled",
    # Values that verl sets for every algorithm.
    "speculative_num_steps": 3, "speculative_eagle_topk": 1, "log_level": "warning",
}  # fmt: skip


def logprobs_of(expert: Oracle, prompt: list[int], answer: list[int]) -> list[float]:
    with torch.inference_mode():
        logits_LV = expert.target(torch.tensor([prompt + answer])).logits[0, len(prompt) - 1 : -1]
    return logits_LV.log_softmax(-1)[torch.arange(len(answer)), answer].tolist()


def test_five_rounds_equal_fresh_servers(tmp_path: Path, questions: Callable) -> None:
    """The weights of the rounds are changed ones and the stored ones by turns."""
    prompts, report = questions(N_PROMPTS, seed=41), tmp_path / "report.json"
    changed = Pair(changed_copy(HYBRID.target, tmp_path / "target"), changed_copy(HYBRID.draft, tmp_path / "draft"))
    pairs = [(changed, HYBRID)[i % 2] for i in range(N_ROUNDS)]
    order = {"fields": FIELDS, "prompts": prompts, "n_new": N_NEW}
    order["weights"] = [[str(pair.target), str(pair.draft)] for pair in pairs]
    env = os.environ | tiny.ENV | WHOLE_BLOCKS | STRICT | dict(SM90)
    command = [sys.executable, "-m", "tests.server.lib.rollouts", json.dumps(order), str(report)]
    ended = subprocess.run(command, cwd=ROOT, env=env, text=True, capture_output=True, timeout=900)
    assert ended.returncode == 0, ended.stderr[-2000:]
    experts = {pair: Oracle(pair, None, None) for pair in (changed, HYBRID)}
    expected = {pair: expert.expect(prompts, N_NEW) for pair, expert in experts.items()}
    assert expected[changed].token_ids != expected[HYBRID].token_ids
    for pair, answers in zip(pairs, json.loads(report.read_text()), strict=True):
        assert [answer["tokens"] for answer in answers] == expected[pair].token_ids
        found = [{n: count for n, count in enumerate(answer["accepted"]) if count} for answer in answers]
        assert found == expected[pair].steps
        for prompt, answer in zip(prompts, answers, strict=True):
            wanted = logprobs_of(experts[pair], prompt, answer["tokens"])
            assert answer["logprobs"] == pytest.approx(wanted, abs=1e-3)
