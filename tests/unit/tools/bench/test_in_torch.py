"""Benchmark with `--backend transformers`, which runs in PyTorch without a server, on the tiny dense pair."""

import json
from pathlib import Path

import pytest

from sglang_dflash.pairs.servers.errors import ServerError
from sglang_dflash.tools.bench.__main__ import run as main

TINY = Path(__file__).parents[4] / "sglang_dflash" / "assets" / "tiny_dense"
PAIR = ("--backend", "transformers", "--model", str(TINY / "target"), "--draft-model", str(TINY / "draft"))
ASKED = ("--num-prompts", "2", "--max-new-tokens", "24", "--repeats", "1")


def test_spec_generate_is_compared_with_plain_decoding(tmp_path: Path) -> None:
    main([*PAIR, *ASKED, "--output", str(tmp_path / "out")])
    document = json.loads((tmp_path / "out.json").read_text())
    off, ours = document["summary"]
    assert (off["arm"], ours["arm"], off["concurrency"]) == ("off", "ours", 1)
    assert (off["n_equal"], ours["n_equal"]) == (2, 2)
    assert (off["committed_per_step"], off["acceptance_by_position"]) == (1.0, [])
    assert ours["committed_per_step"] == pytest.approx(1 + sum(ours["acceptance_by_position"]), abs=0.01)
    assert ours["committed_per_step"] > 1.5
    assert ours["ttft_ms"]["p50"] > 0
    assert document["arms"]["ours"] | {"device": ""} == {
        "kind": "transformers", "device": "", "dtype": "float32", "block_size": 16, "model": "",
        "prefix_cache": "emptied before every turn",
    }  # fmt: skip


def test_token_id_prompts_ignore_the_end_token(tmp_path: Path) -> None:
    gate = ("--dataset", "hopeless", "--require-equal")
    main([*PAIR, *ASKED, *gate, "--output", str(tmp_path / "out")])
    rows = json.loads((tmp_path / "out.json").read_text())["rows"]
    assert [(row["n_prompt_tokens"], row["n_tokens"]) for row in rows] == [(2 * 32, 2 * 24)] * 2


def test_a_wrong_pair_is_a_one_line_error(tmp_path: Path) -> None:
    pair = ("--model", str(TINY / "target"), "--draft-model", str(tmp_path))
    with pytest.raises(ServerError, match=r"--model .*target, --draft-model .*: "):
        main(["--backend", "transformers", *pair, *ASKED, "--output", str(tmp_path / "out")])
